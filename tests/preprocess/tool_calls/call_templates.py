"""Chat templates that write calls as public ones do, one for each format."""

_AROUND = """
{%- macro bare(value) -%}
{%- if value is string -%}@quote@{{- value -}}@quote@
{%- elif value is mapping -%}{{- '{' -}}{%- for key, inner in value | dictsort -%}
{{- key ~ ':' -}}{{- bare(inner) -}}{{- ',' if not loop.last -}}{%- endfor -%}{{- '}' -}}
{%- elif value is sequence -%}[{%- for inner in value -%}{{- bare(inner) -}}{{- ',' if not loop.last -}}{%- endfor -%}]
{%- else -%}{{- value | tojson -}}{%- endif -%}
{%- endmacro -%}
{%- for tool in tools or [] -%}{{- tool | tojson -}}{%- endfor -%}
{%- for message in messages -%}
{{- '[' ~ message.role ~ ']' ~ (message.content or '') -}}
{%- if message.tool_calls -%}@begin@{%- for call in message.tool_calls -%}
{%- set name, arguments = call.function.name, call.function.arguments -%}
@call@{{- '@separator@' if not loop.last -}}
{%- endfor -%}@finish@{%- endif -%}{{- '</s>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '[assistant]' -}}{%- endif -%}
"""


def _template(call: str, separator: str = "", begin: str = "", finish: str = "", quote: str = "") -> str:
    filled = _AROUND.replace("@begin@", _written(begin)).replace("@call@", call).replace("@finish@", _written(finish))
    return filled.replace("@separator@", separator.replace("\n", "\\n")).replace("@quote@", quote)


def _written(text: str) -> str:
    return "{{- '" + text.replace("\n", "\\n") + "' -}}" if text else ""


def _json(arguments: str = "arguments", before: str = "", after: str = "") -> str:
    return (
        "{{- '{" + before + '"name": "\' ~ name ~ \'", "' + arguments + "\": ' -}}{{- arguments | tojson -}}"
        "{{- '" + after + "}' -}}"
    )


def _around(call: str, start: str, end: str) -> str:
    return _written(start) + call + _written(end)


def _tagged(start: str, name_end: str, key_start: str, key_end: str, value_end: str, end: str) -> str:
    value = "{{- inner if inner is string else inner | tojson -}}"
    argument = _written(key_start) + "{{- key -}}" + _written(key_end) + value + _written(value_end)
    arguments = "{%- for key, inner in arguments.items() -%}" + argument + "{%- endfor -%}"
    return _around("{{- name -}}" + _written(name_end) + arguments, start, end)


_PYTHONIC = (
    "{{- name ~ '(' -}}{%- for key, inner in arguments.items() -%}"
    "{{- key ~ '=' ~ (inner | tojson) -}}{{- ', ' if not loop.last -}}{%- endfor -%}{{- ')' -}}"
)
_ARGUMENTS = "{{- arguments | tojson -}}"

TEMPLATES = {
    "hermes": _template(_around(_json(), "<tool_call>\n", "\n</tool_call>"), "\n"),
    "qwen3_coder": _template(
        _tagged(
            *("<tool_call>\n<function=", ">\n", "<parameter=", ">\n", "\n</parameter>\n", "</function>\n</tool_call>")
        ),
        "\n",
    ),
    "glm45": _template(
        _tagged("<tool_call>", "\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>"), "\n"
    ),
    "minimax_m2": _template(
        _tagged('<invoke name="', '">\n', '<parameter name="', '">', "</parameter>\n", "</invoke>"),
        *("\n", "<minimax:tool_call>\n", "\n</minimax:tool_call>"),
    ),
    "mistral": _template(_around("{{- name -}}[ARGS]" + _ARGUMENTS, "[TOOL_CALLS]", "")),
    "mistral_json": _template(_json(after=', "id": "\' ~ call.id ~ \'"'), ", ", "[TOOL_CALLS] [", "]"),
    "gemma4": _template(
        _around("{{- name -}}{{- bare(arguments) -}}", "<|tool_call>call:", "<tool_call|>"), quote='<|"|>'
    ),
    "functiongemma": _template(
        _around("{{- name -}}{{- bare(arguments) -}}", "<start_function_call>call:", "<end_function_call>"),
        quote="<escape>",
    ),
    "gemma3": _template(_around(_PYTHONIC, "```tool_code\n", "\n```"), "\n"),
    "internlm": _template(_around(_json("parameters"), "<|action_start|><|plugin|>\n", "<|action_end|>\n")),
    "kimi_k2": _template(
        _around(
            "{{- 'functions.' ~ name ~ ':' ~ loop.index0 -}}<|tool_call_argument_begin|>" + _ARGUMENTS,
            *("<|tool_call_begin|>", "<|tool_call_end|>"),
        ),
        *("", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "deepseek_v3": _template(
        _around(
            # As text: this template takes no mapping.
            "{{- name + '\\n```json\\n' + arguments -}}",
            *("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```<｜tool▁call▁end｜>"),
        ),
        *("\n", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "deepseek_v31": _template(
        _around("{{- name -}}<｜tool▁sep｜>" + _ARGUMENTS, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        *("", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "llama4_json": _template(_around(_json("parameters"), "<|python_start|>", "<|python_end|>")),
    "phi4": _template(_json(), ", ", "<|tool_call|>[", "]<|/tool_call|>"),
    "granite": _template(_json(), ", ", "<|tool_call|>[", "]"),
    "cohere": _template(
        _json("parameters", before='"tool_call_id": "\' ~ loop.index0 ~ \'", ').replace('"name"', '"tool_name"'),
        *(", ", "<|START_ACTION|>[", "]<|END_ACTION|>"),
    ),
    "llama4_pythonic": _template(_PYTHONIC, ", ", "[", "]"),
    "llama3_json": _template(_json("parameters"), "; "),
}
"""By the format's name."""

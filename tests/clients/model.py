"""A model whose answers show what of a request has reached it: it answers a picture, a page, a tool's result, a wish to
think and a list of tools each in its own words. Like Qwen3.5's, its template refuses what the system says later."""

import json
from pathlib import Path

from tests.scripted_model import save_scripted_model

_TEMPLATE = """
{%- set seen = namespace(picture=false, text='') -%}
{%- for m in messages -%}
{%- if m.role == 'system' and not loop.first -%}
{{- raise_exception('System message must be at the beginning.') -}}
{%- endif -%}
{{- m.role ~ ':' -}}
{%- set seen.picture = false -%}{%- set seen.text = '' -%}
{%- if m.reasoning_content is string -%}{{- '<think>' ~ m.reasoning_content ~ '</think>' -}}{%- endif -%}
{%- if m.content is string -%}{{- m.content -}}{%- set seen.text = m.content -%}
{%- else -%}
{%- for part in m.content or [] -%}
{%- if part.type == 'image' -%}{{- '<image>' -}}{%- set seen.picture = true -%}
{%- else -%}{{- part.text -}}{%- set seen.text = seen.text ~ part.text -%}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- for call in m.tool_calls or [] -%}
{{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' -}}
{{- (call.function.arguments | tojson) ~ '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if messages[-1].role == 'tool' -%}{{- '[shown]' if seen.picture else '[told]' -}}
{%- elif 'Think' in seen.text -%}{{- '[think]' -}}
{%- elif 'Layout Detection' in seen.text -%}{{- '[layout]' -}}
{%- elif seen.picture -%}{{- '[picture]' -}}
{%- elif tools -%}
{%- set names = tools | map(attribute='function.name') | list -%}
{%- if 'StructuredOutput' in names -%}{{- '[structured]' -}}
{%- elif 'Bash' in names -%}{{- '[bash]' -}}
{%- elif 'Read' in names -%}{{- '[read]' -}}
{%- else -%}{{- '[call]' -}}{%- endif -%}
{%- else -%}{{- '[plain]' -}}{%- endif -%}
"""
_CALL = '\n{"name": "look", "arguments": {"where":'
_OF_CLAUDE_CODE = {
    "[structured]": ("StructuredOutput", {"colour": "red"}),
    "[bash]": ("Bash", {"command": "echo red"}),
    "[read]": ("Read", {"file_path": "one.png"}),
}
"""Calls of its own tools."""
_BLOCK = "<|box_start|>100 200 900 800<|box_end|><|ref_start|>title<|ref_end|><|rotate_up|>"
"""The only block of a page, as MinerU's models tell it: a special token."""
_NEXT_WORDS = {
    "[plain]": "It is",
    "It is": " red.",
    " red.": "",
    "[picture]": "A blue",
    "A blue": " circle.",
    " circle.": "",
    "[layout]": _BLOCK,
    _BLOCK: "",
    "[think]": "<think>",
    "<think>": "\nIt may be",
    "\nIt may be": " green.\n",
    " green.\n": "</think>",
    "</think>": "\n\nIt",
    "\n\nIt": " was green.",
    " was green.": "",
    "[call]": "<tool_call>",
    "<tool_call>": _CALL,
    _CALL: ' "left"}}\n',
    ' "left"}}\n': "</tool_call>",
    "</tool_call>": "",
    "[told]": "It was",
    "It was": " told.",
    " told.": "",
    "[shown]": "It was shown",
    "It was shown": " a picture.",
    " a picture.": "",
}


def save_model(folder: Path) -> str:
    words = dict(_NEXT_WORDS)
    for mark, (name, arguments) in _OF_CLAUDE_CODE.items():
        words[mark] = f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        words[words[mark]] = ""
    return save_scripted_model(folder, words, _TEMPLATE, [_BLOCK])

"""The formats of tool calls that models are trained on, and how the one of a chat template is found."""

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

from raylens.preprocess.tool_calls.call_grammar import CallGrammar, Schema, alternatives
from raylens.preprocess.tool_calls.call_syntax import (
    BareKeyCall,
    CallSyntax,
    JsonCall,
    NamedJsonCall,
    PythonicCall,
    TaggedCall,
)


def _long_id(name: str, index: int) -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id(name: str, index: int) -> str:
    """Mistral's templates take no other."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def _kimi_id(name: str, index: int) -> str:
    """What Kimi's models write themselves, and know the results by."""
    return f"functions.{name}:{index}"


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How a model writes calls: `begin`, the calls with `separator` between two, `finish`. A call is `start`, the call
    in its `syntax`, `end`.

    `is_alone`: calls stand at the beginning of an answer or not at all. `new_id`: makes a call's id from its function's
    name and its index. `special_tokens`: ids by text, of the marks whose text no other tokens may spell in a grammar.
    `has_hidden_marks`: an answer without special tokens lacks some of the marks."""

    name: str
    syntax: CallSyntax
    start: str = ""
    end: str = ""
    begin: str = ""
    finish: str = ""
    separator: str = ""
    is_alone: bool = False
    new_id: Callable[[str, int], str] = _long_id
    special_tokens: Mapping[str, int] = field(default_factory=dict, hash=False)
    has_hidden_marks: bool = False

    @property
    def mark(self) -> str:
        """The mark at which a call may begin; empty: at an opening bracket."""
        return next(iter((self.begin + self.start).split()), "")

    @property
    def marks(self) -> str:
        """All texts of the format, one behind the other."""
        of_syntax = (getattr(self.syntax, one.name) for one in fields(self.syntax))
        return " ".join([self.begin, self.start, *of_syntax, self.end, self.finish])

    def grammar(self, functions: Mapping[str, Schema], *, is_single: bool, max_chars: int) -> str:
        """Returns the grammar of an answer that calls one of the functions, or several in a row. Raises
        InvalidRequestError for one of more than `max_chars`."""
        grammar = CallGrammar(self.special_tokens, max_chars)
        calls = [self.syntax.grammar(name, schema, grammar) for name, schema in functions.items()]
        call = grammar.rule(f"{grammar.literal(self.start)} {alternatives(calls)} {grammar.literal(self.end)}")
        others = "" if is_single else f"({grammar.literal(self.separator)} {call})*"
        return grammar.text(f"{grammar.literal(self.begin)} {call} {others} {grammar.literal(self.finish)}")


FORMATS = (
    ToolCallFormat("hermes", JsonCall(), "<tool_call>\n", "\n</tool_call>", separator="\n"),
    ToolCallFormat(
        "qwen3_coder",
        TaggedCall(">\n", "<parameter=", ">\n", "\n</parameter>\n"),
        *("<tool_call>\n<function=", "</function>\n</tool_call>"),
        separator="\n",
    ),
    ToolCallFormat(
        "glm45",
        TaggedCall("\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        *("<tool_call>", "</tool_call>"),
        separator="\n",
    ),
    ToolCallFormat(
        "minimax_m2",
        TaggedCall('">\n', '<parameter name="', '">', "</parameter>\n"),
        *('<invoke name="', "</invoke>", "<minimax:tool_call>\n", "\n</minimax:tool_call>"),
        separator="\n",
    ),
    ToolCallFormat(
        "mistral",
        NamedJsonCall("[ARGS]", name_pattern=r"([\w.-]+)(?:\[CALL_ID\].*)?"),
        "[TOOL_CALLS]",
        new_id=_mistral_id,
    ),
    ToolCallFormat(
        "mistral_json",
        JsonCall(),
        begin="[TOOL_CALLS] [",
        finish="]",
        separator=", ",
        new_id=_mistral_id,
    ),
    ToolCallFormat("gemma4", BareKeyCall('<|"|>'), "<|tool_call>call:", "<tool_call|>"),
    ToolCallFormat("functiongemma", BareKeyCall("<escape>"), "<start_function_call>call:", "<end_function_call>"),
    ToolCallFormat("gemma3", PythonicCall(), "```tool_code\n", "\n```", separator="\n"),
    ToolCallFormat("internlm", JsonCall("parameters"), "<|action_start|><|plugin|>\n", "<|action_end|>\n"),
    ToolCallFormat(
        "kimi_k2",
        NamedJsonCall("<|tool_call_argument_begin|>", "functions.{}:0", r"(?:functions\.)?([\w.-]+?)(?::\d+)?"),
        *("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        new_id=_kimi_id,
    ),
    ToolCallFormat(
        "deepseek_v3",
        NamedJsonCall("\n```json\n"),
        *("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```<｜tool▁call▁end｜>"),
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        separator="\n",
    ),
    ToolCallFormat(
        "deepseek_v31",
        NamedJsonCall("<｜tool▁sep｜>"),
        *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    ToolCallFormat("llama4_json", JsonCall("parameters"), "<|python_start|>", "<|python_end|>"),
    ToolCallFormat("phi4", JsonCall(), begin="<|tool_call|>[", finish="]<|/tool_call|>", separator=", "),
    ToolCallFormat("granite", JsonCall(), begin="<|tool_call|>[", finish="]", separator=", "),
    ToolCallFormat(
        "cohere",
        JsonCall("parameters", name="tool_name"),
        begin="<|START_ACTION|>[",
        finish="]<|END_ACTION|>",
        separator=", ",
    ),
    ToolCallFormat("llama4_pythonic", PythonicCall(), begin="[", finish="]", separator=", ", is_alone=True),
    ToolCallFormat("llama3_json", JsonCall("parameters"), separator="; ", is_alone=True),
)
"""In the order in which a template is tried: what one reads, one before it may not read, too. Their names are vLLM's
where vLLM knows them."""

"""From the form that a request asks for to a matcher of llguidance. Without torch, so that a process starts quickly."""

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from, regex_to_lark

_MAX_REASON_CHARS = 300

# Bounded, so that a model in doubt does not fill its answer with blanks.
_JSON_WHITESPACE = r"[ \n\r\t]{0,16}"


class GrammarError(ValueError):
    """Why a grammar cannot be compiled or followed, in one line."""


def make_matcher(tokenizer: LLTokenizer, field: str, text: str) -> LLMatcher:
    """Compiles one `StructuredOutput.specification`. Raises GrammarError.

    Much of the work is left for the first mask. Neither of the two holds the interpreter's lock.
    """
    try:
        # Errors go to a client and to logs: without the parser's state.
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(tokenizer, _grammar(field, text), log_level=0, limits=limits)
    except ValueError as error:
        raise GrammarError(_reason(str(error))) from error
    check(matcher)
    return matcher


def check(matcher: LLMatcher) -> None:
    """Raises GrammarError where the matcher has failed; it then stays so."""
    if matcher.is_error():
        raise GrammarError(_reason(matcher.get_error()))


def _reason(error: str) -> str:
    """The library's first line."""
    line = error.strip().split("\n")[0][:_MAX_REASON_CHARS]
    return "no text matches it" if line == "NoExtensionBias" else line


def _grammar(field: str, text: str) -> str:
    if field in ("json_schema", "json_object"):
        return LLMatcher.grammar_from_json_schema(text, {"whitespace_pattern": _JSON_WHITESPACE})
    if field == "regex":
        # As in JavaScript and JSON Schema \d and \w are ASCII, which is what patterns of digits and names mean.
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(text, 'dw')}/")
    if field == "choice":
        return grammar_from("choice", text)
    return grammar_from("grammar", text)

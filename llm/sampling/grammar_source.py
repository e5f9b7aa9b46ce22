"""Makes llguidance's matcher for a request's structured output. Imports no torch, so that `grammar_check`'s child
process starts fast."""

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from, regex_to_lark

_MAX_REASON_CHARS = 300

# Whitespace is bounded, so that an unsure model does not fill its answer with it.
_JSON_WHITESPACE = r"[ \n\r\t]{0,16}"


class GrammarError(ValueError):
    """A grammar cannot be compiled or followed. The message is the reason in one line."""


def make_matcher(tokenizer: LLTokenizer, field: str, text: str) -> LLMatcher:
    """Compiles one `StructuredOutput.specification` and returns its matcher. Raises GrammarError.

    Much of the work happens in the matcher's first mask. Both this call and the mask release the GIL.
    """
    try:
        # Errors go to a client and to logs, so they must not hold the parser's state.
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(tokenizer, _grammar(field, text), log_level=0, limits=limits)
    except ValueError as error:
        raise GrammarError(_reason(str(error))) from error
    check(matcher)
    return matcher


def check(matcher: LLMatcher) -> None:
    """Raises GrammarError if the matcher has failed. A failed matcher never recovers."""
    if matcher.is_error():
        raise GrammarError(_reason(matcher.get_error()))


def _reason(error: str) -> str:
    """Returns the first line of the library's error, cut to `_MAX_REASON_CHARS`. An error with only a name becomes
    plain words."""
    line = error.strip().split("\n")[0][:_MAX_REASON_CHARS]
    return "no text matches it" if line == "NoExtensionBias" else line


def _grammar(field: str, text: str) -> str:
    if field in ("json_schema", "json_object"):
        return LLMatcher.grammar_from_json_schema(text, {"whitespace_pattern": _JSON_WHITESPACE})
    if field == "regex":
        # \d and \w match ASCII only, as in JavaScript and JSON Schema.
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(text, 'dw')}/")
    if field == "choice":
        return grammar_from("choice", text)
    return grammar_from("grammar", text)

"""The arguments of calls that clients send."""

import pytest
from pydantic import ValidationError

from raylens.deployments.api.tools import FunctionCall


def test_some_servers_write_no_text_for_no_arguments() -> None:
    assert FunctionCall(name="f", arguments=" ").arguments == "{}"


@pytest.mark.parametrize("arguments", ["x", "[]", '{"a": NaN}', r'{"a": "\ud800"}', '{"a": ' * 70 + "1" + "}" * 70])
def test_arguments_that_no_prompt_can_hold_are_refused(arguments: str) -> None:
    with pytest.raises(ValidationError):
        FunctionCall(name="weather", arguments=arguments)

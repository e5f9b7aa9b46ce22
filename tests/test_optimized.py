"""Python without assertions (-O) refuses the same requests: no check of user input is an `assert`."""

import subprocess
import sys
from pathlib import Path

import pytest

REFUSALS = {
    "sampling": "from raylens.llm.sampling.params import SamplingParams; SamplingParams(n=1000)",
    "structured output": "from raylens.llm.sampling.structured_output import *; StructuredOutput(choice=())",
    "picture": "from raylens.preprocess.media import *; decode_image(b'no picture', MediaLimits())",
    "size": "from raylens.preprocess.media import *; check_image_size((9**6, 9**6), MediaLimits())",
    "embeddings": """
import torch
from raylens.llm.request_checks import check_embeddings
from raylens.preprocess.schema import PlaceholderRange
check_embeddings(0, PlaceholderRange(0, 4), torch.zeros(5, 8), 8)""",
    "room": """
from raylens.llm.request_checks import check_room
from raylens.llm.sampling.params import SamplingParams
check_room(10, SamplingParams(max_tokens=16), 15)""",
    "tensors": """
from raylens.preprocess.media import MediaLimits
from raylens.preprocess.precomputed import read_precomputed
read_precomputed(b'no tensors', {}, limits=MediaLimits())""",
    "prompt": """
from raylens.deployments.api.prompts import prompt_and_media
prompt_and_media('<img src="data:image/png;base64,AA==">', {"image": "https://example.com"}, "prompt")""",
    "cost": """
from raylens.deployments.endpoint.admission import *
from raylens.deployments.config import AdmissionConfig
with Admission(AdmissionConfig(), print).ticket(Caller(None, "")) as ticket:
    ticket.take(RequestCost(bytes=2**40))""",
}
BODIES = {
    "tools of a chat": """
from raylens.deployments.api.chat import ChatCompletionRequest
ChatCompletionRequest(messages=[{"role": "user", "content": "Hello"}], tool_choice="required")""",
    "tools of a response": """
from raylens.deployments.api.responses import ResponsesRequest
ResponsesRequest(input="Hello", tool_choice="required")""",
}


@pytest.mark.slow
def test_user_input_is_refused_without_assertions() -> None:
    """All in one process: the libraries have no compiled files for -O, so that each process would compile them."""
    code = f"""
from raylens.preprocess.schema import InvalidRequestError
from pydantic import ValidationError
assert False, "assertions are off"
for name, act in {REFUSALS | BODIES!r}.items():
    try:
        exec(act, {{}})
    except (InvalidRequestError, ValidationError) as error:
        print(name)
"""
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-O", "-c", code], cwd=root, capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines() == [*REFUSALS, *BODIES], done.stderr

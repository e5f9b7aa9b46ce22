"""The program `llm`, with models for servers like OpenAI's: by chat completions and by the Responses API."""

import json
import tempfile
from pathlib import Path

from features import (
    ABOUT_PICTURE,
    AFTER_THOUGHT,
    KEY,
    MODEL,
    PICTURE_FILE,
    PLAIN,
    QUESTION,
    SCHEMA,
    THINK,
    THOUGHT,
    TOLD,
    URL,
    is_equal,
    report,
    run,
)

KINDS = ("chat", "responses")
FOLDER = Path(tempfile.mkdtemp())
LOOK = """
import llm

def look(where: str):
    assert where == "left"
    return llm.ToolOutput("red", {attachments})
"""


def ask(kind, *arguments):
    return run("llm", "-m", kind, *arguments, LLM_USER_PATH=str(FOLDER))


def is_answered(answer, *arguments):
    for kind in KINDS:
        is_equal(ask(kind, *arguments).stdout.strip(), answer)


def chat():
    is_answered(PLAIN, "--no-stream", QUESTION)


def stream():
    is_answered(PLAIN, QUESTION)


def picture():
    is_answered(ABOUT_PICTURE, "-a", PICTURE_FILE, QUESTION)


def structured():
    for kind in KINDS:
        is_equal(json.loads(ask(kind, "--schema", json.dumps(SCHEMA), QUESTION).stdout), {"colour": "red"})


def tools_streamed():
    is_answered(TOLD, "--functions", LOOK.format(attachments=[]), QUESTION)


def tool_picture():
    # It shows the picture in a message of the user behind the tool's.
    shown = LOOK.format(attachments=f"[llm.Attachment(path={PICTURE_FILE!r})]")
    is_answered(ABOUT_PICTURE, "--functions", shown, QUESTION)


def thinking():
    is_answered(AFTER_THOUGHT, "--hide-reasoning", THINK)
    # In chat completions it drops the thoughts.
    is_equal(ask("responses", THINK).stderr.strip(), THOUGHT)


models = [
    {
        "model_id": kind,
        "model_name": MODEL,
        "api_base": f"{URL}/v1",
        "api_key_name": "raylens",
        "responses": kind == "responses",
        "vision": True,
        "supports_schema": True,
        "supports_tools": True,
    }
    for kind in KINDS
]
(FOLDER / "extra-openai-models.yaml").write_text(json.dumps(models))
(FOLDER / "keys.json").write_text(json.dumps({"raylens": KEY}))
report(chat, stream, picture, structured, tools_streamed, tool_picture, thinking)

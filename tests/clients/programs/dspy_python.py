"""`dspy`: its language model, which its modules call through `litellm`."""

import dspy
from features import (
    ABOUT_PICTURE,
    AFTER_THOUGHT,
    KEY,
    MODEL,
    PARTS,
    PLAIN,
    QUESTION,
    THINK,
    THOUGHT,
    URL,
    is_equal,
    report,
)

dspy.configure(lm=dspy.LM(f"hosted_vllm/{MODEL}", api_base=f"{URL}/v1", api_key=KEY, cache=False))


def chat():
    is_equal(dspy.settings.lm(QUESTION), [PLAIN])


def picture():
    is_equal(dspy.settings.lm(messages=[{"role": "user", "content": PARTS}]), [ABOUT_PICTURE])


def thinking():
    (answer,) = dspy.settings.lm(THINK)
    is_equal((answer["reasoning_content"].strip(), answer["text"].strip()), (THOUGHT, AFTER_THOUGHT))


only = "its modules write calls as fields of their own"
report(
    chat,
    picture,
    thinking,
    stream="its streams follow the fields of a text format of its own",
    structured="it sends schemas only to models that litellm lists",
    tools_streamed=only,
    tool_picture=only,
)

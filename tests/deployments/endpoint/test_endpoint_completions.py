"""Completions, and what becomes of prompts: text and ids, with pictures in the text or beside them."""

from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI
from transformers import AutoTokenizer

from raylens.preprocess.data_url import data_url
from tests.pictures import disc, encoded, user_message

RED = encoded(disc("red", (96, 96), (36, 36)))
BLUE = encoded(disc("blue", (96, 96), (36, 36)))
JPEG = encoded(disc("blue", (96, 96), (36, 36)), "JPEG", quality=95)


def in_text(picture: bytes, kind: str = "png") -> str:
    return f'<img src="{data_url(picture, f"image/{kind}")}">'


def complete(client: OpenAI, prompt: Any, **options: Any) -> Any:
    return client.completions.create(model="shapes", prompt=prompt, **options)


def text_of(client: OpenAI, prompt: Any, **options: Any) -> str:
    return str(complete(client, prompt, **options).choices[0].text)


QUESTION = "\nWhat colour is the circle? ASSISTANT:"


def test_pictures_in_the_text_of_a_prompt(client: OpenAI) -> None:
    assert text_of(client, f"USER: {in_text(RED)}{QUESTION}") == " red"
    assert text_of(client, f"USER: {in_text(JPEG, 'jpeg')}{QUESTION}") == " blue"
    both = f"USER: {in_text(RED)}\n{in_text(BLUE)}\nWhat is in the second image? ASSISTANT:"
    assert "blue" in text_of(client, both)
    # What is not exactly of that form is text.
    for form in (f"<img src='{data_url(RED)}'>", in_text(RED, "svg+xml"), in_text(RED).replace('">', '" >')):
        with pytest.raises(BadRequestError):
            complete(client, f"USER: {form}" + " word" * 3000)


def test_pictures_beside_a_prompt_of_text_or_ids(client: OpenAI, app_url: str) -> None:
    beside: Any = {"extra_body": {"multi_modal_data": {"image": data_url(RED)}}}
    prompt = f"USER: <image>{QUESTION}"
    assert text_of(client, prompt, **beside) == " red"
    body = {"prompt": prompt, "multi_modal_data": {"image": [{"url": data_url(RED), "uuid": "red one"}]}}
    rendered = httpx.post(f"{app_url}/render", json=body, timeout=60).json()
    ids = rendered["prompt_token_ids"]
    assert text_of(client, ids, **beside) == " red", "placeholders expanded already"
    (item,) = rendered["items"]
    short = [*ids[: item["offset"]], 3, *ids[item["offset"] + item["length"] :]]
    assert text_of(client, short, **beside) == " red"
    with pytest.raises(BadRequestError, match="multi_modal_data, too"):
        complete(client, f"USER: {in_text(RED)}{QUESTION}", **beside)
    with pytest.raises(BadRequestError, match="1 image placeholders for 0"):
        complete(client, prompt)
    with pytest.raises(BadRequestError, match="multi_modal_data: goes with one prompt, not with 2"):
        complete(client, [prompt, prompt], **beside)


def test_several_prompts_with_several_answers_each(client: OpenAI) -> None:
    prompts = [f"USER: {in_text(RED)}{QUESTION}", f"USER: {in_text(BLUE)}{QUESTION}", "USER: Hello ASSISTANT:"]
    answer = complete(client, prompts, n=2, max_tokens=3)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices][:4] == [" red", " red", " blue", " blue"]
    alone = [complete(client, prompt, n=2, max_tokens=3).usage for prompt in prompts]
    assert answer.usage.total_tokens == sum(usage.total_tokens for usage in alone)
    streamed: dict[int, str] = {}
    for event in complete(client, prompts, n=2, max_tokens=3, stream=True):
        for choice in event.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + choice.text
    assert [streamed[index] for index in range(6)] == [choice.text for choice in answer.choices]
    with pytest.raises(BadRequestError, match="token ids must be"):
        complete(client, [[1, 2], [10**6]])


def test_echo_tells_the_prompt_with_its_log_probabilities(client: OpenAI) -> None:
    prompt = "USER: Hello ASSISTANT:"
    answer = complete(client, prompt, echo=True, logprobs=2, max_tokens=2).choices[0]
    assert answer.text.startswith(prompt)
    scored = answer.logprobs
    assert scored.token_logprobs[0] is None
    assert all(value <= 0 for value in scored.token_logprobs[1:])
    assert "".join(scored.tokens[1:]).lstrip().startswith(prompt)
    assert len({len(column) for column in scored.model_dump().values()}) == 1
    only = complete(client, prompt, echo=True, logprobs=2, max_tokens=0).choices[0]
    assert only.text == prompt
    assert only.logprobs.tokens == scored.tokens[:-2]
    assert only.finish_reason == "length"
    ids = [1, 68, 428, 408]
    assert complete(client, ids, echo=True, max_tokens=1).choices[0].text.startswith("<s>a red circle")


def test_an_answer_goes_on_in_the_text_of_its_prompt(client: OpenAI) -> None:
    prompt = f"USER: <image>{QUESTION}"
    beside: Any = {"echo": True, "logprobs": 0, "extra_body": {"multi_modal_data": {"image": data_url(RED)}}}
    answer = complete(client, prompt, **beside).choices[0]
    assert answer.text == f"{prompt} red"
    scored = answer.logprobs
    assert (scored.tokens[-2:], scored.text_offset[-2:]) == ([" red", "</s>"], [len(prompt), len(prompt) + 4])
    assert "".join(event.choices[0].text for event in complete(client, prompt, stream=True, **beside)) == answer.text
    assert text_of(client, prompt, stop=" red", **{**beside, "echo": False}) == ""
    assert text_of(client, f"{prompt} red", **beside) == f"{prompt} red", "as often as it is called"


def test_an_answer_completes_the_character_in_which_its_prompt_ends(client: OpenAI, shapes: str) -> None:
    ids = AutoTokenizer.from_pretrained(shapes)("a 😀", add_special_tokens=False)["input_ids"]
    for num_missing, expected in ((1, "😀"), (2, "")):
        options: Any = {"logprobs": 0, "max_tokens": 1, "logit_bias": {str(ids[-num_missing]): 100}}
        answer = complete(client, ids[:-num_missing], **options).choices[0]
        assert (answer.text, answer.logprobs.text_offset) == (expected, [0])
    options = {"logprobs": 0, "max_tokens": 1, "logit_bias": {str(ids[-1]): 100}}
    echoed = complete(client, ids[:-1], echo=True, **options).choices[0]
    assert (echoed.text, echoed.logprobs.text_offset[-1]) == ("a 😀", 2)


def test_each_of_several_answers_begins_with_the_echo(client: OpenAI) -> None:
    prompts = ["USER: Hello ASSISTANT:", "USER: Who are you? ASSISTANT:"]
    options: Any = {"echo": True, "logprobs": 1, "temperature": 1.0, "seed": 1}
    whole = complete(client, prompts, n=2, max_tokens=3, **options).choices
    for choice in whole:
        prompt = prompts[choice.index // 2]
        alone = complete(client, prompt, max_tokens=0, **options).choices[0]
        scored, of_prompt = choice.logprobs.model_dump(), alone.logprobs.model_dump()
        for name, column in of_prompt.items():
            assert len(column) > 5
            assert scored[name][: len(column)] == column, name
        rest = zip(scored["tokens"], scored["text_offset"], strict=True)
        assert choice.text == prompt + "".join(token for token, at in rest if at >= len(prompt) and token != "</s>")
    streamed = [""] * len(whole)
    offsets: list[list[int]] = [[] for _ in whole]
    for event in complete(client, prompts, n=2, max_tokens=3, stream=True, **options):
        (choice,) = event.choices
        streamed[choice.index] += choice.text
        offsets[choice.index] += choice.logprobs.text_offset
    assert streamed == [choice.text for choice in whole]
    assert offsets == [choice.logprobs.text_offset for choice in whole]
    assert [choice.text for choice in complete(client, prompts, echo=True, n=2, max_tokens=0).choices] == [
        prompt for prompt in prompts for _ in range(2)
    ]


def test_a_token_of_a_padded_vocabulary_has_a_name(client: OpenAI) -> None:
    """The bundled model has 768 logits and 657 tokens."""
    options: Any = {"max_tokens": 1, "logit_bias": {"700": 100}}
    scored = complete(client, [1, 68, 701], logprobs=2, echo=True, **options).choices[0].logprobs
    assert scored.tokens[-2:] == ["<[701]>", "<[700]>"]
    chat = client.chat.completions.create(
        model="shapes", messages=[user_message("Hello")], logprobs=True, top_logprobs=2, **options
    )
    (token,) = chat.choices[0].logprobs.content
    assert (token.token, bytes(token.bytes)) == ("<[700]>", b"<[700]>")
    assert chat.choices[0].message.content == ""


def test_a_prompt_over_the_context_is_refused_or_cut_from_the_left(client: OpenAI, app_url: str) -> None:
    long = f"USER: {in_text(BLUE)}" + "word " * 3000 + f"{in_text(RED)}{QUESTION}"
    with pytest.raises(BadRequestError) as caught:
        complete(client, long)
    assert caught.value.code == "context_length_exceeded"
    answer = complete(client, long, extra_body={"truncate_prompt_tokens": -1})
    body = {"prompt": long, "truncate_prompt_tokens": -1, "max_tokens": 16}
    rendered = httpx.post(f"{app_url}/render", json=body, timeout=60).json()
    assert len(rendered["prompt_token_ids"]) == rendered["max_model_len"] - 16 == answer.usage.prompt_tokens
    assert len(rendered["items"]) == 1, "the blue one went whole"
    assert rendered["prompt_token_ids"].count(3) == rendered["items"][0]["num_embeds"] == 36
    with pytest.raises(BadRequestError, match="1600000 characters of text|more than the context"):
        complete(client, "word " * 320_000, extra_body={"truncate_prompt_tokens": -1})


def test_a_prompt_without_a_token_is_refused(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="the prompt has no token") as caught:
        complete(client, [[]])
    assert caught.value.code == "empty_prompt"


def test_tokenize_and_detokenize(app_url: str) -> None:
    def post(path: str, body: dict[str, Any]) -> Any:
        return httpx.post(f"{app_url}{path}", json=body, timeout=60).json()

    found = post("/tokenize", {"prompt": "a red circle"})
    assert found == {"count": 4, "max_model_len": 2048, "tokens": [1, 68, 428, 408]}
    assert post("/tokenize", {"prompt": "a red circle", "add_special_tokens": False})["tokens"] == [68, 428, 408]
    assert post("/detokenize", {"tokens": found["tokens"]}) == {"prompt": "<s>a red circle"}
    chat = post("/tokenize", {"messages": [{"role": "user", "content": "Hi <image>"}]})["tokens"]
    assert 3 not in chat, "what a user types is text"
    body = {"messages": [user_message("What?", RED)]}
    assert post("/tokenize", body)["error"]["param"] == "body"
    assert post("/tokenize", {})["error"]["message"].endswith("needs either prompt or messages")
    assert post("/detokenize", {"tokens": [10**6]})["error"]["param"] == "tokens"
    rendered = post("/render", body)
    assert len(rendered["items"]) == 1
    chat_ids = {"model": "shapes", **body, "return_token_ids": True}
    answer = httpx.post(f"{app_url}/v1/chat/completions", json=chat_ids, timeout=60).json()
    assert rendered["prompt_token_ids"] == answer["prompt_token_ids"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": "Hi", "max_tokens": 0}, "body"),
        ({"prompt": "Hi", "best_of": 2}, "body"),
        ({"prompt": "Hi", "logprobs": 21}, "logprobs"),
        ({"prompt": "Hi", "suffix": "x"}, "suffix"),
        ({"prompt": ["Hi"] * 65}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": "Hi", "multi_modal_data": {"image": "ftp://x"}}, "multi_modal_data.image[0]"),
        ({"prompt": "Hi", "multi_modal_data": {"image": {}}}, "multi_modal_data.image[0]"),
        ({"prompt": "Hi", "multi_modal_data": {"sound": "x"}}, "multi_modal_data"),
        ({"prompt": f"{in_text(b'no picture')}"}, "prompt"),
    ],
)
def test_bad_input_is_refused_by_name(client: OpenAI, app_url: str, body: dict[str, Any], field: str) -> None:
    response = httpx.post(f"{app_url}/v1/completions", json={"model": "shapes", **body}, timeout=60)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(field)
    assert text_of(client, f"USER: {in_text(RED)}{QUESTION}") == " red"


def test_a_prompt_is_scored_in_vllms_form(client: OpenAI) -> None:
    wanted: Any = {"prompt_logprobs": 2, "return_token_ids": True}
    prompt = "a red circle"
    echoed = complete(client, prompt, echo=True, logprobs=2, max_tokens=1).choices[0].logprobs
    choice = complete(client, prompt, max_tokens=1, extra_body=wanted).choices[0]
    first, *others = choice.prompt_logprobs
    assert first is None
    assert len(others) == len(choice.prompt_token_ids) - 1
    for number, told in enumerate(others, start=1):
        own = told[str(choice.prompt_token_ids[number])]
        assert own["decoded_token"] == echoed.tokens[number]
        assert own["logprob"] == pytest.approx(echoed.token_logprobs[number], abs=1e-4)
        likeliest = [one for one in told.values() if one["rank"] <= 2]
        assert {one["decoded_token"] for one in likeliest} <= echoed.top_logprobs[number].keys()
        assert sorted(one["rank"] for one in likeliest) == [1, 2]
        assert len(told) == 2 + (own["rank"] > 2)
    chat = client.chat.completions.create(
        model="shapes",
        messages=[user_message("What?", RED)],
        max_tokens=1,
        extra_body=wanted,
    )
    assert chat.model_extra is not None
    ids, scores = chat.model_extra["prompt_token_ids"], chat.model_extra["prompt_logprobs"]
    assert scores[0] is None
    assert all(str(token_id) in told for token_id, told in zip(ids[1:], scores[1:], strict=True))
    with pytest.raises(BadRequestError, match="prompt_logprobs come with a whole answer only"):
        complete(client, prompt, stream=True, extra_body=wanted)


def test_log_probabilities_name_tokens_by_their_ids(client: OpenAI) -> None:
    fields: Any = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = complete(client, "Hello", logprobs=1, max_tokens=4, extra_body=fields).choices[0]
    assert choice.logprobs.tokens == [f"token_id:{one}" for one in choice.token_ids]
    assert all(name.startswith("token_id:") for top in choice.logprobs.top_logprobs for name in top)
    messages: Any = [{"role": "user", "content": "Hello"}]
    chat = client.chat.completions.create(
        model="shapes", messages=messages, logprobs=True, top_logprobs=1, max_tokens=4, extra_body=fields
    ).choices[0]
    assert chat.logprobs is not None
    assert chat.logprobs.content is not None
    assert chat.model_extra is not None
    assert [one.token for one in chat.logprobs.content] == [f"token_id:{one}" for one in chat.model_extra["token_ids"]]

"""Which tokens may come, where an answer ends and where one goes on, over HTTP."""

import json
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from raylens.deployments.launch.demo import picture_part
from tests.pictures import disc, encoded

HELLO = [{"role": "user", "content": "Who are you?"}]
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
LIMITS = {CHAT: "max_tokens", COMPLETIONS: "max_tokens", RESPONSES: "max_output_tokens"}


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    prompt: dict[str, dict[str, Any]] = {
        CHAT: {"messages": HELLO},
        COMPLETIONS: {"prompt": "USER: Who are you? ASSISTANT:"},
    }
    return {"model": "shapes", **prompt.get(path, {"input": "Who are you?"}), LIMITS[path]: 12, **fields}


def post(app_url: str, path: str = CHAT, **fields: Any) -> Any:
    response = httpx.post(f"{app_url}{path}", json=body_of(path, **fields), timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def text_of(app_url: str, path: str = CHAT, **fields: Any) -> str:
    """The answer's text, whole and out of a stream: both are the same."""
    answer = post(app_url, path, **fields)
    if path == RESPONSES:
        text = "".join(part["text"] for item in answer["output"] for part in item["content"])
    else:
        text = answer["choices"][0]["message"]["content"] if path == CHAT else answer["choices"][0]["text"]
    pieces = [piece for event in events(app_url, path, **fields) if (piece := _piece(event))]
    assert "".join(pieces) == text
    return str(text)


def events(app_url: str, path: str = CHAT, **fields: Any) -> list[Any]:
    response = httpx.post(f"{app_url}{path}", json=body_of(path, stream=True, **fields), timeout=60)
    assert response.status_code == 200, response.text
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(one) for one in data if one != "[DONE]"]


def _piece(event: Any) -> str:
    if "choices" not in event:
        return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""
    return "".join(
        choice["delta"].get("content") or "" if "delta" in choice else choice["text"] for choice in event["choices"]
    )


def refusal(app_url: str, path: str = CHAT, **fields: Any) -> tuple[str, str, str]:
    response = httpx.post(f"{app_url}{path}", json=body_of(path, **fields), timeout=60)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["code"], error["message"]


@pytest.fixture(scope="module")
def tokenizer(shapes: str) -> Any:
    return AutoTokenizer.from_pretrained(shapes)


@pytest.mark.parametrize("path", LIMITS)
def test_bad_words_never_come(app_url: str, path: str) -> None:
    free = text_of(app_url, path)
    words = free.split()
    for word in (words[0], f" {words[1]}", " ".join(words[:3])):
        assert word.strip() in free
        assert word.strip() not in text_of(app_url, path, bad_words=[word])
        for seed in range(2):
            sampled = text_of(app_url, path, bad_words=[word], temperature=1.5, seed=seed, ignore_eos=True)
            assert word.strip() not in sampled


@pytest.mark.parametrize("path", LIMITS)
def test_a_repetition_cuts_the_answer_off(app_url: str, tokenizer: Any, path: str) -> None:
    few = {"allowed_token_ids": tokenizer(" red", add_special_tokens=False)["input_ids"]}
    assert len(text_of(app_url, path, **few).split()) == 12
    wanted = {"max_pattern_size": 2, "min_pattern_size": 2, "min_count": 3}
    assert len(text_of(app_url, path, repetition_detection=wanted, **few).split()) == 6
    answer = post(app_url, path, repetition_detection=wanted, **few)
    ends = answer["status"] if path == RESPONSES else answer["choices"][0]["finish_reason"]
    assert ends == ("incomplete" if path == RESPONSES else "length")
    wanted["min_count"] = 1
    assert refusal(app_url, path, repetition_detection=wanted)[0] == "repetition_detection.min_count"


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 1}])
@pytest.mark.parametrize("path", LIMITS)
def test_no_run_of_words_comes_twice(app_url: str, tokenizer: Any, path: str, settings: dict[str, Any]) -> None:
    ids = tokenizer(" red blue circle", add_special_tokens=False)["input_ids"]
    few = {**settings, "allowed_token_ids": ids}
    words = text_of(app_url, path, vllm_xargs={"no_repeat_ngram_size": 3}, **few).split()
    runs = [tuple(words[start : start + 3]) for start in range(len(words) - 2)]
    assert len(set(runs)) == len(runs) == 10
    words = text_of(app_url, path, **few).split()
    assert len({tuple(words[start : start + 3]) for start in range(len(words) - 2)}) < 10, "it would otherwise"
    assert refusal(app_url, path, vllm_xargs={"no_repeat_ngram_size": -1})[0] == "vllm_xargs.no_repeat_ngram_size"


@pytest.mark.parametrize("settings", [{}, {"temperature": 2.0, "seed": 3}])
@pytest.mark.parametrize("path", LIMITS)
def test_only_allowed_tokens_come(app_url: str, tokenizer: Any, path: str, settings: dict[str, Any]) -> None:
    ids = tokenizer("red blue circle", add_special_tokens=False)["input_ids"]
    text = text_of(app_url, path, allowed_token_ids=[*ids, ids[0]], **settings)
    assert set(text.split()) <= {"red", "blue", "circle"}
    assert len(text.split()) == 12, "the end token is not among them"


def test_exclusions_are_refused_by_name(app_url: str) -> None:
    assert refusal(app_url, allowed_token_ids=[])[0] == "allowed_token_ids"
    assert refusal(app_url, allowed_token_ids=[5, 10**6])[0] == "allowed_token_ids"
    assert refusal(app_url, allowed_token_ids=[5], response_format={"type": "json_object"})[0] == "allowed_token_ids"
    assert refusal(app_url, bad_words=[""])[0] == "bad_words"
    assert refusal(app_url, bad_words=["x"] * 2000)[0] == "bad_words"


@pytest.mark.parametrize("path", LIMITS)
def test_top_k_of_minus_one_is_off(app_url: str, path: str) -> None:
    # Kept from the end that it would make, the model is sure of nothing.
    length = {"min_tokens": 40, LIMITS[path]: 40}
    settings: dict[str, Any] = {"temperature": 2.0, "seed": 5, **length}
    off = {text_of(app_url, path, **settings, top_k=top_k) for top_k in (-1, 0)}
    assert len(off) == 1
    assert text_of(app_url, path, **settings, top_k=1) not in off
    assert text_of(app_url, path, **settings, top_k=1) == text_of(app_url, path, **length)
    assert refusal(app_url, path, top_k=-2)[0] == "top_k"


@pytest.mark.parametrize("path", LIMITS)
def test_a_stop_string_is_told_where_it_is_asked_for(app_url: str, path: str) -> None:
    free = text_of(app_url, path)
    # Over the bounds of tokens: from inside a word into the next.
    stop = free[3 : free.index(" ", 4) + 3]
    assert " " in stop.strip()
    before = free.partition(stop)[0]
    assert text_of(app_url, path, stop=stop) == before
    assert text_of(app_url, path, stop=[stop], include_stop_str_in_output=True) == before + stop


def test_a_stop_token_is_told_where_it_is_asked_for(app_url: str, tokenizer: Any) -> None:
    answer = post(app_url, return_token_ids=True)["choices"][0]
    token_id = answer["token_ids"][2]
    first = answer["token_ids"].index(token_id)
    without = text_of(app_url, stop_token_ids=[token_id])
    assert without == tokenizer.decode(answer["token_ids"][:first])
    told = text_of(app_url, stop_token_ids=[token_id], include_stop_str_in_output=True)
    assert told == tokenizer.decode(answer["token_ids"][: first + 1])


def test_special_tokens_are_told_where_they_are_asked_for(app_url: str) -> None:
    whole = text_of(app_url, max_tokens=200)
    stopped: dict[str, Any] = {"max_tokens": 200, "skip_special_tokens": False}
    assert text_of(app_url, **stopped) == whole
    assert text_of(app_url, **stopped, include_stop_str_in_output=True) == f"{whole}</s>"
    assert "</s>" in text_of(app_url, skip_special_tokens=False, ignore_eos=True, max_tokens=60)
    assert "</s>" not in text_of(app_url, ignore_eos=True, max_tokens=60)


@pytest.mark.parametrize("path", LIMITS)
def test_a_stop_string_before_min_tokens_ends_nothing(app_url: str, path: str) -> None:
    free = text_of(app_url, path, ignore_eos=True)
    stop = free.split()[1]
    assert text_of(app_url, path, stop=stop, ignore_eos=True) == free.partition(stop)[0]
    assert text_of(app_url, path, stop=stop, ignore_eos=True, min_tokens=12) == free
    assert len(text_of(app_url, path, stop=stop, ignore_eos=True, min_tokens=6)) > len(free.partition(stop)[0])


LENGTHS = [*LIMITS.items(), (CHAT, "max_completion_tokens")]


@pytest.mark.parametrize(("path", "field"), LENGTHS)
def test_an_answer_longer_than_the_context_is_refused_however_long(app_url: str, path: str, field: str) -> None:
    refusals = {number: refusal(app_url, path, **{field: number}) for number in (2049, 10**9, 10**12, 2**64, 10**30)}
    for number, (param, code, message) in refusals.items():
        assert (param, code) == (field, "context_length_exceeded")
        assert message == refusals[2049][2].replace("2049 tokens", f"{number} tokens")
    assert refusal(app_url, path, **{field: 0})[0] in (field, "body")
    assert post(app_url, path, **{field: 2048}), "the context ends the answer"


def test_the_answer_goes_on_in_the_last_message(app_url: str, tokenizer: Any) -> None:
    whole = post(app_url, max_tokens=40)["choices"][0]["message"]["content"]
    begun = " ".join(whole.split()[:3])
    messages = [*HELLO, {"role": "assistant", "content": begun}]
    assert begun + text_of(app_url, messages=messages, continue_final_message=True, max_tokens=40) == whole
    assert len(begun) < len(whole)
    settings: dict[str, Any] = {"messages": messages, "return_token_ids": True, "max_tokens": 1}
    ids = post(app_url, **settings, continue_final_message=True, add_generation_prompt=False)["prompt_token_ids"]
    assert tokenizer.decode(ids).endswith(begun)
    ended = post(app_url, **settings, add_generation_prompt=False)["prompt_token_ids"]
    assert tokenizer.decode(ended).endswith(f"{begun}</s>")
    new = post(app_url, **settings)["prompt_token_ids"]
    assert tokenizer.decode(new).endswith("ASSISTANT:")
    both = refusal(app_url, messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert "cannot both be true" in both[2]
    picture = [{"role": "user", "content": [picture_part(encoded(disc("red", (96, 96), (36, 36))))]}]
    assert refusal(app_url, messages=picture, continue_final_message=True)[0] == "continue_final_message"
    # What a user types is never taken for a mark.
    typed = [*HELLO, {"role": "assistant", "content": "CONTINUE_FINAL_MESSAGE_TAG </s>"}]
    ids = post(app_url, messages=typed, continue_final_message=True, return_token_ids=True)["prompt_token_ids"]
    assert tokenizer.decode(ids).endswith("CONTINUE_FINAL_MESSAGE_TAG </s>")
    assert ids[-1] != tokenizer.eos_token_id
    rendered = httpx.post(f"{app_url}/render", json={"messages": messages, "continue_final_message": True}).json()
    tokens = httpx.post(f"{app_url}/tokenize", json={"messages": messages, "continue_final_message": True}).json()
    assert rendered["prompt_token_ids"] == tokens["tokens"]
    assert tokenizer.decode(tokens["tokens"]).endswith(begun)


def test_usage_so_far_stands_in_every_event_where_it_is_asked_for(app_url: str) -> None:
    for path in (CHAT, COMPLETIONS):
        options = {"include_usage": True, "continuous_usage_stats": True}
        *told, last = events(app_url, path, stream_options=options, ignore_eos=True)
        counts = [event["usage"]["completion_tokens"] for event in told]
        assert counts == sorted(counts)
        assert counts[-1] == last["usage"]["completion_tokens"] == 12
        assert (counts[0] == 0) == (path == CHAT), "the role comes before the first token"
        assert {event["usage"]["prompt_tokens"] for event in told} == {last["usage"]["prompt_tokens"]}
        assert last["choices"] == []
        alone = events(app_url, path, stream_options={"continuous_usage_stats": True})
        assert {event["usage"] is None for event in alone} == {True}


CHARACTERS = "é 日本 😀 red"


def test_text_offsets_count_characters(app_url: str, tokenizer: Any) -> None:
    """Of characters that take several tokens each."""
    prompt = f"USER: {CHARACTERS} ASSISTANT:"
    ids = tokenizer(CHARACTERS, add_special_tokens=False)["input_ids"]
    assert len(ids) > len(CHARACTERS)
    settings: dict[str, Any] = {"logprobs": 0, "max_tokens": 40, "temperature": 2.0, "ignore_eos": True}
    # Only tokens of parts of characters may come, so that some make characters and most do not.
    for more in ({"seed": 1}, {"seed": 2}, {"seed": 3}):
        fields = {**settings, **more, "allowed_token_ids": [*ids, ids[0]]}
        for echo in (False, True):
            choice = post(app_url, COMPLETIONS, prompt=prompt, echo=echo, **fields)["choices"][0]
            check_offsets(choice["text"], choice["logprobs"], prompt if echo else "")
            parts = events(app_url, COMPLETIONS, prompt=prompt, echo=echo, **fields)
            streamed = [offset for part in parts for offset in part["choices"][0]["logprobs"]["text_offset"]]
            assert streamed == choice["logprobs"]["text_offset"]


def check_offsets(text: str, logprobs: dict[str, Any], echo: str) -> None:
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[-1] <= len(text)
    whole = [
        (token, offset) for token, offset in zip(logprobs["tokens"], offsets, strict=True) if "\ufffd" not in token
    ]
    for token, offset in whole:
        if token not in ("<s>", "</s>"):
            assert text.startswith(token, offset) or text.startswith(token.lstrip(), offset), (token, offset)
    if echo:
        assert text.startswith(echo)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_tokens_named_by_id_have_their_logprobs(app_url: str, path: str) -> None:
    wanted = {"logprobs": True, "top_logprobs": 20} if path == CHAT else {"logprobs": 20}
    wanted |= {"return_tokens_as_token_ids": True, "temperature": 0}

    def named(**fields: Any) -> list[dict[str, float]]:
        (choice,) = post(app_url, path, **(wanted | fields))["choices"]
        if path == COMPLETIONS:
            return [*choice["logprobs"]["top_logprobs"]]
        return [{top["token"]: top["logprob"] for top in at["top_logprobs"]} for at in choice["logprobs"]["content"]]

    likeliest = named()
    ids = [int(token.removeprefix("token_id:")) for token in likeliest[0]][::-3]
    found = named(logprob_token_ids=ids)
    assert len(found) == len(likeliest)
    expected = {f"token_id:{one}": likeliest[0][f"token_id:{one}"] for one in ids}
    # A completion names the token of the place, too.
    assert {token: found[0][token] for token in expected} == pytest.approx(expected)
    assert len(found[0]) <= len(ids) + (path == COMPLETIONS)
    off = {"logprobs": False} if path == CHAT else {"logprobs": None}
    assert "logprob_token_ids" in refusal(app_url, path, logprob_token_ids=[1], **off)[2]
    assert refusal(app_url, path, **wanted, logprob_token_ids=[10**6])[0] == "logprob_token_ids"


@pytest.mark.parametrize("path", LIMITS)
def test_events_of_several_tokens(app_url: str, path: str) -> None:
    assert text_of(app_url, path, temperature=0, stream_interval=5) == text_of(app_url, path, temperature=0)
    longer = [event for event in events(app_url, path, temperature=0, stream_interval=5) if _piece(event)]
    assert 0 < len(longer) <= 3  # of 12 tokens
    assert refusal(app_url, path, stream_interval=0)[0] == "stream_interval"

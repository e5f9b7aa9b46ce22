"""The endpoint as clients meet it: the official client, raw HTTP, good requests and bad ones."""

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from openai import APIStatusError, BadRequestError, NotFoundError, OpenAI
from PIL import Image

from benchmarks.shapes_accuracy import TARGET, measure
from raylens.checkpoints import PICTURES
from raylens.cpu_kernels.library import kernel_library
from raylens.deployments.launch.demo import picture_part
from tests.metric_values import LATENESS_SECONDS
from tests.pictures import disc, encoded, user_message
from tests.replicas import parent, replica_pids

EXAMPLES = json.loads((PICTURES / "questions.json").read_text())
RED, BLUE = encoded(disc("red", (96, 96), (36, 36))), encoded(disc("blue", (96, 96), (36, 36)))


def ask(client: OpenAI, text: str, *pictures: bytes, **options: Any) -> Any:
    return client.chat.completions.create(model="shapes", messages=[user_message(text, *pictures)], **options)


def example_pictures(example: dict[str, Any]) -> list[bytes]:
    return [(PICTURES / name).read_bytes() for name in example["pictures"]]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example["question"])
def test_the_official_client_asks_and_streams(client: OpenAI, example: dict[str, Any]) -> None:
    pictures = example_pictures(example)
    completion = ask(client, example["question"], *pictures)
    assert completion.choices[0].message.content == example["answer"]
    assert completion.choices[0].finish_reason == "stop"

    chunks = list(ask(client, example["question"], *pictures, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == example["answer"]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage.model_copy(update={"prompt_tokens_details": None}) == completion.usage.model_copy(
        update={"prompt_tokens_details": None}  # the second time the beginning is cached
    )
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens


@pytest.mark.slow
def test_held_out_questions_are_answered_right(app_url: str) -> None:
    """The first hundred of the five hundred that `make accuracy` asks."""
    assert measure(app_url, count=100, concurrency=8) >= TARGET


def test_the_stream_ends_with_done(app_url: str) -> None:
    body = {"model": "shapes", "messages": [user_message("Hello")], "stream": True}
    response = httpx.post(f"{app_url}/v1/chat/completions", json=body, timeout=60)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [event for event in response.text.split("\n\n") if event]
    assert events[-1] == "data: [DONE]"
    assert all(event.startswith("data: {") for event in events[:-1])


def test_replicas_are_forked_from_the_process_that_has_imported_their_libraries(app_url: str) -> None:
    replicas = ("Ingress", "Shared-0", "Preprocess", "Encode", "Generate")
    pids = [pid for name in replicas for pid in replica_pids(name)]
    assert len(pids) >= len(replicas)
    for pid in pids:
        assert "raylens.deployments.cluster.worker_template" in Path(f"/proc/{parent(pid)}/cmdline").read_text()


def test_models_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["shapes"]
    assert client.models.retrieve("shapes").id == "shapes"
    with pytest.raises(NotFoundError):
        client.models.retrieve("other")


def test_conversations_with_pictures_in_the_history(client: OpenAI) -> None:
    messages: Any = [
        user_message("What colour is the circle?", RED),
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "How many shapes are there?"},
    ]
    answer = client.chat.completions.create(model="shapes", messages=messages)
    assert answer.choices[0].message.content == "one"


def test_sampling_options_reach_the_engine(client: OpenAI) -> None:
    assert ask(client, "Describe the picture.", RED, max_tokens=2).choices[0].finish_reason == "length"
    assert ask(client, "Describe the picture.", RED, max_completion_tokens=3).usage.completion_tokens == 3
    stopped = ask(client, "Describe the picture.", RED, stop=[" circle"])
    assert stopped.choices[0].message.content == "a red"
    assert stopped.choices[0].finish_reason == "stop"
    drawn = [
        ask(client, "Hi", temperature=2.0, seed=5, max_tokens=20, extra_body={"ignore_eos": True}) for _ in range(2)
    ]
    assert drawn[0].choices[0].message.content == drawn[1].choices[0].message.content
    assert drawn[0].usage.completion_tokens == 20


COLOUR_SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "sure": {"type": "boolean"}},
    "required": ["colour", "sure"],
    "additionalProperties": False,
}


def test_an_answer_has_the_form_that_was_asked_for(client: OpenAI) -> None:
    question = ("What colour is the circle?", BLUE)
    schema = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR_SCHEMA, "strict": True}}
    answer = json.loads(ask(client, *question, response_format=schema).choices[0].message.content)
    assert answer.keys() == {"colour", "sure"}
    assert answer["colour"] in ("red", "blue")
    for form, pattern in (
        ({"regex": "colour: (red|blue)"}, "colour: (red|blue)"),
        ({"choice": ["it is blue", "it is red"]}, "it is (blue|red)"),
        ({"json": COLOUR_SCHEMA}, r"(?s)\{.*\}"),
        ({"grammar": 'start: "a" | "b"'}, "[ab]"),
    ):
        choice = ask(client, *question, extra_body={"structured_outputs": form}).choices[0]
        assert re.fullmatch(pattern, choice.message.content)
        assert choice.finish_reason == "stop"


def test_any_json_object_may_be_asked_for(client: OpenAI) -> None:
    choice = ask(client, "Hello", response_format={"type": "json_object"}, max_tokens=60, seed=1).choices[0]
    assert choice.message.content.startswith("{")
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)


def test_penalties_bias_and_stop_tokens_reach_the_engine(client: OpenAI) -> None:
    def answer(extra: dict[str, Any] | None = None, **options: Any) -> Any:
        body = {"ignore_eos": True, "return_token_ids": True, **(extra or {})}
        return ask(client, "Hello", max_tokens=48, temperature=0, extra_body=body, **options).choices[0]

    plain = answer()
    assert set(answer(logit_bias={"50": 100}).token_ids) == {50}
    penalized = answer(frequency_penalty=2, presence_penalty=2)
    assert len(set(penalized.token_ids)) > len(set(plain.token_ids))
    assert answer({"repetition_penalty": 50.0}).token_ids != plain.token_ids
    stop = plain.token_ids[3]
    stopped = answer({"stop_token_ids": [stop]})
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == plain.token_ids[: plain.token_ids.index(stop) + 1]


def test_two_pictures_with_one_prompt_never_share_state(client: OpenAI) -> None:
    for _ in range(2):
        assert ask(client, "What colour is the circle?", RED).choices[0].message.content == "red"
        assert ask(client, "What colour is the circle?", BLUE).choices[0].message.content == "blue"
    order = [ask(client, "What is in the second image?", *pair) for pair in ((RED, BLUE), (BLUE, RED))]
    assert ["blue" in order[0].choices[0].message.content, "red" in order[1].choices[0].message.content] == [True, True]


def test_a_repeated_picture_is_neither_processed_nor_encoded_again(client: OpenAI) -> None:
    picture = encoded(disc("green", (101, 97)))
    first, second = (
        ask(client, "Describe the picture.", picture, extra_body={"stage_timings": True}).stage_timings
        for _ in range(2)
    )
    assert {"media_fetch", "media_decode", "processor", "encode", "prefill"} <= first["seconds"].keys()
    assert (first["embedding_cache_hits"], second["embedding_cache_hits"]) == (0, 1)
    assert {"media_decode", "processor", "encode"}.isdisjoint(second["seconds"])


def named(uuid: str, picture: bytes | None = None) -> Any:
    """A question about a picture that is sent with a name, or only named."""
    message = user_message("What colour is the circle?", *([picture] if picture else []))
    if picture is None:
        message["content"].insert(0, {"type": "image_url", "image_url": None})
    message["content"][0]["uuid"] = uuid
    return message


def test_a_named_picture_needs_to_be_sent_only_once(client: OpenAI) -> None:
    def colour(message: Any) -> str:
        return str(client.chat.completions.create(model="shapes", messages=[message]).choices[0].message.content)

    assert colour(named("first", RED)) == "red"
    assert colour(named("second", BLUE)) == "blue"
    assert colour(named("first")) == "red"
    # The name stands for what was sent last under it, and never hides what is sent now.
    assert colour(named("first", BLUE)) == "blue"
    assert colour(named("first")) == "blue"
    with pytest.raises(
        BadRequestError, match=r"messages\[0\].content\[0\].image_url: .*'never sent'.*send it"
    ) as caught:
        colour(named("never sent"))
    assert caught.value.code == "media_not_cached"


def test_clients_with_different_keys_share_nothing(client: OpenAI) -> None:
    other = client.with_options(api_key="another")
    picture = encoded(disc("purple", (96, 96), (36, 36)))
    client.chat.completions.create(model="shapes", messages=[named("secret", picture)], max_tokens=1)
    with pytest.raises(BadRequestError) as caught:
        other.chat.completions.create(model="shapes", messages=[named("secret")])
    assert caught.value.code == "media_not_cached"
    timings = {"extra_body": {"stage_timings": True}, "max_tokens": 1}
    hits = [ask(one, "Hi", picture, **timings).stage_timings["embedding_cache_hits"] for one in (client, other)]
    assert hits == [1, 0]


def test_a_repeated_beginning_is_taken_from_the_prefix_cache_of_the_same_key(client: OpenAI) -> None:
    other = client.with_options(api_key="a third")
    picture = encoded(disc("orange", (97, 97), (36, 36)))
    cached = []
    for one in (client, client, other):
        answer = ask(one, "What colour is the circle?", picture)
        assert answer.choices[0].message.content == "orange"
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, (answer.usage.prompt_tokens - 1) // 16 * 16, 0]


def test_only_the_same_salt_shares_the_prefix_cache(client: OpenAI) -> None:
    cached = [
        ask(
            client,
            "Tell me at length what colour the circle has.",
            **({"extra_body": {"cache_salt": salt}} if salt else {}),
        ).usage.prompt_tokens_details.cached_tokens
        for salt in ("", "", "one", "two", "one", "")
    ]
    assert [number > 0 for number in cached] == [False, True, False, False, True, True]


def test_sixteen_at_once_are_answered_right(client: OpenAI) -> None:
    colours = ["red", "green", "blue", "yellow", "purple", "orange", "red", "blue"]
    pictures = [encoded(disc(colour, (96 + i, 96 + i), (36, 36))) for i, colour in enumerate(colours)]
    expected_text = ask(client, "Who are you?").choices[0].message.content

    def one(index: int) -> str:
        if index % 2:
            return str(ask(client, "Who are you?").choices[0].message.content)
        return str(ask(client, "What colour is the circle?", pictures[index // 2]).choices[0].message.content)

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(one, range(16)))
    assert answers[0::2] == colours
    assert answers[1::2] == [expected_text] * 8


@pytest.fixture
def media_host() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/red.png" else 404)
            self.end_headers()
            self.wfile.write(RED if self.path == "/red.png" else b"")

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_pictures_are_fetched_by_url(client: OpenAI, media_host: str) -> None:
    message = user_message("What colour is the circle?")
    message["content"].insert(0, {"type": "image_url", "image_url": {"url": f"{media_host}/red.png"}})
    answer = client.chat.completions.create(model="shapes", messages=[message])
    assert answer.choices[0].message.content == "red"
    message["content"][0]["image_url"]["url"] = f"{media_host}/missing.png"
    with pytest.raises(BadRequestError, match="answered 404"):
        client.chat.completions.create(model="shapes", messages=[message])


def with_url(url: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


def with_file(content: bytes, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": [picture_part(content)]}]


def with_part(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part]}]


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
IMAGE_FIELD = "messages[0].content[0].image_url"
EMBEDS_FIELD = "messages[0].content[0].image_embeds"
VIDEO_FIELD = "messages[0].content[0].video_url"
AUDIO_FIELD = "messages[0].content[0].input_audio"
INPUT_FIELD = "messages[0].content[0].input_image"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"messages": with_url("data:image/png;base64,@@@")}, 400, IMAGE_FIELD),
        ({"messages": with_file(b"this is a text file")}, 400, IMAGE_FIELD),
        ({"messages": with_file(encoded(Image.new("RGB", (1, 1))))}, 400, IMAGE_FIELD),
        ({"messages": with_file(encoded(disc("red"))[:300])}, 400, IMAGE_FIELD),
        ({"messages": with_url("ftp://example.com/a.png")}, 400, IMAGE_FIELD),
        ({"messages": [user_message("Hi", *[RED] * 5)]}, 400, "messages"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "wizard", "content": "Hi"}]}, 400, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, 400, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "body"),
        ({"messages": [{"role": "user", "content": "x" * 2_000_000}]}, 400, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content[0]"),
        ({"messages": with_file(RED), "mm_processor_kwargs": {"size": 5}}, 400, "mm_processor_kwargs.size"),
        ({"messages": with_file(RED), "mm_processor_kwargs": {"x" * 999: 5}}, 400, f"mm_processor_kwargs.{'x' * 64}"),
        ({"messages": HELLO, "mm_processor_kwargs": {"\ud800": 5}}, 400, "body"),
        ({"messages": HELLO, "model": "gpt-4"}, 404, "model"),
        ({"messages": HELLO, "max_tokens": -1}, 400, "max_tokens"),
        ({"messages": HELLO, "max_tokens": 0}, 400, "max_tokens"),
        ({"messages": HELLO, "max_tokens": 2049}, 400, "max_tokens"),
        ({"messages": HELLO, "temperature": 3}, 400, "temperature"),
        ({"messages": HELLO, "top_p": 0}, 400, "top_p"),
        ({"messages": HELLO, "n": 129}, 400, "n"),
        ({"messages": HELLO, "n": 0}, 400, "n"),
        ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        ({"messages": HELLO, "top_logprobs": 2}, 400, "body"),
        ({"messages": HELLO, "stream_options": {"include_usage": True}, "stream": False}, 400, "body"),
        ({"messages": HELLO, "tools": [WEATHER]}, 400, "tools"),
        ({"messages": HELLO, "tools": [{"type": "function"}]}, 400, "tools[0].function"),
        ({"messages": HELLO, "tool_choice": "required"}, 400, "body"),
        ({"messages": [{"role": "user", "content": "5", "tool_call_id": "c"}]}, 400, "messages[0]"),
        ({"messages": HELLO, "priority": 1001}, 400, "priority"),
        ({"messages": HELLO, "truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens"),
        ({"messages": with_part({"type": "image_embeds", "image_embeds": "AAAA"})}, 400, EMBEDS_FIELD),
        ({"messages": with_part({"type": "image_embeds", "image_embeds": "@"})}, 400, EMBEDS_FIELD),
        ({"messages": with_part({"type": "video_url", "video_url": {"url": "data:;base64,AAAA"}})}, 400, VIDEO_FIELD),
        ({"messages": with_part({"type": "input_audio", "input_audio": {"data": "AAAA"}})}, 400, AUDIO_FIELD),
        ({"messages": with_part({"type": "input_image", "file_id": "file-none"})}, 404, INPUT_FIELD),
        ({"messages": with_part({"type": "input_image"})}, 400, "messages[0].content[0]"),
        ({"messages": HELLO, "stop": [""]}, 400, "stop"),
        ({"messages": HELLO, "seed": 2**70}, 400, "seed"),
        ({"messages": HELLO, "presence_penalty": 2.5}, 400, "presence_penalty"),
        ({"messages": HELLO, "repetition_penalty": 0}, 400, "repetition_penalty"),
        ({"messages": HELLO, "min_p": -0.1}, 400, "min_p"),
        ({"messages": HELLO, "logit_bias": {"50": 101}}, 400, "logit_bias"),
        ({"messages": HELLO, "logit_bias": {"1000000": 1}}, 400, "logit_bias"),
        ({"messages": HELLO, "stop_token_ids": [-1]}, 400, "stop_token_ids"),
        ({"messages": HELLO, "response_format": {"type": "json_schema"}}, 400, "response_format"),
        ({"messages": HELLO, "structured_outputs": {"regex": "("}}, 400, "structured_outputs.regex"),
        ({"messages": HELLO, "structured_outputs": {"choice": []}}, 400, "structured_outputs.choice"),
        ({"messages": HELLO, "structured_outputs": {"json": {"type": "wizard"}}}, 400, "structured_outputs.json"),
        ({"messages": HELLO, "structured_outputs": {}}, 400, "structured_outputs"),
        ({"messages": HELLO, "chat_template": "{{ 1 }}"}, 400, "chat_template"),
        ({"messages": "Hello"}, 400, "messages"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input_is_refused_by_name(
    client: OpenAI, app_url: str, body: dict[str, Any], status: int, field: str, stream: bool
) -> None:
    body = {"model": "shapes", "stream": stream, **body}
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{app_url}/v1/chat/completions", content=json.dumps(body), headers=headers, timeout=60)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (status, field, "invalid_request_error")
    assert field in error["message"]
    assert ask(client, "What colour is the circle?", RED).choices[0].message.content == "red"


@pytest.mark.parametrize(("content", "status"), [(b"{", 400), (b"\xff\xfe", 400), (b"[]", 400), (b"", 400)])
def test_bodies_that_are_no_json_object_are_refused(app_url: str, content: bytes, status: int) -> None:
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{app_url}/v1/chat/completions", content=content, headers=headers)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_unknown_paths_and_methods_answer_in_openais_form(app_url: str) -> None:
    assert httpx.get(f"{app_url}/v1/nothing").status_code == 404
    response = httpx.get(f"{app_url}/v1/chat/completions")
    assert response.status_code == 405
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_the_client_maps_errors(client: OpenAI) -> None:
    with pytest.raises(NotFoundError):
        client.chat.completions.create(model="other", messages=[user_message("Hi")])
    with pytest.raises(APIStatusError, match="at least 1 item"):
        client.chat.completions.create(model="shapes", messages=[])


def test_health_tells_every_stage(app_url: str) -> None:
    library = kernel_library()
    assert library is not None
    in_use = {"cpu_kernels": library.build}
    response = httpx.get(f"{app_url}/health")
    assert response.status_code == 200
    assert response.json() == {
        "ready": True,
        "stages": {"shared": "ready", "preprocess": "ready", "encode": "ready", "generate": "ready"},
        "details": {"encode": in_use, "generate": in_use},
    }


def read_metric(app_url: str, name: str) -> float:
    """The sum over all series of `name`, which may end in labels."""
    page = httpx.get(f"{app_url}/metrics", timeout=30).text
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name))


def settled_metrics(app_url: str, names: list[str]) -> dict[str, float]:
    """Their values once nothing is on its way any more."""
    values: dict[str, float] = {}
    for _ in range(20):
        before, values = values, {name: read_metric(app_url, name) for name in names}
        if before == values:
            break
        time.sleep(LATENESS_SECONDS)
    return values


def test_metrics_count_what_happened(client: OpenAI, app_url: str) -> None:
    names = [
        "raylens_request_success_total",
        "raylens_mm_items_total",
        "raylens_encoder_items_total",
        "raylens_time_to_first_token_seconds_count",
        "raylens_generation_tokens_total",
    ]
    before = settled_metrics(app_url, names)
    picture = encoded(disc("purple", (111, 99)))
    tokens = ask(client, "Describe the picture.", picture).usage.completion_tokens
    time.sleep(LATENESS_SECONDS)
    after = settled_metrics(app_url, names)
    assert [after[name] - before[name] for name in names] == [1, 1, 1, 1, tokens]
    assert read_metric(app_url, "raylens_request_stage_seconds_count{") > 0


def test_a_client_that_goes_away_ends_its_request(client: OpenAI, app_url: str) -> None:
    names = ["raylens_request_success_total", "raylens_generation_tokens_total"]
    before = settled_metrics(app_url, names)
    for _ in range(3):
        stream = ask(client, "Hello", stream=True, max_tokens=2000, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
    time.sleep(LATENESS_SECONDS)
    after = settled_metrics(app_url, [*names, "raylens_num_requests_running"])
    assert after["raylens_num_requests_running"] == 0
    # Each is counted once, as aborted, and far from its 2000 tokens.
    assert after[names[0]] - before[names[0]] == 3
    assert after[names[1]] - before[names[1]] < 1500

"""Models that hear, over HTTP: greedy tokens equal those of `generate` on what the model's processor makes of the same
sounds, and a client's mistake is a 400 that names the part."""

import base64
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from raylens.deployments.config import AppConfig
from raylens.deployments.launch.demo import picture_part
from raylens.deployments.launch.local_cluster import deployed_app
from raylens.preprocess.data_url import data_url
from tests.deployments.whole_model import NUM_TOKENS, WholeModel
from tests.model_coverage.small_checkpoints import save_small_checkpoint, save_with_a_talker
from tests.pictures import encoded
from tests.preprocess.parity import picture
from tests.sounds import noise, recorded, tone

LIMITS = {"audio": {"max_duration_s": 8}}
WAV = recorded(noise(1.0))
STEREO_MP3 = recorded(
    tone(1.5, 44_100), tone(1.5, 44_100, pitch=900), file_format="mp3", encoder="libmp3lame", rate=44_100
)
FLAC = recorded(noise(1.0, seed=1), file_format="flac", encoder="flac")


def in_base64(content: bytes, file_format: str) -> dict[str, Any]:
    data = base64.b64encode(content).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": file_format}}


def by_url(content: bytes) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": data_url(content, "audio/flac")}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def pictured(index: int) -> dict[str, Any]:
    return picture_part(encoded(picture(index)))


QUESTIONS: list[tuple[list[dict[str, Any]], list[int], list[bytes]]] = [
    ([in_base64(WAV, "wav"), text("What is said?")], [], [WAV]),
    ([in_base64(STEREO_MP3, "mp3"), text("What is said?")], [], [STEREO_MP3]),
    ([pictured(0), in_base64(WAV, "wav"), text("What is it?")], [0], [WAV]),
    ([by_url(FLAC), text("between"), pictured(1), by_url(WAV), text("What?")], [1], [FLAC, WAV]),
    ([pictured(1), text("What is it?")], [1], []),
]
"""The parts of a message, and its pictures and sounds. Sounds of a prompt are equally long, see
docs/preprocessing.md."""


PART = "messages[0].content[1].input_audio"
MISTAKES: list[tuple[dict[str, Any], str, str, str]] = [
    (in_base64(b"", "wav"), PART, "empty_media", "0 bytes"),
    (in_base64(WAV[: len(WAV) // 2], "wav"), PART, "corrupt_audio", "is cut off"),
    (in_base64(bytes(1000), "wav"), PART, "invalid_audio", "WAV, MP3, FLAC, Ogg, M4A, WebM or AAC"),
    (in_base64(encoded(picture(0)), "wav"), PART, "invalid_audio", "not audio of a known format"),
    (in_base64(recorded(tone(0.02)), "wav"), PART, "audio_too_short", "0.02 s long, the least is 0.1 s"),
    (in_base64(recorded(tone(8.5)), "wav"), PART, "audio_too_long", "longer than 8 s, the limit"),
    ({"type": "input_audio", "input_audio": {"data": "?"}}, PART, "invalid_base64", "not valid base64"),
    ({"type": "input_audio", "input_audio": {"format": "wav"}}, f"{PART}.data", "invalid_value", "Field required"),
    (by_url(b"x"), "messages[0].content[1].audio_url", "invalid_audio", "1 bytes"),
    ({"type": "audio_url", "audio_url": "ftp://a/b"}, "messages[0].content[1].audio_url", "invalid_media_url", "https"),
]
"""A part, the field in its error, the error's code, and words of its message."""


def content_of(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parts as a chat template has them."""
    kinds = {"image_url": "image", "input_audio": "audio", "audio_url": "audio"}
    return [{**part, "type": kinds.get(part["type"], part["type"])} for part in parts]


class Served:
    def __init__(self, url: str, suppressed: Sequence[int] = ()) -> None:
        self.url = url
        self._bias = dict.fromkeys(map(str, suppressed), -100)

    def post(self, *parts: dict[str, Any]) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": NUM_TOKENS}
        return self._sent("chat/completions", **body, return_token_ids=True)

    def _sent(self, route: str, **body: Any) -> httpx.Response:
        common = {"model": "small", "temperature": 0, "logit_bias": self._bias, "ignore_eos": True}
        return httpx.post(f"{self.url}/v1/{route}", json=common | body, timeout=120)

    def answers_in_other_ways(self, prompt: str) -> list[str]:
        """The first question as a completion, in the Responses API, by the name of its sound and by an uploaded one."""
        media = {"audio": data_url(WAV, "audio/wav")}
        completion = self._sent("completions", prompt=prompt, multi_modal_data=media, max_tokens=NUM_TOKENS).json()
        input_ = [{"role": "user", "content": [in_base64(WAV, "wav"), {"text": "What is said?"}]}]
        response = self._sent("responses", input=input_, max_output_tokens=NUM_TOKENS).json()
        self.answer([{**in_base64(WAV, "wav"), "uuid": "a sound"}])
        named = self.answer([{"type": "audio_url", "uuid": "a sound"}, text("What is said?")])
        file = httpx.post(f"{self.url}/v1/files", files={"file": ("a.wav", WAV)}, data={"purpose": "vision"}).json()
        by_id = self.answer([{"audio_url": f"upload:{file['id']}"}, text("What is said?")])
        chats = [one["choices"][0]["message"]["content"] for one in (named, by_id)]
        return [completion["choices"][0]["text"], response["output"][0]["content"][0]["text"], *chats]

    def answer(self, parts: list[dict[str, Any]]) -> Any:
        response = self.post(*parts)
        assert response.status_code == 200, response.text
        return response.json()

    def refusal(self, *parts: dict[str, Any]) -> tuple[int, str, str, str]:
        response = self.post(*parts)
        error = response.json()["error"]
        return response.status_code, error["param"], error["code"], error["message"]

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name) and 'modality="audio"' in line
        )


def settings(checkpoint: Path) -> AppConfig:
    return AppConfig.model_validate(
        {"model": str(checkpoint), "served_model_name": "small", "media": {"limits": LIMITS}}
    )


@pytest.mark.parametrize(
    "model_type",
    [
        "qwen3_omni_moe_thinker",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("qwen2_5_omni_thinker", "gemma4", "qwen2_audio")),
    ],
)
def test_answers_are_those_of_generate(model_type: str, tmp_path: Path, ray_port: int) -> None:
    own, served_folder = tmp_path / "own", tmp_path / "served"
    for folder in (own, served_folder):
        folder.mkdir()
    save_small_checkpoint(model_type, own)
    whole = WholeModel(own)
    is_thinker = model_type.endswith("_thinker")  # published with its talker
    save_with_a_talker(own, served_folder) if is_thinker else shutil.copytree(own, served_folder, dirs_exist_ok=True)
    with deployed_app(settings(served_folder), host="127.0.0.1", port=ray_port) as url:
        served = Served(url, whole.suppressed)
        questions = [one for one in QUESTIONS if model_type != "qwen2_audio" or not one[1]]  # which only hears
        with ThreadPoolExecutor(len(questions)) as pool:
            completions = list(pool.map(served.answer, [parts for parts, _, _ in questions]))
        again = served.answer(questions[1][0])
        health = httpx.get(f"{url}/health").json()
        cards = httpx.get(f"{url}/v1/models").json()["data"]
        others = served.answers_in_other_ways(whole.prompt(content_of(QUESTIONS[0][0])))
        refusals = [served.refusal(text("What?"), part) for part, *_ in MISTAKES]
        hits = served.metric("raylens_encoder_cache_hits")
    answers = [(one["prompt_token_ids"], one["choices"][0]["token_ids"]) for one in completions]
    expected = [
        whole.answer(whole.prompt(content_of(parts)), pictures, sounds) for parts, pictures, sounds in questions
    ]
    assert answers == expected
    assert len({tuple(answer) for _, answer in answers}) == len(questions), "answers must depend on the input"
    assert [one["usage"]["prompt_tokens"] for one in completions] == [len(ids) for ids, _ in expected]
    assert again["choices"][0]["token_ids"] == answers[1][1]
    assert hits >= 1, "the same sound is encoded once"
    assert health["details"]["generate"]["family"].startswith("found, self-tested: ")
    assert cards[0]["modalities"] == (["image", "audio"] if len(questions) == len(QUESTIONS) else ["audio"])
    assert others == [completions[0]["choices"][0]["message"]["content"]] * len(others)
    assert [refusal[:3] for refusal in refusals] == [(400, field, code) for _, field, code, _ in MISTAKES]
    assert all(words in message for (*_, words), (*_, message) in zip(MISTAKES, refusals, strict=True))


@pytest.mark.slow
def test_a_model_that_only_hears_says_so_of_pictures(tmp_path: Path, ray_port: int) -> None:
    save_small_checkpoint("qwen3_asr", tmp_path)
    with deployed_app(settings(tmp_path), host="127.0.0.1", port=ray_port) as url:
        served = Served(url)
        status, field, code, message = served.refusal(text("What?"), pictured(0))
        typed = f'<img src="{data_url(encoded(picture(0)))}"> What?'
        in_text = httpx.post(f"{url}/v1/completions", json={"model": "small", "prompt": typed}, timeout=120)
        assert served.answer([in_base64(WAV, "wav"), text("What?")])["usage"]["completion_tokens"] == NUM_TOKENS
    assert (status, field, code) == (400, "messages[0].content[1].image_url", "unsupported_modality")
    assert "this model takes audio, not image" in message
    assert (in_text.status_code, in_text.json()["error"]["code"]) == (400, "unsupported_modality")

"""The demonstration behind `raylens demo`: bundled pictures, real questions, over HTTP like any other client."""

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

from raylens.checkpoints import PICTURES
from raylens.preprocess.data_url import data_url

_SHOWN_STAGES = ("media_fetch", "media_decode", "processor", "encode", "prefill")


def run_demo(url: str, model: str) -> int:
    """Asks every question of checkpoints/pictures/questions.json. Returns 0 if all answers are right, else 1."""
    examples = json.loads((PICTURES / "questions.json").read_text())
    num_wrong = 0
    for number, example in enumerate(examples, start=1):
        print(f"\n[{number}/{len(examples)}] {', '.join(example['pictures'])}: {example['question']}")
        answer, timings = _ask(url, model, example["pictures"], example["question"])
        if answer != example["answer"]:
            num_wrong += 1
            print(f"      WRONG, expected: {example['answer']}")
        print(f"      {_waterfall(timings)}")
    print(f"\n{len(examples) - num_wrong} of {len(examples)} answers are right", flush=True)
    return 1 if num_wrong else 0


def _ask(url: str, model: str, pictures: list[str], question: str) -> tuple[str, dict[str, Any]]:
    content = [picture_part((PICTURES / name).read_bytes()) for name in pictures]
    content.append({"type": "text", "text": question})
    messages = [{"role": "user", "content": content}]
    body = {"model": model, "messages": messages, "stream": True, "stage_timings": True}
    answer = ""
    timings: dict[str, Any] = {}
    print("      ", end="")
    for event in _events(f"{url}/v1/chat/completions", body):
        if "error" in event:
            raise RuntimeError(event["error"]["message"])
        text = event["choices"][0]["delta"].get("content", "")
        print(text, end="", flush=True)
        answer += text
        timings = event.get("stage_timings", timings)
    print()
    return answer, timings


def _events(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            payload = line.decode().removeprefix("data: ").strip()
            if payload == "[DONE]":
                return
            if payload:
                yield json.loads(payload)


def _waterfall(timings: dict[str, Any]) -> str:
    seconds = timings["seconds"]
    parts = [f"{stage} {seconds[stage] * 1e3:.1f} ms" for stage in _SHOWN_STAGES if stage in seconds]
    parts.append(f"first token after {timings['time_to_first_token'] * 1e3:.0f} ms")
    if hits := timings["embedding_cache_hits"] + timings["processor_cache_hits"]:
        parts.append(f"{hits} picture{'s' if hits > 1 else ''} from the cache")
    return ", ".join(parts)


def picture_part(content: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(content)}}

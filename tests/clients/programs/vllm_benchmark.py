"""`vllm bench serve`: a short benchmark with pictures that it draws."""

import json
import tempfile
from pathlib import Path

from features import KEY, MODEL, MODEL_FOLDER, URL, is_equal, report, run

REQUESTS = 8


def benchmark_with_pictures():
    # By the Responses API it sends texts only.
    with tempfile.TemporaryDirectory() as folder:
        run(
            "vllm",
            *("bench", "serve", "--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--base-url", URL),
            *("--model", MODEL, "--tokenizer", MODEL_FOLDER),
            *("--num-prompts", str(REQUESTS), "--max-concurrency", "2"),
            *("--dataset-name", "random-mm", "--random-input-len", "16", "--random-output-len", "8"),
            *("--random-mm-bucket-config", "{(64, 64, 1): 1.0}"),
            *("--random-mm-limit-mm-per-prompt", '{"image": 1, "video": 0}'),
            *("--save-result", "--result-dir", folder, "--result-filename", "result.json"),
            OPENAI_API_KEY=KEY,
            HF_HUB_OFFLINE="1",
        )
        told = json.loads((Path(folder) / "result.json").read_text())
    is_equal((told["completed"], told["failed"]), (REQUESTS, 0))


report(benchmark_with_pictures)

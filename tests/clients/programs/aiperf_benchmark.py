"""`aiperf`: a short benchmark with pictures that it draws."""

import json
import tempfile
from pathlib import Path

from features import KEY, MODEL, MODEL_FOLDER, URL, is_equal, report, run

REQUESTS = 8


def benchmark_with_pictures():
    with tempfile.TemporaryDirectory() as folder:
        run(
            "aiperf",
            "profile",
            *("--endpoint-type", "chat", "--streaming", "--url", URL, "--api-key", KEY),
            *("--model", MODEL, "--tokenizer", MODEL_FOLDER),
            *("--request-count", str(REQUESTS), "--concurrency", "2"),
            *("--prompt-input-tokens-mean", "16", "--prompt-output-tokens-mean", "8"),
            *("--image-width-mean", "64", "--image-height-mean", "64"),
            *("--ui", "none", "--artifact-dir", folder),
        )
        told = json.loads((Path(folder) / "profile_export_aiperf.json").read_text())
    is_equal(told["request_count"]["avg"], REQUESTS)
    assert "error_request_count" not in told, told["error_summary"]


report(benchmark_with_pictures)

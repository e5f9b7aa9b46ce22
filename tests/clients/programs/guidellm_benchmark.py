"""`guidellm`: a short benchmark with pictures that it draws, by chat completions and by the Responses API."""

import json
import tempfile
from pathlib import Path

from features import KEY, MODEL, MODEL_FOLDER, URL, is_equal, report, run

REQUESTS = 8


def benchmark(request_format):
    backend = f"kind=openai_http,target={URL},model={MODEL},api_key={KEY},request_format={request_format}"
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "benchmarks.json"
        run(
            "guidellm",
            "run",
            *("--backend", backend),
            *("--profile", "kind=concurrent,streams=2"),
            *("--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--tokenizer", f"kind=huggingface_auto,model={MODEL_FOLDER}"),
            *("--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8"),
            *("--data", "kind=synthetic_image,width=64,height=64"),
            *("--output", f"kind=json,path={result}"),
            "--disable-console",
            HF_HUB_OFFLINE="1",
        )
        (one,) = json.loads(result.read_text())["benchmarks"]
    totals = one["metrics"]["request_totals"]
    is_equal((totals["successful"], totals["errored"]), (REQUESTS, 0))


def benchmark_with_pictures():
    benchmark("/v1/chat/completions")


def benchmark_with_pictures_by_responses():
    benchmark("/v1/responses")


report(benchmark_with_pictures, benchmark_with_pictures_by_responses)

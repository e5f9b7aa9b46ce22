"""Latency and throughput of the whole pipeline over HTTP, on the bundled model.

    python -m benchmarks.pipeline [--requests 48] [--output FILE]

Each scenario streams answers of 32 tokens at a fixed concurrency. `new pictures` sends every picture once, `one
picture` the same one in every request, so the difference is the caches' effect. The last line is one JSON document.
"""

import statistics

from benchmarks.document import make_parser, publish, this_machine
from benchmarks.pictures import picture
from benchmarks.streaming_client import Answer, Content, ask_all
from raylens.checkpoints import BUNDLED_MODEL
from raylens.deployments.config import AppConfig
from raylens.deployments.free_port import free_port
from raylens.deployments.launch.demo import picture_part
from raylens.deployments.launch.local_cluster import running_app

NUM_TOKENS = 32
CONCURRENCIES = (1, 8)


def summary(answers: list[Answer], seconds: float) -> dict[str, float]:
    gaps = [gap for answer in answers for gap in answer.gaps]
    return {
        "requests_per_second": len(answers) / seconds,
        "tokens_per_second": len(answers) * NUM_TOKENS / seconds,
        "ttft_ms_p50": statistics.median(answer.ttft for answer in answers) * 1e3,
        "gap_ms_p50": statistics.median(gaps) * 1e3,
        "gap_ms_p99": statistics.quantiles(gaps, n=100)[98] * 1e3,
    }


def measure(url: str, num_requests: int) -> dict[str, dict[str, float]]:
    def run(contents: list[Content], concurrency: int) -> dict[str, float]:
        return summary(*ask_all(url, "shapes", contents, NUM_TOKENS, concurrency=concurrency))

    question = {"type": "text", "text": "Describe the picture."}
    fresh = iter(range(10**6))
    results = {}
    for concurrency in CONCURRENCIES:
        scenarios: dict[str, list[Content]] = {
            "text": [[question]] * num_requests,
            "new pictures": [[picture_part(picture(next(fresh))), question] for _ in range(num_requests)],
            "one picture": [[picture_part(picture(0)), question]] * num_requests,
        }
        for name, contents in scenarios.items():
            run(contents[:concurrency], concurrency)  # warm-up
            key = f"{name}, {concurrency} at once"
            results[key] = run(contents[concurrency:] or contents, concurrency)
            print(f"{key:28}", "  ".join(f"{metric} {value:8.1f}" for metric, value in results[key].items()))
    return results


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=48, help="requests of each scenario (default: %(default)s)")
    args = parser.parse_args()
    with running_app(AppConfig(model=str(BUNDLED_MODEL)), host="127.0.0.1", port=free_port()) as url:
        results = measure(url, args.requests)
    publish({"machine": this_machine(), "model": "shapes", "scenarios": results}, args.output)


if __name__ == "__main__":
    main()

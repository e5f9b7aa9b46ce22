"""`raylens top` on the real application: what it shows is what the test has asked."""

import re
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import pytest
from openai import OpenAI

from tests.background import Background
from tests.pictures import disc, encoded, user_message
from tests.replicas import replica_pids
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent.parent
PICTURES = count()
INTERVAL_S = 3.0


def top(url: str) -> str:
    """One view, with single spaces."""
    command = [sys.executable, "-m", "raylens", "top", "--once", "--interval", str(INTERVAL_S), "--url", url]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return re.sub(" +", " ", shown.stdout)


def number(view: str, pattern: str) -> float:
    match = re.search(pattern, view)
    assert match is not None, view
    return float(match[1].replace(",", ""))


def ended(view: str) -> int:
    return int(number(view, r"requests ended [\d.,]+ ([\d,]+)"))


def generated(view: str) -> int:
    return int(number(view, r"tokens generated [\d.,]+ ([\d,]+)"))


def ask(client: OpenAI, picture: bytes) -> int:
    """Returns how many tokens the answer has."""
    message = user_message("What colour is the circle?", picture)
    usage = client.chat.completions.create(model="shapes", messages=[message]).usage
    assert usage is not None
    return usage.completion_tokens


def new_picture() -> bytes:
    """Another file than all before."""
    return encoded(disc("blue", (96, 96), (36, 36))) + f"for top {next(PICTURES)}".encode()


def test_its_counts_are_those_of_what_was_asked(app_url: str, client: OpenAI) -> None:
    before, picture = top(app_url), new_picture()
    num_tokens = sum(ask(client, picture) for _ in range(5))
    after = top(app_url)
    assert ended(after) - ended(before) == 5
    assert generated(after) - generated(before) == num_tokens
    for deployment in ("Ingress", "Preprocess", "Generate", "Shared-0"):
        replicas = len(replica_pids(deployment))
        assert f"{deployment} {replicas} " in after
        assert len(re.findall(rf"^{deployment} \w+ [\d.]+ \d+ \w+", after, re.MULTILINE)) == replicas
    assert re.search(r"^stages( ● \w+)+$", after, re.MULTILINE), "all are ready"


@pytest.mark.parametrize(("again", "hits"), [(False, "0 %"), (True, "100 %")])
def test_rates_and_hits_are_those_of_the_interval(app_url: str, client: OpenAI, again: bool, hits: str) -> None:
    same = new_picture()
    ask(client, same)
    num_asked = 0

    def go_on() -> None:
        nonlocal num_asked
        while not asking.is_over.is_set():
            ask(client, same if again else new_picture())
            num_asked += 1

    with (asking := Background(go_on)):
        wait_until(lambda: num_asked > 0)
        began, first = time.monotonic(), num_asked
        view = top(app_url)
        asked, took = num_asked - first, time.monotonic() - began
    rate = number(view, r"requests ended ([\d.,]+) ")
    assert 0 < rate * INTERVAL_S <= asked + 1, "more than all cannot have been in the interval"
    assert rate > 0.3 * asked / took
    assert number(view, r"TTFT ([\d.]+) m?s") > 0
    assert f"embeddings {hits} " in view
    assert re.search(r"errors 0 0 % ", view)

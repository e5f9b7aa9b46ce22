"""What the endpoint's /metrics says."""

import time

import httpx


def exported(url: str, name: str, **labels: str) -> float:
    """The sum of a counter over all processes that count it; takes the four seconds that it may be late."""
    time.sleep(4)
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    found = [line for line in lines if line.split("{")[0] == f"raylens_{name}" and all(one in line for one in wanted)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)

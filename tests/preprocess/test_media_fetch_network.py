"""Attacks on the fetcher as it is served, with the system's own resolver: in a network namespace (Linux) that holds
public and inside addresses, all of which answer, and a name server that lies."""

import json
import shlex
import shutil
import subprocess
import sys
from typing import Any

import pytest

PUBLIC, PUBLIC_V6 = "93.184.216.34", "2606:4700::1111"
METADATA, PRIVATE = "169.254.169.254", "10.0.0.5"
NAMES = {
    "good.test": [[PUBLIC]],
    "good6.test": [[PUBLIC_V6]],
    "rebinding.test": [[PUBLIC], ["127.0.0.1"]],
    "flipping.test": [["127.0.0.1"], [PUBLIC]],
    "mixed.test": [[PUBLIC, PRIVATE]],
    "mixed6.test": [[PUBLIC, "::1"]],
    "mapped.test": [["::ffff:127.0.0.1"]],
    "metadata.test": [[METADATA]],
}
GOOD = "http://good.test/"
FORBIDDEN, INVALID = "media_url_forbidden", "invalid_media_url"

# (title, URLs fetched one after the other, what each comes to, addresses that are asked for something)
ATTACKS = [
    ("public", [GOOD, "http://good6.test/"], ["picture", "picture"], [PUBLIC, PUBLIC_V6]),
    ("public literal", [f"http://{PUBLIC}/", f"http://[{PUBLIC_V6}]/"], ["picture", "picture"], [PUBLIC, PUBLIC_V6]),
    ("rebinding", ["http://rebinding.test/"] * 3, ["picture", FORBIDDEN, FORBIDDEN], [PUBLIC]),
    ("flipping", ["http://flipping.test/"] * 2, [FORBIDDEN, "picture"], [PUBLIC]),
    ("mixed", ["http://mixed.test/", "http://mixed6.test/"], [FORBIDDEN] * 2, []),
    ("names", ["http://metadata.test/", "http://mapped.test/", "http://localhost/"], [FORBIDDEN] * 3, []),
    ("names with dots", ["http://metadata.test./", "http://metadata。test/"], [FORBIDDEN] * 2, []),
    (
        "literals",
        [f"http://{host}/" for host in (METADATA, PRIVATE, "0.0.0.0", "[::]", "[::1]", "[::ffff:10.0.0.5]")],
        [FORBIDDEN] * 6,
        [],
    ),
    (
        "other spellings",
        [f"http://{host}/" for host in ("2130706433", "0177.0.0.1", "0x7f.1", "127.1", "0", "127.0.0.1.")],
        [INVALID] * 6,
        [],
    ),
    (
        "redirects",
        [f"{GOOD}?to={url}" for url in (f"http://{METADATA}/", "http://metadata.test/", "file:///etc/passwd")],
        [FORBIDDEN, FORBIDDEN, INVALID],
        [PUBLIC] * 3,
    ),
    ("redirect to a public host", [f"{GOOD}?to=http://good6.test/"], ["picture"], [PUBLIC, PUBLIC_V6]),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("network")
    (folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:2 attempts:1\n")
    (folder / "attacks.json").write_text(
        json.dumps({"scenario": {title: urls for title, urls, _, _ in ATTACKS}, "names": NAMES})
    )
    setup = ["ip link set lo up", f"mount --bind {shlex.quote(str(folder / 'resolv.conf'))} /etc/resolv.conf"]
    setup += [f"ip address add {address} dev lo" for address in (PUBLIC, METADATA, PRIVATE)]
    setup += [f"ip -6 address add {PUBLIC_V6} dev lo nodad"]
    command = ["unshare", "--map-root-user", "--net", "--mount", "sh", "-ec"]
    if not shutil.which("unshare") or subprocess.run([*command, "; ".join(setup)], capture_output=True).returncode:
        pytest.skip("no network namespace can be made here")
    python = [sys.executable, "-m", "tests.preprocess.attacked_network", str(folder / "attacks.json")]
    done = subprocess.run(
        [*command, "; ".join([*setup, shlex.join(python)])], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    outcomes: dict[str, Any] = json.loads(done.stdout)
    return outcomes


@pytest.mark.parametrize(("title", "outcomes", "asked"), [(title, *rest) for title, _, *rest in ATTACKS])
def test_attacks_come_to_nothing(found: dict[str, Any], title: str, outcomes: list[str], asked: list[str]) -> None:
    assert found[title]["outcomes"] == outcomes
    assert [address.removeprefix("::ffff:") for address in found[title]["asked"]] == asked

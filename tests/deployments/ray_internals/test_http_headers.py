"""Ray Serve's source reads the headers that are known, and no others."""

import ast
import re
from pathlib import Path

import ray.serve
from ray.serve._private import constants

from raylens.deployments.ray_internals.http_headers import ORDERS, REQUEST_ID

TRACE_CONTEXT = ["traceparent", "tracestate"]
OF_REQUEST_ROUTERS = ["x-serve-router-", "request_headers"]
"""Headers of HAProxy and of Ray Serve's request routers, which this application has none of."""
OF_ANSWERS = ["content-type", "retry-after"]
NO_HEADERS = ["utf-8"]
ROOT = Path(ray.serve.__file__).parent
FORM = re.compile(r"[A-Za-z][A-Za-z0-9]*(-[A-Za-z0-9]+)+|traceparent|tracestate")


def names_in(source: str) -> set[str]:
    """What may be a header's name in the functions that deal with headers: constants of Ray Serve, and texts of a
    header's form."""
    found = set()
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and "header" in ast.unparse(function).lower():
            for node in ast.walk(function):
                if isinstance(node, ast.Name) and isinstance(value := getattr(constants, node.id, None), str):
                    found.add(value)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
                    text = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
                    found |= {text} if FORM.fullmatch(text) else set()
    return {name.lower() for name in found}


def test_ray_serve_reads_no_other_header() -> None:
    found = set()
    for file in ("proxy", "proxy_request_response", "replica", "http_util"):
        found |= names_in((ROOT / "_private" / f"{file}.py").read_text())
    assert found - set(NO_HEADERS) - set(OF_ANSWERS) == {*ORDERS, *TRACE_CONTEXT, REQUEST_ID}


def test_every_constant_of_ray_serve_that_names_a_header_is_known() -> None:
    named = {value for name, value in vars(constants).items() if "HEADER" in name and isinstance(value, str)}
    assert named == {*ORDERS[:2], REQUEST_ID, *OF_REQUEST_ROUTERS}


def test_no_other_file_of_ray_serve_gets_requests() -> None:
    """HAProxy's headers are in templates; the others are of Prometheus, of codecs and of documentation."""
    skipped = ("tests", "llm", "_private/benchmarks", "_private/test_utils.py")
    files = [file.relative_to(ROOT).as_posix() for file in ROOT.rglob("*.py") if "headers" in file.read_text()]
    assert {file for file in files if not file.startswith(skipped)} == {
        *(f"_private/{name}.py" for name in ("proxy", "proxy_request_response", "replica", "http_util")),
        *(f"_private/{name}.py" for name in ("constants", "common", "haproxy", "haproxy_templates")),
        "api.py",
        "autoscaling_policy.py",
    }

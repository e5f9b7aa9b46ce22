"""Ports for servers to come."""

import pytest

from raylens.deployments import free_port as module
from raylens.deployments.free_port import free_port, free_ports


def test_a_port_is_not_given_twice_before_its_server_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LASTING_PORTS", range(29_000, 29_040))
    ports = [free_port() for _ in range(10)] + free_ports(10)
    assert len(set(ports)) == 20

"""Connecting to a Ray cluster that runs: Ray's own server for a client may start too late once, not always."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.errors import ConfigError
from tidemill.recipe.config import Cluster

ray = pytest.importorskip("ray")

ADDRESS = "ray://127.0.0.1:10001"


def joined(monkeypatch: pytest.MonkeyPatch, failures: list[Exception]) -> int:
    """Connect, while Ray fails so; how often it was asked."""
    from tidemill.cluster.start.ray import RayStarter

    tried = 0

    def init(**_: Any) -> None:
        nonlocal tried
        tried += 1
        if failures:
            raise failures.pop(0)

    monkeypatch.setattr(ray, "init", init)
    starter = RayStarter.__new__(RayStarter)
    starter.settings, starter.name = Cluster(executor="ray", address=ADDRESS), "run"
    starter._join({})
    return tried


def late() -> Exception:
    return ConnectionAbortedError("Initialization failure from server:\n")


def test_a_clients_server_that_starts_too_late_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert joined(monkeypatch, []) == 1
    assert joined(monkeypatch, [late(), late()]) == 3


@pytest.mark.parametrize("failures", [[late(), late(), late()], [ConnectionError("refused"), late()]])
def test_a_cluster_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, failures: list[Exception]) -> None:
    with pytest.raises(ConfigError, match=r"cluster.address=ray://127.0.0.1:10001: "):
        joined(monkeypatch, failures)

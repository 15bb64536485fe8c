"""Every test session has a cache and a fork server of its own, which its tests share with nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.accelerator.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which what follows may do

from tidemill import owned
from tidemill.cluster.start import choose
from tidemill.cluster.start.forkserver import Forks
from tidemill.models.box.known import cache


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        usual, own = cache(), tmp_path_factory.mktemp("cache")
        for fetched in ("models", "wheels"):  # what was fetched once need not be fetched again
            if (usual / fetched).is_dir():
                (own / fetched).symlink_to(usual / fetched)
        patch.setenv("TIDEMILL_CACHE", str(own))
        yield


class _Kept(Forks):
    """A fork server for all runs of a session: torch and transformers are imported once, not by every run."""

    def start(self) -> None:
        if self._process is None or self._process.poll() is not None:
            super().start()

    def close(self) -> None:
        """It serves the next run."""


@pytest.fixture(scope="session", autouse=True)
def _one_fork_server() -> Iterator[None]:
    made: list[_Kept] = []

    def kept() -> Forks:
        made.extend([] if made else [_Kept(owned.make() / "forks")])
        return made[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "fork_server", kept)
        yield
    for server in made:
        Forks.close(server)

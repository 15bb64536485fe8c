"""Every test session has a cache of its own: warm starts are shared between its tests, and with nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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

"""One server for the tests that only ask."""

from __future__ import annotations

import pytest

from tests.serve.made import client, model_folder, served

pytest.importorskip("starlette")
pytest.importorskip("llguidance")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def server(folder):
    with served(folder) as server:
        yield server


@pytest.fixture
def ask(server):
    with client(server) as made:
        yield made

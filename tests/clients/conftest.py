"""Other people's clients against our endpoint. Only `make test-clients` runs what is here.

This environment has the clients; `TIDEMILL_PYTHON` is the one that has Tidemill. The model has random weights, so what
it says means nothing: calls and JSON come by constrained decoding.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("TIDEMILL_PYTHON", sys.executable)
KEY = "sk-test-of-clients"
MAKE = (
    "import sys; from pathlib import Path; from tests.serve.made import model_folder; model_folder(Path(sys.argv[1]))"
)
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch prices from the network
if "TIDEMILL_PYTHON" not in os.environ:  # the suite's own environment
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py")]


@pytest.fixture(scope="session")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "TIDEMILL_API_KEY": KEY,
    }
    subprocess.run([PYTHON, "-c", MAKE, str(folder / "tiny")], env=environment, check=True)
    log = folder / "log"
    command = [PYTHON, "-m", "tidemill", "serve", str(folder / "tiny"), "--port", "0", "--concurrent", "32"]
    server = subprocess.Popen(command, env=environment, stdout=log.open("w"), stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 90
        while not (found := re.search(r"(http://\S+)/v1 serves", log.read_text())):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield found[1]
    finally:
        server.terminate()
        server.wait(20)


@pytest.fixture
def key():
    return KEY

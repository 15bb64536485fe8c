"""Nothing in the product can run code that another process wrote, but in the places listed here, with their reasons."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import tidemill

SOURCE = Path(tidemill.__file__).parent
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "shared_memory"}
OBJECTS = {f"{verb}_object{tail}" for verb in ("all_gather", "gather") for tail in ("", "s")}
OBJECTS |= {f"{verb}_object_list" for verb in ("broadcast", "scatter", "send", "recv")}
NAMES = OBJECTS | {"TCPStore", "Connection", "Unpickler", "PyNcclCommunicator"}
CALLS = {"torch.load", "joblib.load", "pickle.loads", "pickle.load"}

# What is left, and why nobody else reaches it. docs/security.md says the same to users.
LISTED = {
    ("cluster/driver/worker_pool.py", "pickle"): "counts the bytes of an answer; reads none",
    ("bridges/transfer_queue/pickles.py", "pickle"): "TransferQueue carries any object; see that file for who opens it",
    ("bridges/transfer_queue/pickles.py", "cloudpickle"): "writes the sampler of the dock's own starter",
    ("bridges/transfer_queue/pickles.py", "pickle.loads"): "the same",
    ("models/foreign/sharded.py", "pickle"): "a checkpoint's index: only the classes that an index has are loaded",
    ("models/foreign/sharded.py", "Unpickler"): "the same",
    ("models/foreign/verl.py", "torch.load"): "tensors alone (weights_only); a user names the file",
    (
        "cluster/start/forkserver.py",
        "Connection",
    ): "a socket in a folder of mode 0700; both ends ask who is there",
    ("cluster/start/ranks.py", "Connection"): "an unnamed pair of sockets between a process and its child",
}


def found_in(file: Path) -> set[str]:
    """Names in a file that could read code: however they were imported, and also through an alias of a module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name.rpartition(".")[2] for a in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            found |= ({a.name for a in node.names} | {(node.module or "").rpartition(".")[2]}) & (MODULES | NAMES)
        elif isinstance(node, ast.Attribute):
            found |= {node.attr} & NAMES
            found |= {ast.unparse(node)} & CALLS
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found |= {"allow_pickle"} - ({"allow_pickle"} if ast.unparse(node.value) == "False" else set())
        elif isinstance(node, ast.keyword) and node.arg == "weights_only":
            found |= {"weights_only"} - ({"weights_only"} if ast.unparse(node.value) == "True" else set())
    return found


def test_only_listed_places_can_read_what_runs_code() -> None:
    files = list(SOURCE.rglob("*.py"))
    assert len(files) > 100
    found = {(file.relative_to(SOURCE).as_posix(), name) for file in files for name in found_in(file)}
    assert found - LISTED.keys() == set(), "send msgspec or JSON records, or list the place with its reason"
    assert LISTED.keys() - found == set(), "what is not there any more need not be listed"


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from multiprocessing import shared_memory",
        "from pickle import loads",
        "import torch.distributed as d; s: Any = d; s.TCPStore('h', 1)",
        "from torch.distributed import all_gather_object",
        "dist.broadcast_object_list(box, src=0)",
        "torch.load(file)",
        "numpy.load(file, allow_pickle=True)",
    ],
)
def test_each_way_to_read_a_pickle_is_seen(tmp_path: Path, line: str) -> None:
    file = tmp_path / "line.py"
    file.write_text(line)
    assert found_in(file)


@pytest.mark.parametrize(
    "line", ["numpy.load(file, allow_pickle=False)", "json.loads(text)", "safetensors.torch.load(x)"]
)
def test_plain_reading_is_not_forbidden(tmp_path: Path, line: str) -> None:
    file = tmp_path / "line.py"
    file.write_text(line)
    assert not found_in(file)

"""Compiles the stand-in's C++ sources, once for each of their versions (half a minute), and loads them."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

SOURCE = Path(__file__).with_name("source")
NAME = "_fake_npu"


def load() -> ModuleType:
    import torch

    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidemill"
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{NAME}-{_stamp(torch.__version__)}.so"
    with open(folder / f"{NAME}.lock", "w") as lock:  # of several workers one compiles
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            _compile(Path(torch.__file__).parent, made)
    spec = importlib.util.spec_from_file_location(NAME, made)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    return module


def _stamp(version: str) -> str:
    text = "".join(path.read_text() for path in sorted(SOURCE.iterdir()))
    return hashlib.sha256(f"{version} {sys.version} {text}".encode()).hexdigest()[:16]


def _compile(torch_folder: Path, made: Path) -> None:
    include = torch_folder / "include"
    python = sysconfig.get_paths()["include"]
    flags = ["-O1", "-g0", "-std=c++20", "-fPIC", f"-DTORCH_EXTENSION_NAME={NAME}"]
    flags += [f"-I{path}" for path in (include, include / "torch/csrc/api/include", python)]
    aside = made.with_suffix(f".{os.getpid()}")
    aside.mkdir()

    def one(source: Path) -> str:
        target = aside / f"{source.stem}.o"
        _run(["g++", *flags, "-c", str(source), "-o", str(target)])
        return str(target)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(one, sorted(SOURCE.glob("*.cpp"))))
    lib = torch_folder / "lib"
    libraries = ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
    shared = aside / "made.so"
    _run(["g++", "-shared", *objects, f"-L{lib}", *libraries, f"-Wl,-rpath,{lib}", "-o", str(shared)])
    shared.replace(made)
    for path in aside.iterdir():
        path.unlink()
    aside.rmdir()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")

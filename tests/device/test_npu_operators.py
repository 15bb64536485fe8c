"""Every operator of torch_npu that Tidemill calls is in the wheels of the supported versions, with the arguments that
it is given; and the stand-in knows them as the wheels do. pip fetches the wheels once; what is needed of them is kept.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tidemill.models.box.known import wheels

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).resolve().parents[2] / "src" / "tidemill"
STAND_IN = Path(__file__).with_name("fake_npu") / "torch_npu"
VERSIONS = ("2.11.0.post3", "2.12.0.post3", "2.13.0", "2.14.0")  # of torch 2.11 and newer, which Tidemill needs
SIMULATED = "2.13.0"
LISTED, GRAPHS = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml", "torch_npu/npu/graphs.py"


class Signature(NamedTuple):
    positional: list[str]
    keyword: list[str]
    required: set[str]


@cache
def kept(version: str) -> Path:
    """The folder with what is needed of a wheel."""
    folder = wheels() / f"torch_npu-{version}"
    if all((folder / name).exists() for name in (LISTED, GRAPHS)):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    fetch = ["download", "-q", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "--python-version", "3.11"]
    where = ["--platform", "manylinux_2_28_x86_64", "-d", str(folder)]
    command = [sys.executable, "-m", "pip", *fetch, *where, f"torch_npu=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(folder.glob("*.whl"))
    if not found:
        pytest.skip(f"torch_npu {version} cannot be fetched here: {done.stderr.strip().splitlines()[-1:]}")
    with zipfile.ZipFile(found[0]) as wheel:
        for name in (LISTED, GRAPHS):
            wheel.extract(name, folder)
    found[0].unlink()
    return folder


@cache
def listed(version: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((kept(version) / LISTED).read_text())
    return found


def schemas(version: str) -> dict[str, str]:
    entries = [entry for section in ("custom", "autograd") for entry in listed(version).get(section) or []]
    return {entry["func"].partition("(")[0]: entry["func"] for entry in entries}


def parsed(schema: str) -> Signature:
    inside = schema[schema.index("(") + 1 : schema.rindex(") ->")]
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(inside + ","):
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            parts.append(inside[start:at].strip())
            start = at + 1
    star = parts.index("*") if "*" in parts else len(parts)
    names = [part.partition("=")[0].split()[-1] for part in parts]
    required = {name for name, part in zip(names, parts) if part != "*" and "=" not in part}
    return Signature(names[:star], names[star + 1 :], required)


@cache
def calls() -> list[tuple[str, str, int, set[str]]]:
    """(where, operator, positional arguments, names of the others) of each call in the product."""
    found = []
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_operator(node.func):
                named = {keyword.arg for keyword in node.keywords if keyword.arg}
                found.append((f"{file.relative_to(SOURCE)}:{node.lineno}", node.func.attr, len(node.args), named))
    return found


def _is_operator(func: ast.Attribute) -> bool:
    """Called on what `vendor.operators` gives, and not on a module of ours."""
    text = ast.unparse(func.value)
    return func.attr.startswith("npu_") and (text.endswith("operators") or "vendor.operators(" in text)


def test_calls_are_found() -> None:
    found = {name for _, name, *_ in calls()}
    assert {"npu_fusion_attention", "npu_fused_infer_attention_score", "npu_rms_norm", "npu_grouped_matmul"} <= found


@pytest.mark.parametrize("version", VERSIONS)
def test_every_operator_is_in_the_wheel_with_the_arguments_it_is_given(version: str) -> None:
    known = schemas(version)
    for where, name, positional, named in calls():
        assert name in known, f"{where}: torch_npu {version} has no {name}"
        signature = parsed(known[name])
        given = set(signature.positional[:positional]) | named
        assert positional <= len(signature.positional), f"{where}: {name} takes fewer positional arguments"
        assert named <= {*signature.positional[positional:], *signature.keyword}, f"{where}: {known[name]}"
        assert signature.required <= given, f"{where}: {name} also needs {signature.required - given}"


@pytest.mark.parametrize("version", VERSIONS)
def test_captured_graphs_are_called_as_the_wheel_defines_them(version: str) -> None:
    tree = ast.parse((kept(version) / GRAPHS).read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}

    def arguments(owner: str, method: str) -> set[str]:
        body = [node for node in classes[owner].body if isinstance(node, ast.FunctionDef) and node.name == method]
        return {argument.arg for argument in body[0].args.args}

    assert {"pool", "auto_dispatch_capture", "capture_error_mode"} <= arguments("graph", "__init__")
    assert "cpu_update_input" in arguments("NPUGraph", "update")
    assert {"replay", "pool"} <= {n.name for n in classes["NPUGraph"].body if isinstance(n, ast.FunctionDef)}


def test_the_stand_in_knows_operators_as_the_wheel_does() -> None:
    known = schemas(SIMULATED)
    for schema in (STAND_IN / "schemas.txt").read_text().splitlines():
        assert known[schema.partition("(")[0]] == schema
    supported = [e if isinstance(e, str) else e["func"] for e in listed(SIMULATED)["supported"]]
    assert (STAND_IN / "implemented.txt").read_text().split() == sorted(e.partition("(")[0] for e in supported)

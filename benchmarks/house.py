"""Count the code of src/ and its habits: sizes, type tests on our own classes, refusals.

tidemill bench house --json

The counts read syntax trees and follow names of classes and folders, so they go on working when files move.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ABOUT = "lines, functions and files of src/, isinstance on our own types, refusals: what a refactoring is to make fewer"
OPTIONS: dict[str, Any] = {"src": "", "details": False}
SHORT, LONG, LARGE = 25, 80, 450  # lines of a function, of a function, of a file

# A learner, worker or lease is a class whose name ends like this, or one derived from such a class.
OWN = re.compile(r"(Learner|Worker|Workers|Lease|Critic|Scorer)$")
# Where a recipe is read and checked: `settings/precheck.py` as well as `check/cluster.py` or `config.py`.
CHECKING = {"settings", "config", "recipe", "check", "estimate"}

Trees = Mapping[Path, ast.Module]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    root = Path(options["src"] or Path(__file__).resolve().parents[1] / "src")
    texts = {path.relative_to(root): path.read_text(encoding="utf-8") for path in sorted(root.rglob("*.py"))}
    result = count(texts)
    if options["details"]:
        return result
    return {key: value for key, value in result.items() if not key.endswith("_where")}


def count(texts: Mapping[Path, str]) -> dict[str, Any]:
    trees = {path: ast.parse(text) for path, text in texts.items()}
    lines = {path: len(text.splitlines()) for path, text in texts.items()}
    sizes = {f"{path}:{f.lineno} {f.name}": length(f) for path, tree in trees.items() for f in functions(tree)}
    folders = Counter(str(path.parent) for path in trees)
    own, any_own = isinstance_calls(trees, own_classes(trees)), isinstance_calls(trees, set(class_bases(trees)))
    refused = {kind: list(refusals(trees, kind)) for kind in (True, False)}
    return {
        "lines": sum(lines.values()),
        "files": len(lines),
        "functions": len(sizes),
        "functions_under_25_share": sum(n < SHORT for n in sizes.values()) / max(1, len(sizes)),
        "functions_over_80": sum(n > LONG for n in sizes.values()),
        "functions_over_80_where": [name for name, n in sizes.items() if n > LONG],
        "files_over_450": sum(n > LARGE for n in lines.values()),
        "files_over_450_where": [f"{path} {n}" for path, n in lines.items() if n > LARGE],
        "largest_folder": max(folders.values(), default=0),
        "largest_folder_name": folders.most_common(1)[0][0] if folders else "",
        "folders_over_15": sum(n > 15 for n in folders.values()),
        "isinstance_own": len(own),
        "isinstance_own_where": own,
        "isinstance_any_own": len(any_own),
        "refusals": len(refused[True]),
        "refusals_where": refused[True],
        "refusals_elsewhere": len(refused[False]),
        "refusals_elsewhere_where": refused[False],
    }


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def length(function: Function) -> int:
    """Lines from `def` to the end, with the docstring and without decorators."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


# isinstance on our own types


def class_bases(trees: Trees) -> dict[str, set[str]]:
    """Name every class of src/ and its bases."""
    nodes = (node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    found: dict[str, set[str]] = {}
    for node in nodes:
        found.setdefault(node.name, set()).update(names(node.bases))
    return found


def own_classes(trees: Trees) -> set[str]:
    """Name the learners, workers and leases among the classes of src/."""
    bases = class_bases(trees)
    found = {name for name in bases if OWN.search(name)}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return found


def isinstance_calls(trees: Trees, classes: set[str]) -> list[str]:
    """Find calls of isinstance that name one of `classes`, alone or among others."""
    return [
        f"{path}:{node.lineno} {ast.unparse(node)}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and names([node.func]) == {"isinstance"} and names(node.args[1:]) & classes
    ]


def names(nodes: Iterable[ast.AST]) -> set[str]:
    """Give the last words of names: `Learner` of `engine.Learner`, `A` and `B` of `A | B` or `(A, B)`."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.BinOp):
            found |= names([node.left, node.right])
        elif isinstance(node, ast.Tuple):
            found |= names(node.elts)
    return found


# Refusals


def refusals(trees: Trees, is_checking: bool) -> Iterator[str]:
    """Find sentences that refuse a setting, where recipes are checked or everywhere else.

    A refusal is a text that a check yields, that is appended to a list of problems, or that a validator raises as a
    ValueError. A ConfigError says that a file cannot be read, so it is none. Texts that come from other modules are
    not counted. Elsewhere, texts yielded by functions typed `Iterator[str]` and appended problems are counted: some of
    these are other lines of text, but a check that moves out of its room shows there.
    """
    for path, tree in trees.items():
        if bool({Path(part).stem for part in path.parts} & CHECKING) is not is_checking:
            continue
        yielded = tree if is_checking else ast.Module([f for f in functions(tree) if _gives_sentences(f)], [])
        for node in ast.walk(yielded):
            if isinstance(node, ast.Yield) and _is_sentence(node.value):
                yield _told(path, node)
        for node in ast.walk(tree):
            if _is_appended_problem(node) or (is_checking and _is_value_error(node)):
                yield _told(path, node)


def _gives_sentences(function: Function) -> bool:
    return function.returns is not None and ast.unparse(function.returns) == "Iterator[str]"


def _is_sentence(node: ast.AST | None) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_sentence(node.left)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_appended_problem(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append"):
        return False
    return names([node.func.value]) == {"problems"} and _is_sentence(next(iter(node.args), None))


def _is_value_error(node: ast.AST) -> bool:
    raised = node.exc if isinstance(node, ast.Raise) else None
    return isinstance(raised, ast.Call) and names([raised.func]) == {"ValueError"}


def _told(path: Path, node: ast.AST) -> str:
    return f"{path}:{getattr(node, 'lineno', 0)} {ast.unparse(node)}"

"""The package that people install: wheel and sdist hold all that a run needs, and work from an empty folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHORT = (
    "train.steps=1",
    "train.prompts_per_step=2",
    "train.samples_per_prompt=2",
    "eval.size=2",
    "model.warm_start=null",
)


def run(*words: str | Path, cwd: Path, **environment: str) -> str:
    """Run Python with our environment's packages, but without this checkout."""
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *words], cwd=cwd, env=inherited | environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist of what git tracks here."""
    place = tmp_path_factory.mktemp("package")
    source = place / "source"
    source.mkdir()
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode != 0:
        pytest.skip("git does not say which files belong to the project")
    for name in filter(None, tracked.stdout.split("\0")):
        if (ROOT / name).exists():  # recipes/ is a link inside the package
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    script = "from setuptools import build_meta as b; print(b.build_wheel(r'{0}')); print(b.build_sdist(r'{0}'))"
    run("-c", script.format(place), cwd=source)
    return place


def names_of(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.slow
def test_the_wheel_holds_every_file_that_the_package_reads(built: Path) -> None:
    [wheel] = built.glob("*.whl")
    held = names_of(wheel)
    code = {p for p in (ROOT / "src" / "tidemill").rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    wanted = {
        p.relative_to(ROOT / "src").as_posix() for p in code if "recipes" not in p.relative_to(ROOT / "src").parts
    }
    recipes = {
        f"tidemill/recipes/{p.relative_to(ROOT / 'recipes').as_posix()}" for p in (ROOT / "recipes").rglob("*.yaml")
    }
    assert wanted | recipes <= held
    assert not [name for name in held if name.startswith(("tests/", "benchmarks/"))]
    assert any(name.endswith("licenses/LICENSE") for name in held)


@pytest.mark.slow
def test_the_sdist_builds_the_same_wheel(built: Path, tmp_path: Path) -> None:
    [sdist], [wheel] = built.glob("*.tar.gz"), built.glob("*.whl")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    [source] = tmp_path.iterdir()
    run("-c", f"from setuptools import build_meta as b; b.build_wheel(r'{tmp_path}')", cwd=source)
    assert names_of(next(tmp_path.glob("*.whl"))) == names_of(wheel)


@pytest.mark.slow
def test_the_installed_wheel_trains_from_an_empty_folder(built: Path, tmp_path: Path) -> None:
    [wheel] = built.glob("*.whl")
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    run("-m", "pip", "install", "-q", "--no-deps", "--target", site, wheel, cwd=tmp_path)
    where = run("-c", "import tidemill; print(tidemill.__file__)", cwd=empty, PYTHONPATH=str(site)).strip()
    assert Path(where).is_relative_to(site)
    run("-m", "tidemill", "train", "quickstart", *SHORT, cwd=empty, PYTHONPATH=str(site))
    assert (empty / "runs" / "quickstart" / "summary.json").exists()
    assert {p.name for p in empty.iterdir()} == {"runs"}

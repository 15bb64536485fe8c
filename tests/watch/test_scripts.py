"""The page's scripts parse: one that does not leaves every page empty, and only a browser would tell."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tidemill import watch

SCRIPTS = sorted((Path(watch.__file__).parent / "static" / "js").glob("*.js"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_parses(script: Path, tmp_path: Path):
    if shutil.which("node") is None:
        pytest.skip("there is no node to parse scripts with")
    module = tmp_path / "script.mjs"  # as a module, which the page loads it as
    module.write_text(script.read_text())
    done = subprocess.run(["node", "--check", module], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

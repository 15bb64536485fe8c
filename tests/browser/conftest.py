"""A real browser: Chromium of the system, driven by Playwright. Only `make test-browser` runs what is here.

This environment has Playwright; `TIDEMILL_PYTHON` is the one that has Tidemill, for runs and the page's server.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("TIDEMILL_PYTHON", sys.executable)
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
collect_ignore = []
try:
    from playwright.sync_api import sync_playwright
except ImportError:
    collect_ignore = ["test_pages.py"]


def tidemill(*arguments: str, cwd: Path, log: Path) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [PYTHON, "-m", "tidemill", *arguments], cwd=cwd, env=environment, stdout=log.open("w"), stderr=subprocess.STDOUT
    )


@contextmanager
def ended(process: subprocess.Popen):
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def waited(look, seconds: float = 60.0):
    """What `look` gives once it gives anything."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.05)
    raise AssertionError(f"nothing within {seconds:g} s")


@contextmanager
def watching(where: Path, log: Path, *options: str):
    """The address of a page of `where`, token included."""
    with ended(tidemill("watch", str(where), "--port", "0", *options, cwd=where, log=log)) as process:

        def address() -> str | None:
            assert process.poll() is None, log.read_text()
            found = re.search(r"http://\S+", log.read_text())
            return found[0] if found else None

        yield waited(address)


@pytest.fixture(scope="session")
def browser():
    if CHROMIUM is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture
def opened(browser):
    """`opened(address, width=…)` gives a page; any console error or request to elsewhere fails the test."""
    contexts, faults = [], []

    def open_page(address: str, *, width: int = 1280, height: int = 800, scheme: str = "light"):
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("console", lambda said: faults.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        origin = address.split("/?")[0]
        page.on("request", lambda r: None if r.url.startswith((origin, "data:")) else faults.append(f"foreign {r.url}"))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []

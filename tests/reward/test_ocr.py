"""The reward that reads pictures. What rapidocr reads of real pictures is tested where it is installed."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from tidemill.errors import MissingExtra
from tidemill.reward.api import Sample
from tidemill.reward.registry import find, runs_here
from tidemill.reward.verifiers import ocr


@pytest.fixture(autouse=True)
def _forgotten():
    ocr._texts.clear()
    ocr._reader.cache_clear()
    yield
    ocr._texts.clear()
    ocr._reader.cache_clear()


@pytest.fixture
def reader(monkeypatch) -> list:
    """In place of rapidocr: an image says its first pixel."""
    asked = []

    def make(**_):
        def read(image):
            asked.append(image.shape)
            return SimpleNamespace(txts=(f"No {image[0, 0, 2]}", "smudge"), scores=(0.9, 0.2))

        return read

    monkeypatch.setitem(sys.modules, "rapidocr", SimpleNamespace(RapidOCR=make))
    return asked


def picture(red: int) -> np.ndarray:
    found = np.zeros((4, 6, 3), np.uint8)
    found[..., 0] = red
    return found


def test_the_share_of_letters_that_the_response_repeats(reader) -> None:
    said = ["no 42", " NO42 ", "no 4", "", "something else"]
    made = ocr.ocr([Sample("", text, images=[picture(42)]) for text in said])
    assert [r.value for r in made[:2]] == [1.0, 1.0] and made[0].correct
    assert 0.8 < made[2].value < 1.0 and not made[2].correct and made[3].value == 0.0 and made[4].value < 0.5
    assert len(reader) == 1  # a group's picture is read once
    assert [r.value for r in ocr.ocr([Sample("", "no 4", images=[picture(42)])], exact=True)] == [0.0]
    assert ocr.ocr([Sample("", "no 42 smudge", images=[picture(42)])], least=0.1)[0].value == 1.0


def test_it_runs_where_images_are(reader) -> None:
    assert runs_here("ocr", find("ocr"))


def test_several_images_are_read_in_their_order(reader) -> None:
    assert ocr.ocr([Sample("", "no 1 no 2", images=[picture(1), picture(2)])])[0].correct


def test_without_the_package_it_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.raises(MissingExtra, match=r"rapidocr") as refused:
        ocr.ocr([Sample("", "x", images=[picture(1)])])
    assert "tidemill[ocr]" in refused.value.remedy


def test_rapidocr_reads_numbers_that_are_drawn() -> None:
    pytest.importorskip("rapidocr", reason="rapidocr is not installed (tidemill[ocr])")
    import random

    from tidemill.data.pictures.shapes import shapes

    rng, right = random.Random(0), 0
    for _ in range(20):
        problem = shapes(rng, tasks=["number"], size=160)
        right += bool(ocr.ocr([Sample("", problem.answer, images=problem.images)])[0].correct)
    assert right >= 14

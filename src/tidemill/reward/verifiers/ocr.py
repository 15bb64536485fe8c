"""A reward for reading aloud what a picture says: rows need no answers, rapidocr reads the picture too."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np

from tidemill.errors import MissingExtra
from tidemill.reward.api import Reward, Sample, batched

MOST_READ = 4096  # pictures whose text is remembered
_texts: OrderedDict[bytes, str] = OrderedDict()


@batched
def ocr(samples: Sequence[Sample], least: float = 0.5, exact: bool = False) -> list[Reward]:
    """How much of what the prompt's images say the response repeats: the share of equal letters, 0 to 1, whatever the
    case and the spaces; with `exact` 1 or 0. Text that rapidocr is less sure of than `least` is left out, and of an
    image without any the response should say nothing."""
    return [_judged(sample, least, exact) for sample in samples]


def _judged(sample: Sample, least: float, exact: bool) -> Reward:
    wanted, said = _plain(" ".join(read(image, least) for image in sample.images)), _plain(sample.response)
    likeness = SequenceMatcher(None, wanted, said, autojunk=False).ratio()
    return Reward(float(wanted == said) if exact else likeness, {"read": float(len(wanted))}, correct=wanted == said)


def read(image: Any, least: float) -> str:
    """The text of an image, line by line. The samples of a group ask for the same."""
    key = blake2b(repr((image.shape, least)).encode() + np.ascontiguousarray(image).tobytes(), digest_size=16).digest()
    if key not in _texts:
        found = _reader()(image[:, :, ::-1])  # it takes blue first
        lines = zip(found.txts or (), found.scores or ())
        _texts[key] = "\n".join(text for text, score in lines if score >= least)
        while len(_texts) > MOST_READ:
            _texts.popitem(last=False)
    _texts.move_to_end(key)
    return _texts[key]


@cache
def _reader() -> Any:
    try:
        from rapidocr import RapidOCR
    except ImportError:
        raise MissingExtra("the reward ocr", "rapidocr", "ocr") from None
    return RapidOCR(params={"Global.log_level": "error"})


def _plain(text: str) -> str:
    return "".join(text.lower().split())

"""The tool `search`: passages of the texts in a local folder, the best match first.

Ranked by BM25 (Robertson and Zaragoza 2009), or by an embedding model where one is named. The folder is read once per
process; a query is text and never names a file.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tidemill.environment.tools.api import Tool
from tidemill.errors import ConfigError

K1, B = 1.2, 0.75  # BM25's own constants
WORD = re.compile(r"\w+")
ENDINGS = (".md", ".txt", ".rst")
LONGEST_TEXT = 4 << 20  # bytes of one file
TOKENS, AT_ONCE = 256, 32  # that an embedding model reads of a passage; passages at once


@dataclass(frozen=True, slots=True)
class Passage:
    place: str  # file and line
    text: str


class Ranker(Protocol):
    def scores(self, query: str) -> np.ndarray[Any, Any]:
        """A score per passage; 0 or less: no match."""


class BM25:
    def __init__(self, passages: Sequence[Passage]) -> None:
        counts = [Counter(words(passage.text)) for passage in passages]
        lengths = np.array([sum(count.values()) for count in counts], np.float64)
        self.size, mean = len(passages), max(float(lengths.mean()) if len(lengths) else 0.0, 1.0)
        self.norms = K1 * (1 - B + B * lengths / mean)
        found: dict[str, tuple[list[int], list[int]]] = {}
        for i, count in enumerate(counts):
            for word, times in count.items():
                places, often = found.setdefault(word, ([], []))
                places.append(i)
                often.append(times)
        self.postings = {w: (np.array(p), np.array(t, np.float64)) for w, (p, t) in found.items()}

    def scores(self, query: str) -> np.ndarray[Any, Any]:
        total = np.zeros(self.size)
        for word in set(words(query)) & self.postings.keys():
            places, often = self.postings[word]
            rarity = math.log(1 + (self.size - len(places) + 0.5) / (len(places) + 0.5))
            total[places] += rarity * often * (K1 + 1) / (often + self.norms[places])
        return total


class Embedded:
    """Cosines of the mean of a model's last hidden states."""

    def __init__(self, passages: Sequence[Passage], model: str) -> None:
        from transformers import AutoModel, AutoTokenizer

        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
            self.model: Any = AutoModel.from_pretrained(model).eval()
        except (OSError, ValueError) as error:
            raise ConfigError(f"search: {model!r} is no embedding model: {error}", "name a local folder") from error
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        parts = [passages[i : i + AT_ONCE] for i in range(0, len(passages), AT_ONCE)]
        self.vectors = np.concatenate([self._vectors([p.text for p in part]) for part in parts])

    def scores(self, query: str) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = self.vectors @ self._vectors([query])[0]
        return found

    def _vectors(self, texts: Sequence[str]) -> np.ndarray[Any, Any]:
        import torch

        told = self.tokenizer(list(texts), padding=True, truncation=True, max_length=TOKENS, return_tensors="pt")
        with torch.no_grad():
            hidden = self.model(**told).last_hidden_state.float()  # (texts, tokens, dim)
        mask = told["attention_mask"][..., None].float()
        mean = (hidden * mask).sum(1) / mask.sum(1)
        vectors: np.ndarray[Any, Any] = torch.nn.functional.normalize(mean, dim=-1).numpy()
        return vectors


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def passages(folder: Path, size: int) -> Iterator[Passage]:
    """Paragraphs of every text below the folder, joined up to `size` characters. Links out of the folder are left."""
    root = folder.resolve()
    for path in sorted(root.rglob("*")):
        is_inside = path.resolve().is_relative_to(root)
        if path.suffix.lower() not in ENDINGS or not path.is_file() or not is_inside:
            continue
        if path.stat().st_size > LONGEST_TEXT:
            raise ConfigError(f"search: {path} has more than {LONGEST_TEXT >> 20} MiB", "split it, or leave it out")
        yield from _of_text(str(path.relative_to(root)), path.read_text(encoding="utf-8", errors="replace"), size)


def _of_text(name: str, text: str, size: int) -> Iterator[Passage]:
    held, begins = "", 1
    line = 1
    for paragraph in re.split(r"(\n\s*\n)", text):
        if held and len(held) + len(paragraph) > size:
            if held.strip():
                yield Passage(f"{name}:{begins}", held.strip())
            held, begins = "", line
        held += paragraph
        line += paragraph.count("\n")
        while len(held) > 2 * size:  # a paragraph without end
            yield Passage(f"{name}:{begins}", held[:size].strip())
            begins += held[:size].count("\n")
            held = held[size:]
    if held.strip():
        yield Passage(f"{name}:{begins}", held.strip())


@lru_cache(maxsize=8)
def index(folder: str, size: int, model: str | None) -> tuple[list[Passage], Ranker]:
    place = Path(folder).expanduser()
    if not place.is_dir():
        raise ConfigError(f"search: {folder} is no folder", "name one with texts")
    found = list(passages(place, size))
    if not found:
        raise ConfigError(f"search: {folder} has no texts", f"files that end in {', '.join(ENDINGS)} are read")
    return found, BM25(found) if model is None else Embedded(found, model)


class Search:
    def __init__(self, folder: str, most: int, size: int, model: str | None) -> None:
        self.passages, self.ranker = index(folder, size, model)
        self.most = most
        query = {"type": "string", "description": "what to look for"}
        parameters = {"type": "object", "properties": {"query": query}, "required": ["query"]}
        function = {"name": "search", "description": "Find passages in the documents.", "parameters": parameters}
        self.schema: Mapping[str, Any] = {"type": "function", "function": function}

    def call(self, arguments: Mapping[str, Any]) -> str:
        query = arguments.get("query")
        if not isinstance(query, str) or not query.strip():
            raise ValueError("query is a text: what to look for")
        scores = self.ranker.scores(query)
        best = [int(i) for i in np.argsort(-scores, kind="stable")[: self.most] if scores[i] > 0]
        found = [f"[{self.passages[i].place}]\n{self.passages[i].text}" for i in best]
        return "\n\n".join(found) or "nothing was found"


def tools(folder: str, most: int = 3, passage: int = 600, model: str | None = None) -> list[Tool]:
    """`most`: passages of an answer, of about `passage` characters each. `model`: an embedding model's folder."""
    return [Search(folder, most, passage, model)]

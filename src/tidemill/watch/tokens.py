"""The texts of a sample's tokens, by the run's own tokenizer, so that a page can colour them one by one."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any


class Tokens:
    def added(self, run: Path, sample: dict[str, Any]) -> dict[str, Any]:
        """The sample with `pieces`, one text a token; as it was where the run kept no tokens or no tokenizer."""
        ids = sample.get("tokens")
        tokenizer = _tokenizer(run / "model" / "tokenizer.json") if ids else None
        if not ids or tokenizer is None:
            return sample
        return sample | {"pieces": pieces(tokenizer, ids)}


def pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    """Texts that join to the decoded whole; a token that ends inside a character has none, its last one has it all."""
    found, done = [], ""
    for end in range(1, len(ids) + 1):
        begin = max(0, end - 8)  # a character has at most four bytes, and a word's first space needs its neighbour
        before = tokenizer.decode(ids[begin : end - 1], skip_special_tokens=False) if end - 1 > begin else ""
        whole = tokenizer.decode(ids[begin:end], skip_special_tokens=False)
        fresh = whole[len(before) :] if whole.startswith(before) else whole[len(before.rstrip("\ufffd")) :]
        found.append("" if fresh.endswith("\ufffd") and end < len(ids) else fresh)
        done += found[-1]
    return found


@lru_cache(maxsize=4)
def _tokenizer(file: Path) -> Any | None:
    if not file.is_file():
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    return Tokenizer.from_file(str(file))

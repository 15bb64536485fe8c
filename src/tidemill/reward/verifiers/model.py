"""The reward `model`: a trained reward model reads the response's own tokens, many samples at once, on the device.

Any Hugging Face folder of a sequence classifier with one output will do; `tidemill export` makes one of a run of the
algorithm reward_model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from tidemill import device as devices
from tidemill.errors import ConfigError, ModelError
from tidemill.reward.api import Sample, batched

READS = "tidemill_reads"  # in config.json: where the model gives its reward, at the `last` token or `before_last`
TOKENS = 16384  # in one forward pass, padding included


@batched
def model(
    samples: Sequence[Sample],
    path: str,
    scale: float = 1.0,
    centre: float = 0.0,
    retokenise: bool = False,
    tokens_per_batch: int = TOKENS,
    device: str = "auto",
) -> list[float]:
    """(the model's output − centre) · scale. Policy and reward model share a tokenizer, unless `retokenise` says that
    the reward model reads prompt and response as text, with a tokenizer of its own. `device`: none given, the run's."""
    judge = opened(path, device)
    rows = [judge.tokens(s) if retokenise or not s.tokens else list(s.tokens) for s in samples]
    return [scale * (value - centre) for value in judge.rewards(rows, tokens_per_batch)]


class LoadedRewardModel:
    def __init__(self, path: str, device: str = "auto") -> None:
        check(path)
        try:
            config = AutoConfig.from_pretrained(path)
            self.model: Any = AutoModelForSequenceClassification.from_pretrained(path, config=config, dtype="auto")
            self.tokenizer = AutoTokenizer.from_pretrained(path)
        except Exception as error:
            raise ModelError(
                f"rewards: transformers cannot open the reward model {path}: {str(error).splitlines()[0][:300]}"
            ) from error
        self.device = devices.pick(device).torch_device
        self.model = self.model.to(self.device).eval()
        self.back = 2 if getattr(config, READS, "last") == "before_last" else 1

    def tokens(self, sample: Sample) -> list[int]:
        if getattr(self.tokenizer, "chat_template", None):
            messages = [{"role": "user", "content": sample.prompt}, {"role": "assistant", "content": sample.response}]
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        return [*self.tokenizer.encode(sample.prompt + sample.response, add_special_tokens=False), *end]

    @torch.no_grad()
    def rewards(self, rows: Sequence[Sequence[int]], tokens_per_batch: int) -> list[float]:
        """In the order of the rows; passes are made of rows of like length, so that little is padded."""
        out = [0.0] * len(rows)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        while order:
            count = max(1, tokens_per_batch // max(len(rows[order[-1]]), 1))
            part, order = order[-count:], order[:-count]
            for i, value in zip(part, self._pass([rows[i] for i in part])):
                out[i] = value
        return out

    def _pass(self, rows: Sequence[Sequence[int]]) -> list[float]:
        lengths = torch.tensor([len(row) for row in rows])
        tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = torch.tensor(row)
        mask = (torch.arange(tokens.shape[1])[None] < lengths[:, None]).long()
        inner = self.model.base_model
        hidden = inner(input_ids=tokens.to(self.device), attention_mask=mask.to(self.device), use_cache=False)[0]
        at = (lengths - self.back).clamp(min=0).to(self.device)
        picked = hidden[torch.arange(len(rows), device=self.device), at]  # (rows, width)
        return [float(v) for v in self.model.score(picked).float()[:, 0].tolist()]


@lru_cache(maxsize=4)
def opened(path: str, device: str = "auto") -> LoadedRewardModel:
    return LoadedRewardModel(path, device)


def close_all() -> None:
    """Give their memory back. Whoever asks for one again opens it anew."""
    opened.cache_clear()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def check(path: str) -> None:
    """What can be known before the model is loaded."""
    folder = Path(path).expanduser()
    if not (folder / "config.json").exists():
        raise ConfigError(
            f"rewards: the reward model {path} does not exist (no config.json in it)",
            "train one with algorithm: reward_model, then: tidemill export runs/NAME --to FOLDER",
        )
    found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kinds = found.get("architectures") or []
    if not any("SequenceClassification" in kind for kind in kinds):
        raise ConfigError(
            f"rewards: {path} is not a reward model but {', '.join(kinds) or 'something else'}",
            "a reward model is a sequence classifier with one output",
        )


def save(decoder: dict[str, torch.Tensor], head: torch.Tensor, config: Any, tokenizer: Any, folder: Path) -> None:
    """A value model's tensors as a folder that AutoModelForSequenceClassification opens."""
    config.num_labels = 1
    setattr(config, READS, "before_last")
    made: Any = AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call]
    made = made.to(head.dtype)
    made.base_model.load_state_dict(decoder, strict=False)
    with torch.no_grad():
        made.score.weight.copy_(head)
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

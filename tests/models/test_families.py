"""One family of each mechanism works as `tidemill bench families` says, and so does the table in docs/models.md."""

from __future__ import annotations

import pytest
from benchmarks import _families_tiny as tiny
from benchmarks import families

from tidemill.models.recurrent import mixers

MECHANISMS = {
    "qwen3_5_text": "packed, with states",  # gated delta net beside attention
    "qwen3_5": "packed, with states",  # its config has a tower, the model that it opens has none
    "jamba": "packed, with states",  # Mamba-1, which cannot go on from a state by several tokens
    "nemotron_h": "packed, with states",  # Mamba-2, and layers that only look or only think
    "lfm2": "packed, with states",  # short convolutions
    "minimax": "packed, with states",  # lightning attention, in words of its own
    "kimi_linear": "packed, with states",  # delta attention with a gate for each number, beside latent attention
    "zamba2": "packed, with states",  # one attention module called by several layers
    "llama4_text": "packed",  # chunked attention
    "gemma3": "packed",  # behind a tower that looks
    "stablelm": "packed",  # hands no keywords down to its attention
    "deepseek_v32": "dense",  # an indexer that picks what is seen
    "bloom": "dense",  # an attention of its own
}
REFUSED = {"bert": "makes logits", "xlnet": "gives other logits", "rwkv": "takes no cache"}


@pytest.fixture(scope="module")
def table() -> dict[str, str]:
    text = families.DOCS.read_text(encoding="utf-8")
    return families.rows_of(text.split(families.BEGIN)[1].split(families.END)[0])


@pytest.mark.parametrize(("family", "how"), MECHANISMS.items())
def test_a_family_of_each_mechanism_works_and_the_table_says_so(family: str, how: str, table: dict[str, str]) -> None:
    found = families.outcome(family)
    assert found == {"outcome": "works", "how": how}
    assert table[family] == families.row(family, found)


@pytest.mark.parametrize(("family", "why"), REFUSED.items())
def test_a_family_that_cannot_be_trained_is_refused_and_the_table_says_why(
    family: str, why: str, table: dict[str, str]
) -> None:
    found = families.outcome(family)
    assert found["outcome"] == "refused"
    assert why in found["how"]
    assert table[family] == families.row(family, found)


def test_the_table_has_every_causal_language_model(table: dict[str, str]) -> None:
    assert sorted(table) == tiny.families()
    assert (
        sum(f"| {how} |" in row for row in table.values() for how in ("packed", "packed, with states", "dense")) >= 60
    )
    assert not any("wrong" in row for row in table.values())


def test_attention_and_whole_decoders_are_no_mixers() -> None:
    ours, _ = tiny.models("qwen3_next")
    found = [name for name, module in ours.named_modules() if mixers.is_mixer(type(module))]
    assert found == ["model.layers.0.linear_attn", "model.layers.2.linear_attn"]

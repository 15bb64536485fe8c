"""Products with context, expert and pipeline parallelism give one rank's loss, gradients and next weights."""

from __future__ import annotations

import pytest

from tests.learn.parallel.products import Case, product
from tests.learn.parallel.test_products import CLOSE
from tidemill.cluster.start.ranks import Ranks

PLAIN = {"name": ["whole_prompts"], "learn": {"share_prompts": False}}
SMALL = {"name": ["many"], "train": {"tokens_per_microbatch": 24}}
AUX = {"name": ["aux_loss"], "learn": {"moe": {"balance": "aux_loss", "coef": 0.1}}}
BIAS = {"name": ["bias"], "learn": {"moe": {"balance": "bias", "bias_rate": 0.02}}}
REPLAY = {"name": ["replay"], "learn": {"moe": {"replay": True}}}
RECOMPUTE = {"name": ["recompute"], "learn": {"recompute": "full"}}
PRODUCTS = [
    Case("dense", {"cp": 2}),
    Case("few_keys", {"cp": 4, "cp_form": "ulysses"}),  # fewer key heads than ranks
    Case("one_key", {"cp": 8}),
    Case("untied", {"cp": 4, "cp_form": "ring"}, PLAIN),
    Case("dense", {"cp": 2, "cp_form": "ring", "fsdp": 2}),
    Case("few_keys", {"cp": 2, "tp": 2}),
    Case("biased", {"cp": 2, "cp_form": "ring", "tp": 2, "fsdp": 2}),
    Case("latent", {"cp": 2}),
    Case("experts", {"fsdp": 2, "ep": 2}),
    Case("mixtral", {"fsdp": 4, "ep": 4}),
    Case("experts", {"fsdp": 4, "ep": 2}),
    Case("mixtral", {"cp": 2, "fsdp": 2, "ep": 4}),
    Case("experts", {"fsdp": 2, "ep": 2, "tp": 2}),
    Case("mixtral", {"replicate": 2, "fsdp": 2, "ep": 2}),
    Case("dense", {"pp": 2}),  # tied
    Case("untied", {"pp": 2}, SMALL),
    Case("deep", {"pp": 4}, SMALL),
    Case("deep", {"pp": 2, "pp_schedule": "interleaved", "pp_chunks": 2}, SMALL),
    Case("dense", {"pp": 2, "fsdp": 2}, SMALL),
    Case("few_keys", {"pp": 2, "tp": 2}),
    Case("dense", {"pp": 2, "cp": 2, "tp": 2}),
    Case("experts", {"pp": 2, "fsdp": 2, "ep": 2}),
    Case("mixtral", {"pp": 2, "cp": 2, "cp_form": "ring", "fsdp": 2, "ep": 2}),
    Case("deep", {"pp": 2, "pp_schedule": "interleaved", "pp_chunks": 2, "fsdp": 2, "tp": 2}, SMALL),
    Case("experts", {"fsdp": 2, "ep": 2, "tp": 2}, AUX),
    Case("mixtral", {"cp": 2, "pp": 2}, AUX),
    Case("experts", {"cp": 2, "cp_form": "ring", "ep": 2}, BIAS),
    Case("mixtral", {"pp": 2, "tp": 2}, BIAS),
    Case("experts", {"fsdp": 2, "ep": 2, "cp": 2}, REPLAY),
    Case("mixtral", {"pp": 2, "tp": 2}, REPLAY),
    Case("experts", {"fsdp": 2, "ep": 2, "cp": 2}, RECOMPUTE),
    Case("deep", {"pp": 2, "cp": 2, "cp_form": "ring"}, RECOMPUTE),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", PRODUCTS, ids=str)
def test_a_product_of_sizes_gives_the_numbers_of_one_rank(case: Case, ranks: Ranks) -> None:
    found = ranks.call(product, case, on=case.ranks)[0]
    far = {name: value for name, value in found.items() if isinstance(value, float) and value > CLOSE}
    assert not far, found

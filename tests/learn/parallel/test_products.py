"""Every product of sizes gives one rank's loss, gradients and next weights."""

from __future__ import annotations

import pytest

from tests.learn.parallel.products import Case, product
from tidemill.cluster.ranks import Ranks

CLOSE = 1e-5  # float32

PRODUCTS = [
    Case("dense", {"fsdp": 2}),
    Case("untied", {"fsdp": 2}),
    Case("dense", {"fsdp": 4}),
    Case("dense", {"fsdp": 8}),
    Case("experts", {"fsdp": 2}),
    Case("experts", {"fsdp": 4}),
    Case("dense", {"replicate": 2}),
    Case("dense", {"replicate": 2, "fsdp": 2}),
    Case("untied", {"replicate": 2, "fsdp": 4}),
    Case("dense", {"tp": 2}),
    Case("untied", {"tp": 2}),
    Case("dense", {"tp": 4}),
    Case("biased", {"tp": 4}),  # fewer key heads than ranks, with biases
    Case("few_keys", {"tp": 4}),
    Case("one_key", {"tp": 8}),
    Case("experts", {"tp": 2}),
    Case("experts", {"tp": 4}),
    Case("latent", {"tp": 2}),
    Case("dense", {"fsdp": 2, "tp": 2}),
    Case("few_keys", {"fsdp": 2, "tp": 4}),
    Case("experts", {"fsdp": 2, "tp": 2}),
    Case("latent", {"fsdp": 2, "tp": 2}),
    Case("one_key", {"replicate": 2, "tp": 2}),
    Case("untied", {"replicate": 2, "fsdp": 2, "tp": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", PRODUCTS, ids=str)
def test_a_product_of_sizes_gives_the_numbers_of_one_rank(case: Case, ranks: Ranks) -> None:
    found = ranks.call(product, case, on=case.ranks)[0]
    far = {name: value for name, value in found.items() if isinstance(value, float) and value > CLOSE}
    assert not far, found

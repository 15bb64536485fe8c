import pytest
import torch

from tidemill.errors import ReshardError
from tidemill.reshard import swap
from tidemill.reshard.swap import Slabs, Swap, learner_tensors


def learner():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    model[1].weight = model[0].weight  # tied
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 64)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def resident(tensors):
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def test_memory_is_freed_and_comes_back_bit_for_bit_under_the_same_tensors():
    model, optimizer = learner()
    tensors = learner_tensors(model, optimizer)
    before = [t.detach().clone() for t in tensors]
    size = resident(tensors)
    held = Swap("cpu")
    went = held.out(tensors)
    assert resident(tensors) == 0
    assert went.copied_bytes == size  # the tied weight once
    held.back()
    assert all(torch.equal(a, b) for a, b in zip(tensors, before))
    model(torch.randn(4, 64)).square().sum().backward()
    optimizer.step()
    assert model[1].weight is model[0].weight


def test_what_has_not_changed_is_not_copied_again(monkeypatch):
    monkeypatch.setattr(swap, "SMALL_BYTES", 0)
    monkeypatch.setattr(swap, "BATCH_BYTES", 20_000)  # several batches
    model, optimizer = learner()
    held = Swap("cpu")
    tensors = learner_tensors(model, optimizer)
    first = held.out(tensors)
    held.back()
    second = held.out(tensors)
    assert (first.skipped_bytes, second.copied_bytes) == (0, 0)
    held.back()
    with torch.no_grad():
        model[0].bias.view(-1)[7:8].data.add_(1.0)  # behind the version counter's back
    third = held.out(tensors)
    assert third.copied_bytes == 64 * 4
    held.back()
    assert model[0].bias.isfinite().all()


def test_a_small_tensor_is_copied_without_asking():
    tensors = [torch.randn(10)]
    held = Swap("cpu")
    for _ in range(2):
        assert held.out(tensors).copied_bytes == 40
        held.back()


def test_the_place_of_a_tensor_that_died_is_used_again():
    held = Swap("cpu")
    for _ in range(5):
        tensors = [torch.randn(1000, 300)]
        held.out(tensors)
        held.back()
        del tensors
    assert held.slabs.nbytes == 1 << 21


def test_a_tensor_may_lie_across_slabs(monkeypatch):
    monkeypatch.setattr(swap, "SLAB_BYTES", 1 << 20)
    tensors = [torch.randn(1000, 700), torch.randn(3), torch.arange(10**6)]
    before = [t.clone() for t in tensors]
    held = Swap("cpu")
    held.out(tensors)
    held.back(wait=False)
    held.wait()
    assert len(held.slabs.slabs) == 11
    assert all(torch.equal(a, b) for a, b in zip(tensors, before))


def test_spans_given_back_are_taken_first():
    slabs = Slabs(pinned=False)
    first = slabs.take(1000)
    slabs.give(first)
    slabs.take(1 << 20)
    assert slabs.nbytes == 1 << 20


def test_going_out_twice_or_dropping_the_only_copy_is_refused():
    tensors = [torch.randn(10)]
    held = Swap("cpu")
    held.out(tensors)
    with pytest.raises(ReshardError, match="out already"):
        held.out(tensors)
    with pytest.raises(ReshardError, match="only copy"):
        held.drop()
    held.back()
    held.drop()
    assert held.slabs.nbytes == 0


def test_memory_that_is_not_a_tensors_own_is_refused(tmp_path):
    torch.zeros(100).numpy().tofile(tmp_path / "mapped")
    mapped = torch.from_file(str(tmp_path / "mapped"), shared=True, size=100)
    with pytest.raises(ReshardError, match="not its own"):
        Swap("cpu").out([mapped])

"""Checkpoints across ranks: any layout reads what any layout wrote, bit for bit, and nothing saved is ever lost."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.learn.parallel.products import gathered, make_model, recipe, samples
from tidemill.algorithms.shared.registry import get
from tidemill.cluster.start.ranks import RankError, Ranks
from tidemill.errors import CheckpointError
from tidemill.learn import checkpoint as plain
from tidemill.learn.engine import Learner

pytestmark = pytest.mark.slow


def learner_of(model: str, parallel: dict[str, Any], seed: int = 0, **learn: Any) -> Any:
    from tidemill.learn.engine import Learner
    from tidemill.learn.parallel import mesh

    config = recipe(parallel, {"learn": learn} if learn else {})
    return Learner(make_model(model, seed), config, get("grpo"), 9, mesh.build(config.learn.parallel))


def everything(learner: Any) -> dict[str, str]:
    """A digest of every whole tensor, optimizer included."""
    tensors = learner.tensors()
    whole = gathered(learner, tensors, "model.")
    for key in ("exp_avg", "exp_avg_sq", "master"):
        own = {n.removeprefix("optimizer.").removesuffix(f".{key}"): t for n, t in tensors.items()
               if n.startswith("optimizer.") and n.endswith(f".{key}")}  # fmt: skip
        if own:
            whole |= {f"{n}.{key}": t for n, t in gathered(learner, own).items()}
    return {n: hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for n, t in whole.items()}


def learn_and_save(model: str, parallel: dict[str, Any], folder: Path, steps: int = 1, learn: Any = None) -> Any:
    learner = learner_of(model, parallel, **(learn or {}))
    for step in range(1, steps + 1):
        learner.accumulate(samples(step))
        learner.update()
        learner.save(folder, step, {"feed": {"position": 7 * step}}, keep=2)
    found = everything(learner)
    learner.close()
    return found


def load_and_look(model: str, parallel: dict[str, Any], path: Path, learn: Any = None) -> Any:
    learner = learner_of(model, parallel, seed=5, **(learn or {}))
    state = learner.load(path)
    found = everything(learner)
    learner.accumulate(samples(8))
    metrics = learner.update()
    learner.close()
    return found, state, metrics


@pytest.mark.parametrize("model", ["dense", "experts"])
def test_saved_on_four_ranks_and_resumed_on_two_eight_and_one_bit_for_bit(
    model: str, ranks: Ranks, tmp_path: Path
) -> None:
    saved = ranks.call(learn_and_save, model, {"fsdp": 2, "tp": 2}, tmp_path, on=4)[0]
    assert plain.fault(tmp_path / "step-000001") is None
    metrics = []
    for parallel, on in (({"fsdp": 2}, 2), ({"tp": 2}, 2), ({"replicate": 2, "fsdp": 4}, 8), ({"fsdp": 4}, 4)):
        found, state, learned = ranks.call(load_and_look, model, parallel, tmp_path / "step-000001", on=on)[0]
        assert found == saved, parallel
        assert state["feed"] == {"position": 7} and state["learner"]["version"] == 1
        metrics.append(learned["loss"])
    tensors, state = plain.load(tmp_path / "step-000001")  # one process, no ranks at all
    alone = Learner(make_model(model, 5), recipe({}, {}), get("grpo"), 9)
    alone.restore(tensors, state["learner"])
    alone.accumulate(samples(8))
    assert alone.update()["loss"] == pytest.approx(metrics[0], abs=1e-6)
    assert max(metrics) - min(metrics) < 1e-6


def learn_while_saving(folder: Path) -> Any:
    learner = learner_of("dense", {"fsdp": 2})
    found = []
    for step in (1, 2):  # the second save reuses the first one's memory
        learner.accumulate(samples(step))
        learner.update()
        found.append(everything(learner))
        learner.save(folder, step, {}, keep=2)
        learner.accumulate(samples(9))
        learner.update()
    learner.close()
    return found


def test_what_is_learned_while_a_checkpoint_is_written_is_not_in_it(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks.call(learn_while_saving, tmp_path, on=2)[0]
    for step, wanted in enumerate(saved, 1):
        found, _, _ = ranks.call(load_and_look, "dense", {"fsdp": 2}, tmp_path / f"step-{step:06d}", on=2)[0]
        assert found == wanted


def test_a_float32_copy_of_the_weights_comes_back_too(ranks: Ranks, tmp_path: Path) -> None:
    learn = {"master": "float32"}
    saved = ranks.call(learn_and_save, "dense", {"fsdp": 2}, tmp_path, 1, learn, on=2)[0]
    assert any(name.endswith(".master") for name in saved)
    found, _, _ = ranks.call(load_and_look, "dense", {"tp": 2}, tmp_path / "step-000001", learn, on=2)[0]
    assert found == saved


def test_a_corrupt_or_missing_shard_is_found_and_the_last_good_one_used(ranks: Ranks, tmp_path: Path) -> None:
    ranks.call(learn_and_save, "dense", {"fsdp": 2}, tmp_path, 2, on=2)
    shard = next((tmp_path / "step-000002").glob("rank-00001*.safetensors"))
    blob = bytearray(shard.read_bytes())
    blob[-5] ^= 1
    shard.write_bytes(blob)
    found = plain.latest(tmp_path)
    assert found is not None and found.step == 1
    assert "does not match its checksum" in found.skipped[0][1]
    shard.unlink()
    found = plain.latest(tmp_path)
    assert found is not None and found.step == 1 and "is missing" in found.skipped[0][1]


def die_while_saving(parallel: dict[str, Any], folder: Path) -> None:
    import os

    from tidemill.learn.checkpoint import saver as checkpoint

    learner = learner_of("dense", parallel)
    learner.accumulate(samples(1))
    learner.update()
    learner.save(folder, 1, {}, keep=2)
    learner.saver.wait()
    dist.barrier()
    if dist.get_rank() == 1:  # its shard is half written when it goes

        def torn(place: Path, rank: int, *taken: Any) -> Any:
            (place / "rank-00001-001.safetensors").write_bytes(b"half a file")
            os._exit(9)

        checkpoint.write_pieces = torn
    learner.save(folder, 2, {}, keep=2)
    learner.saver.wait()


def test_a_kill_during_a_save_loses_nothing_saved(kept_ranks: Any, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1 died"):
        kept_ranks.get().call(die_while_saving, {"fsdp": 2}, tmp_path, on=2)
    found = plain.latest(tmp_path)
    assert found is not None and found.step == 1 and not found.skipped
    kept_ranks.get().call(learn_and_save, "dense", {"fsdp": 2}, tmp_path, 3, on=2)
    assert plain.latest(tmp_path).step == 3  # type: ignore[union-attr]
    assert not list(tmp_path.glob(f"{plain.ASIDE}*"))


def save_nowhere(folder: Path) -> str:
    learner = learner_of("dense", {"fsdp": 2})
    learner.save(folder, 1, {}, keep=1)
    try:
        learner.saver.wait()
    except CheckpointError as error:
        return error.message
    return ""


def test_a_save_that_fails_is_told_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    told = ranks.call(save_nowhere, tmp_path / "taken", on=2)
    assert all(told)


def stream_in(folder: Path, parallel: dict[str, Any]) -> Any:
    from tidemill.learn.build import learner

    config = recipe(parallel, {"model": {"path": str(folder)}})
    made = learner(config, 3)
    first = made.logprobs(samples(3)).values
    made.accumulate(samples(2))
    metrics = made.update()
    held = sum(t.numel() for n, t in made.tensors().items() if n.startswith("model."))
    made.save(folder / "saved", 1, {}, keep=1)
    made.close()
    return first, metrics, held


def stream_out(checkpoint: Path, folder: Path, definition: Path) -> None:
    from tidemill.learn.checkpoint import model_folder as folders

    folders.FILE_BYTES = 30_000
    folders.export(checkpoint, folder, definition, dist.get_rank(), dist.get_world_size())


@pytest.mark.parametrize("model", ["dense", "experts", "latent"])
def test_a_model_folder_is_read_and_written_in_pieces(model: str, ranks: Ranks, tmp_path: Path) -> None:
    whole = make_model(model)
    whole.save_pretrained(tmp_path / "in")
    alone = Learner(whole, recipe({}, {}), get("grpo"), 3)
    first, metrics, held = ranks.call(stream_in, tmp_path / "in", {"fsdp": 2, "tp": 2}, on=4)[0]
    assert held < 0.6 * sum(p.numel() for p in whole.parameters())
    assert abs(first - alone.logprobs(samples(3)).values).max() < 1e-5
    alone.accumulate(samples(2))
    assert alone.update()["loss"] == pytest.approx(metrics["loss"], abs=1e-6)
    ranks.call(stream_out, tmp_path / "in/saved/step-000001", tmp_path / "out", tmp_path / "in", on=2)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for (name, a), (_, b) in zip(again.named_parameters(), whole.named_parameters()):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0, msg=name)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == whole.config.model_type

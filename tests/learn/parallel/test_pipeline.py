"""A pipeline of stages computes what one rank does, for micro-batches of any lengths and any number of them."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.learn.parallel.models import config, gradients, model, over_all, samples
from tidemill.algorithms.shared.aggregate import local_weights
from tidemill.algorithms.shared.registry import get
from tidemill.errors import ModelError
from tidemill.learn.engine import Learner, score
from tidemill.learn.logprob.tokens import token_logprobs
from tidemill.learn.parallel.pipeline import Pipeline, Stages, ends
from tidemill.learn.parallel.schedule import Action, forward_only, kept, play, timetable
from tidemill.learn.rows.packing import microbatches, pack
from tidemill.learn.rows.tokens import token_batch
from tidemill.models.layers.stages import split

CPU = torch.device("cpu")


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_every_action_happens_once_after_all_it_needs(count, chunks):
    for microbatch_count in (1, 2, 3, 4, 7, 8, 12):
        table = timetable(count, chunks, microbatch_count)
        last = count * chunks - 1
        done, left = set(), [list(actions) for actions in table]
        while any(left):
            before = len(done)
            for actions in left:
                while actions and all(need in done for need in needs(actions[0], last)):
                    done.add(actions.pop(0))
            assert len(done) > before, "a rank waits for one that waits for it"
        assert len(done) == 2 * (last + 1) * microbatch_count


def needs(action, last):
    stage, m = action.stage, action.microbatch
    if action.is_forward:
        return [Action(True, stage - 1, m)] if stage else []
    return [Action(True, stage, m), *([Action(False, stage + 1, m)] if stage < last else [])]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("chunks", [1, 2])
def test_a_pipeline_idles_and_keeps_no_more_than_it_must(count, chunks):
    table, ticks = play(count, chunks, 2 * count)
    assert ticks == 4 * count * chunks + 2 * (count - 1)  # the textbook's bubble, in ticks of one run of layers
    for rank, actions in enumerate(table):
        in_flight = np.cumsum([1 if a.is_forward else -1 for a in actions])
        assert in_flight.max() <= kept(rank, count, chunks)


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_two_ranks_speak_in_one_order(chunks):
    for table in (timetable(3, chunks, 7), forward_only(3, chunks, 7)):
        for rank, actions in enumerate(table):
            after = table[(rank + 1) % 3]
            sent = [(a.stage + 1, a.microbatch) for a in actions if a.is_forward and a.stage < 3 * chunks - 1]
            wanted = [(a.stage, a.microbatch) for a in after if a.is_forward and a.stage > 0]
            assert sent == wanted


SETTINGS = {"train": {"tokens_per_microbatch": 40}, "learn": {"share_prompts": True}}


def finisher(made, settings, batch, packs, losses):
    def finish(i, hidden):
        packed, rows = packs[i]
        head = made.get_output_embeddings()
        cap = getattr(made.config, "final_logit_softcapping", None)
        found = token_logprobs(hidden[0].index_select(0, packed.predicts), head.weight, packed.targets, softcap=cap)
        if not torch.is_grad_enabled():
            losses.append(found[0])
            return found[0]
        loss, _ = get("grpo").loss(token_batch(batch.gather(rows), packed, found), settings)
        losses.append(loss.item())
        return loss

    return finish


def rank_step(name, chunks, batch, over):
    rank = dist.get_rank()
    made, settings = model(name), config(**{**SETTINGS, **over})
    split(made, rank, dist.get_world_size(), chunks)
    stages = Stages(made, rank, dist.get_world_size(), chunks)
    width = made.config.hidden_size
    pipeline = Pipeline(over_all(), chunks, stages, lambda packed: (1, len(packed.tokens), width), torch.float32, CPU)
    batch = batch.merge({"weight": local_weights(batch, settings)})
    rows = microbatches(batch, settings.train.tokens_per_microbatch, settings.learn.share_prompts)
    packs = [(pack(batch.gather(r), CPU, settings.learn.share_prompts), r) for r in rows]
    losses, logprobs = [], []
    pipeline.score([p for p, _ in packs], finisher(made, settings, batch, packs, logprobs))
    pipeline.learn([p for p, _ in packs], finisher(made, settings, batch, packs, losses))
    if made.config.tie_word_embeddings and (pair := ends(dist.group.WORLD)) is not None:
        dist.all_reduce(made.get_input_embeddings().weight.grad, group=pair)
    return sum(losses), [x.numpy() for x in logprobs], gradients(made), len(rows)


@pytest.mark.parametrize(
    ("name", "count", "chunks"),
    [
        ("qwen2", 2, 1),  # tied
        ("qwen2", 2, 2),
        ("qwen3-untied", 4, 1),
        ("llama-4kv", 3, 1),  # 4 layers over 3 ranks
        ("gemma2", 2, 1),  # layers of two kinds
        ("qwen3-moe-tied", 2, 2),
        ("mixtral", 4, 1),
    ],
)
def test_a_pipeline_gives_loss_gradients_and_scores_of_one_rank(ranks, name, count, chunks):
    batch, settings = samples(groups=4), config(**SETTINGS)
    made = model(name)
    learner = Learner(made, settings, get("grpo"), 1)
    scores = score(made, batch, settings)
    learner.accumulate(batch)
    wanted = gradients(made)
    loss = sum(float(s["loss"].value) for s in learner._stats)
    found = ranks.call(rank_step, name, chunks, batch, {}, on=count)
    assert found[-1][3] > count  # enough micro-batches to fill the pipeline
    assert found[-1][0] == pytest.approx(loss, abs=1e-5)
    rows = microbatches(batch, 40, True)
    np.testing.assert_allclose(
        np.concatenate(found[-1][1]), np.concatenate([scores.gather(r).values for r in rows]), atol=1e-5
    )
    seen = set()
    for _, _, grads, _ in found:
        for parameter, grad in grads.items():
            torch.testing.assert_close(grad, wanted[parameter], atol=2e-5, rtol=1e-4)
            seen.add(parameter)
    assert seen == set(wanted)
    for own in (found[0][2], found[-1][2]):
        assert "lm_head.weight" in own or "model.embed_tokens.weight" in own
    if made.config.tie_word_embeddings:
        assert torch.equal(*(r[2]["model.embed_tokens.weight"] for r in (found[0], found[-1])))


def test_fewer_micro_batches_than_ranks_still_give_one_ranks_gradients(ranks):
    batch, over = samples(groups=1, each=2), {"train": {"tokens_per_microbatch": 4096}}
    made = model("qwen2")
    learner = Learner(made, config(**{**SETTINGS, **over}), get("grpo"), 1)
    learner.accumulate(batch)
    for chunks in (1, 2):
        found = ranks.call(rank_step, "qwen2", chunks, batch, over, on=2)
        assert found[0][3] == 1
        for _, _, grads, _ in found:
            for parameter, grad in grads.items():
                torch.testing.assert_close(grad, gradients(made)[parameter], atol=2e-5, rtol=1e-4)


def test_a_rank_holds_its_layers_alone():
    made = model("qwen3-untied")
    split(made, 1, 4)
    names = {name.split(".")[2] for name, _ in made.named_parameters()}
    assert names == {"1"}


def test_models_that_cannot_be_cut_are_refused():
    with pytest.raises(ModelError, match="4 layers, fewer than 6 stages"):
        split(model("qwen2"), 0, 3, 2)

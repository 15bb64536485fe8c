import signal
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.faults.test_resume import RECIPE, KillAfter, numbers
from tests.learn.test_engine import CPU, SHAPE, config, samples
from tidemill.algorithms.shared.registry import get
from tidemill.flow.evaluate import averaged
from tidemill.learn import checkpoint
from tidemill.learn.checkpoint import model_folder as folder
from tidemill.learn.ema import Ema
from tidemill.learn.engine import Learner, score
from tidemill.models import lora
from tidemill.models.load import make_tiny
from tidemill.rollout.engine import Request, Sampling
from tidemill.rollout.native.engine import NativeEngine
from tidemill.run import start as launch


def test_the_mean_follows_its_formula_and_is_swapped_in_and_out():
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    ema = Ema({"w": weight}, 0.75)
    for value in (2.0, 4.0):
        weight.data.fill_(value)
        ema.update()
    wanted = torch.tensor([0.75 * (0.75 * a + 0.25 * 2) + 0.25 * 4 for a in (1.0, 2.0)])
    with ema.swapped():
        torch.testing.assert_close(weight.detach(), wanted)
    assert weight.tolist() == [4.0, 4.0]


def test_a_failed_evaluation_gives_the_weights_back():
    weight = torch.nn.Parameter(torch.zeros(2))
    ema = Ema({"w": weight}, 0.5)
    weight.data.fill_(1.0)
    with pytest.raises(RuntimeError), ema.swapped():
        raise RuntimeError
    assert weight.tolist() == [1.0, 1.0]


def test_a_restored_learner_has_its_mean_again():
    settings, batch = config(learn={"lr": 1e-2, "ema": 0.9}), samples()
    first, second = (
        Learner(make_tiny(SHAPE, torch.float32, seed, CPU).model, settings, get("grpo"), 2) for seed in (0, 1)
    )
    first.accumulate(batch)
    first.update()
    second.restore(*first.state())
    found = []
    for learner in (first, second):
        with learner.averaged():
            found.append(score(learner.model, batch, settings).values)
    assert (found[0] == found[1]).all()
    assert (found[0] != score(first.model, batch, settings).values).any()


def test_an_engine_remembers_nothing_of_prompts_read_under_other_weights():
    settings = config(learn={"ema": 0.5})
    made = make_tiny(SHAPE, torch.float32, 0, CPU)
    learner = Learner(made.model, settings, get("grpo"), 2)
    with torch.no_grad():
        for mean in learner.ema.means.values():
            mean.mul_(-3.0)

    def engine():
        return NativeEngine(made.model, eos_ids=(), max_seqs=4, max_len=64, page_size=4, reuse_prefix=True)

    def answer(one):
        one.submit(Request(0, [3 + i % 7 for i in range(24)], Sampling(temperature=0.0, max_tokens=8)))
        done = []
        while one.has_work:
            done += one.step()
        return done[0].logprobs

    kept = engine()
    before = answer(kept)
    with averaged(learner, kept):
        inside = answer(kept)
        assert inside == pytest.approx(answer(engine()), abs=1e-5)
    assert answer(kept) == pytest.approx(before, abs=1e-5)
    assert inside != pytest.approx(before, abs=1e-2)


def test_a_streamed_folder_has_the_mean_unless_the_weights_are_asked_for(tmp_path):
    settings = config(learn={"lr": 1e-2, "ema": 0.9})
    made = make_tiny(SHAPE, torch.float32, 0, CPU)
    made.model.save_pretrained(tmp_path / "definition")
    learner = Learner(made.model, settings, get("grpo"), 2)
    learner.accumulate(samples())
    learner.update()
    tensors, state = learner.state()
    saved = checkpoint.save(tmp_path / "saved", 1, tensors, {"learner": state}, keep=1)
    for raw in (False, True):
        folder.export(saved, tmp_path / str(raw), tmp_path / "definition", raw_weights=raw)
        found = AutoModelForCausalLM.from_pretrained(tmp_path / str(raw))
        with nullcontext() if raw else learner.averaged():
            for name, weight in lora.merged(learner.model).items():
                torch.testing.assert_close(found.get_parameter(name), weight, msg=name)
    name = "model.layers.0.mlp.up_proj.weight"
    both = [AutoModelForCausalLM.from_pretrained(tmp_path / str(raw)).get_parameter(name) for raw in (False, True)]
    assert not torch.equal(*both)


def test_a_resumed_run_has_the_mean_and_the_evaluations_of_one_never_stopped(tmp_path):
    recipe = {**RECIPE, "train": {**RECIPE["train"], "steps": 4}, "learn": {"lr": 1e-2, "ema": 0.8}}
    launch.train({**recipe, "folder": str(tmp_path / "whole")})
    assert launch.train({**recipe, "folder": str(tmp_path / "stopped")}, watch=KillAfter(2, signal.SIGINT)).is_stopped
    launch.resume(tmp_path / "stopped" / "small")
    whole, stopped = (tmp_path / name / "small" for name in ("whole", "stopped"))
    assert numbers(stopped) == numbers(whole)
    one, other = (checkpoint.load(checkpoint.latest(run / "checkpoints").path)[0] for run in (whole, stopped))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)

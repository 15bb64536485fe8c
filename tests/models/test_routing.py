"""Routers of a mixture: what rollout chose is recorded and chosen again; loads are balanced, however a step is cut."""

import copy

import numpy as np
import pytest
import torch
from tests.cluster.ports import Copy
from tests.environment.test_turns import Echo, Words
from tests.learn.parallel.models import config, gradients, model, samples

from tidemill.algorithms.shared.registry import get
from tidemill.batch import Column
from tidemill.environment.api import Task
from tidemill.environment.speech import Speech
from tidemill.errors import DataError, ModelError
from tidemill.learn.engine import Learner, freeze, score
from tidemill.learn.rows.packing import input_places, pack
from tidemill.learn.values.critic import ValueLearner
from tidemill.learn.values.model import ValueModel
from tidemill.models.attention.packed import Packed
from tidemill.models.mixture import routing
from tidemill.recipe.config import EnvironmentSettings
from tidemill.rollout.engine import Request, Sampling
from tidemill.rollout.native.engine import NativeEngine
from tidemill.rollout.turns import TurnsEngine

CPU = torch.device("cpu")
MIXTURES = ["qwen3-moe", "mixtral", "deepseek-v3"]


def hidden(made, tokens, routes=None, made_routes=None):
    context = routing.Routed(Packed([len(tokens)], CPU), torch.ones(len(tokens)), routes=routes, made=made_routes)
    ids = torch.as_tensor(tokens)[None]
    at = torch.arange(len(tokens))[None]
    return made.get_decoder()(input_ids=ids, position_ids=at, use_cache=False, tide=context).last_hidden_state[0]


def own_routes(made, tokens):
    """(tokens, layers, k) that the routers choose by themselves."""
    chosen = {}
    with torch.no_grad():
        hidden(made, tokens, made_routes=chosen)
    return torch.stack([chosen[i] for i in range(len(chosen))], 1)


def rollout(made, n=3, record=True, **more):
    engine = NativeEngine(made, eos_ids=[1], max_seqs=8, max_len=64, page_size=4, record_routes=record, **more)
    for request in range(2):
        prompt = list(range(5 + request, 14 + 2 * request))
        engine.submit(Request(request, prompt, Sampling(max_tokens=9, ignore_eos=True), n=n))
    done = []
    while engine.has_work:
        done += engine.step()
    return done


@pytest.mark.parametrize("name", MIXTURES)
def test_replaying_what_a_router_would_choose_changes_nothing(name):
    made, tokens = model(name), np.arange(3, 30)
    routing.of(made)
    with torch.no_grad():
        plain = hidden(made, tokens)
        again = hidden(made, tokens, routes=own_routes(made, tokens))
    assert torch.equal(plain, again)


@pytest.mark.parametrize("name", MIXTURES)
def test_replayed_experts_are_weighed_as_the_router_weighs(name):
    made, tokens = model(name, num_hidden_layers=1), np.arange(3, 30)
    routing.of(made)
    gate = made.get_decoder().layers[0].mlp.gate
    routes = torch.stack([torch.randperm(8)[:2] for _ in tokens]).unsqueeze(1)
    seen = []
    gate.register_forward_hook(lambda m, a, out: seen.append(out))
    hidden(made, tokens, routes=routes)
    logits, weights, chosen = seen[0]
    assert torch.equal(chosen, routes[:, 0])
    scores = logits.sigmoid() if name == "deepseek-v3" else logits.softmax(-1)
    picked = scores.gather(1, chosen)
    scale = gate.routed_scaling_factor if name == "deepseek-v3" else 1.0
    torch.testing.assert_close(weights, scale * picked / picked.sum(-1, keepdim=True))


@pytest.mark.parametrize("name", MIXTURES)
def test_rollout_records_the_route_of_every_token_but_the_last(name):
    """Prompts that a group shares, branches in the middle of a page, and every token drawn."""
    made = model(name)
    done = rollout(made)
    assert len(done) == 6
    for completion in done:
        tokens = [*completion.request.prompt, *completion.tokens]
        wanted = own_routes(made, tokens[:-1])
        found = completion.routes.reshape(len(tokens) - 1, 4, 2)
        np.testing.assert_array_equal(np.sort(found, -1), np.sort(wanted.numpy(), -1))


def test_recording_changes_no_token():
    made = model("qwen3-moe")
    drawn = [[(c.request.id, c.index, c.tokens) for c in rollout(made, record=r)] for r in (False, True)]
    assert sorted(drawn[0]) == sorted(drawn[1])


def batch_of(done):
    from tidemill.flow.stages.rolling import rollout_columns

    batch = rollout_columns(sorted(done, key=lambda c: (c.request.id, c.index)))
    more = {"group": np.repeat([0, 1], len(done) // 2), "advantages": np.linspace(-1, 1, len(done)).astype(np.float32)}
    return batch.merge({**more, "id": np.arange(len(done))})


@pytest.mark.parametrize("share", [False, True])
def test_a_learner_with_other_weights_goes_the_way_rollout_went(share):
    """The gap between rollout's and learner's log-probabilities is smaller when routes are the same."""
    made = model("qwen3-moe")
    batch = batch_of(rollout(made, n=8))
    other = copy.deepcopy(made)
    with torch.no_grad():  # what a device of another make or lower precision does to numbers
        for p in other.parameters():
            p.mul_(1 + 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    gaps, agreements = {}, {}
    for replay in (False, True):
        settings = config(learn={"share_prompts": share, "moe": {"replay": replay}})
        learner = Learner(copy.deepcopy(other), settings, get("grpo"), 1)
        gaps[replay] = np.abs(learner.logprobs(batch).values - batch.values("logprobs")).mean()
        learner.accumulate(batch)
        agreements[replay] = learner.update().get("moe_replay_agreement")
    assert gaps[True] < gaps[False]
    assert agreements[False] is None and 0.5 < agreements[True] < 1.0
    settings = config(learn={"share_prompts": share, "moe": {"replay": True}})
    same = Learner(copy.deepcopy(made), settings, get("grpo"), 1)
    np.testing.assert_allclose(same.logprobs(batch).values, batch.values("logprobs"), atol=2e-4)


@pytest.mark.parametrize("share", [False, True])
def test_input_places_point_at_the_packed_tokens(share):
    batch = samples()
    row, place = input_places(batch, share)
    packed = pack(batch, CPU, share)
    tokens = [int(batch["tokens"][int(r)][int(p)]) for r, p in zip(row, place)]
    assert packed.tokens.tolist() == tokens
    assert packed.positions.tolist() == place.tolist()


def learned(balance, budget, share, updates=2):
    made = model("qwen3-moe")
    settings = config(
        learn={"lr": 1e-3, "share_prompts": share, "moe": {"balance": balance, "coef": 0.1, "bias_rate": 0.01}},
        train={"tokens_per_microbatch": budget},
    )
    learner = Learner(made, settings, get("grpo"), updates)
    for i in range(updates - 1):
        learner.accumulate(samples(i))
        metrics = learner.update()
    learner.accumulate(samples(9))
    return gradients(made), metrics


@pytest.mark.parametrize("balance", ["aux_loss", "bias"])
def test_balance_means_the_same_however_a_step_is_cut(balance):
    whole, metrics = learned(balance, 4096, False)
    part, metrics_of_parts = learned(balance, 40, True)
    for name, grad in whole.items():
        torch.testing.assert_close(part[name], grad, atol=1e-5, rtol=1e-4)
    plain = learned("none", 4096, False)[0]
    gate = "model.layers.0.mlp.gate.weight"
    assert not torch.allclose(plain[gate], whole[gate], atol=1e-4)  # balancing does something
    assert metrics.keys() == metrics_of_parts.keys() and metrics["moe_busiest"] > 1


def test_the_auxiliary_loss_has_the_gradient_of_its_formula():
    made, tokens = model("mixtral", num_hidden_layers=1), np.arange(3, 40)
    routers = routing.of(made)
    routers.settings = config(learn={"moe": {"balance": "aux_loss", "coef": 0.5}}).learn.moe
    routers.load = torch.rand(1, 8)
    weights = torch.rand(len(tokens))
    gate = made.get_decoder().layers[0].mlp.gate
    inputs = []
    gate.register_forward_hook(lambda m, args, out: inputs.append(args[0].detach()))
    context = routing.Routed(Packed([len(tokens)], CPU), torch.ones(len(tokens)), weights=weights)
    ids, at = torch.as_tensor(tokens)[None], torch.arange(len(tokens))[None]
    out = made.get_decoder()(input_ids=ids, position_ids=at, use_cache=False, tide=context).last_hidden_state
    (0.0 * out.sum()).backward()  # nothing but the auxiliary loss is left
    found, gate.weight.grad = gate.weight.grad, None
    p = torch.nn.functional.linear(inputs[0], gate.weight).softmax(-1)
    (0.5 * 8 * ((p * routers.load[0]).sum(-1) * weights).sum()).backward()
    torch.testing.assert_close(found, gate.weight.grad, atol=1e-6, rtol=1e-4)


def test_rows_without_an_advantage_are_balanced_by_the_auxiliary_loss_too():
    batch = samples().merge({"advantages": np.zeros(9, np.float32)})
    learner = Learner(model("mixtral"), config(learn={"moe": {"balance": "aux_loss", "coef": 0.5}}), get("grpo"), 1)
    learner.accumulate(batch)
    assert all(gate.weight.grad is not None and gate.weight.grad.any() for gate in learner.routers.gates)


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_the_bias_evens_the_load_out(name):
    made = model(name)
    settings = config(learn={"lr": 0.0, "moe": {"balance": "bias", "bias_rate": 0.004}})
    learner = Learner(made, settings, get("grpo"), 40)
    busiest = []
    for _ in range(40):
        learner.accumulate(samples(groups=8))
        busiest.append(learner.update()["moe_busiest"])
    assert np.mean(busiest[-5:]) < 0.75 * busiest[0]
    tensors, state = learner.state()
    again = Learner(model(name), settings, get("grpo"), 30)
    again.restore(tensors, state)
    biases = learner.routers.biases()
    assert all(bias.abs().max() > 0.01 for bias in biases)
    assert all(torch.equal(a, b) for a, b in zip(again.routers.biases(), biases, strict=True))
    np.testing.assert_array_equal(*(score(each.model, samples(), settings).values for each in (again, learner)))


def test_a_bias_that_an_older_checkpoint_held_apart_from_the_model_is_taken_up():
    settings = config(learn={"moe": {"balance": "bias"}})
    learner = Learner(model("qwen3-moe"), settings, get("grpo"), 1)
    biases = learner.routers.biases()
    older = torch.arange(float(sum(len(b) for b in biases))).view(len(biases), -1)
    learner.routers.restore({"routers.bias": older})
    assert all(torch.equal(bias, row) for bias, row in zip(biases, older, strict=True))


def test_a_router_with_a_place_for_the_bias_keeps_it_in_float32_and_chooses_by_it():
    made = model("deepseek-v3", num_hidden_layers=1).bfloat16()
    learner = Learner(made, config(learn={"moe": {"balance": "bias"}}), get("grpo"), 1)
    gate = made.get_decoder().layers[0].mlp.gate
    assert gate.e_score_correction_bias.dtype == torch.float32
    assert [id(b) for b in learner.routers.biases()] == [id(gate.e_score_correction_bias)]
    gate.e_score_correction_bias[5] = 10.0
    assert (own_routes(made, np.arange(3, 30)) == 5).any(-1).all()


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_rollouts_own_copy_is_given_the_bias_with_the_weights(name):
    made, settings = model(name), config(learn={"moe": {"balance": "bias", "bias_rate": 0.3}})
    served = copy.deepcopy(made).requires_grad_(False)
    routing.prepare(served, settings.learn.moe)
    learner = Learner(made, settings, get("grpo"), 2)
    engine = NativeEngine(served, eos_ids=[1], max_seqs=8, max_len=64, page_size=4)
    own = Copy(made, served, engine)
    learner.accumulate(samples(groups=8))
    learner.update()
    own.publish(1)
    own.take_up(1)
    tokens = np.arange(3, 30)
    assert torch.equal(own_routes(served, tokens), own_routes(made, tokens))
    assert all(torch.equal(a, b) and b.any() for a, b in zip(routing.of(served).biases(), learner.routers.biases()))


def test_recomputed_layers_replay_too():
    made = model("qwen3-moe")
    batch = batch_of(rollout(made))
    found = []
    for recompute in ("none", "full"):
        settings = config(learn={"recompute": recompute, "moe": {"replay": True, "balance": "aux_loss"}})
        learner = Learner(model("qwen3-moe", seed=1), settings, get("grpo"), 1)
        learner.accumulate(batch)
        found.append(gradients(learner.model))
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("recompute", ["mlp", "full"])
def test_recomputed_layers_count_their_tokens_once(recompute):
    """Rows without an advantage have no backward pass: counted twice, the others would weigh double beside them."""
    batch = samples()
    advantages = batch.values("advantages").copy()
    advantages[: batch.rows // 2] = 0.0
    batch = batch.merge({"advantages": advantages})
    loads = []
    for kind in ("none", recompute):
        settings = config(learn={"recompute": kind, "moe": {"balance": "aux_loss"}})
        learner = Learner(model("qwen3-moe"), settings, get("grpo"), 1)
        learner.accumulate(batch)
        loads.append(learner.routers.counts.clone())
    torch.testing.assert_close(*loads)


def test_forgotten_tokens_count_in_no_load():
    settings, found = config(learn={"moe": {"balance": "bias"}}), []
    for forgotten in ([], [samples(seed=1)]):
        learner = Learner(model("qwen3-moe"), settings, get("grpo"), 1)
        for batch in forgotten:
            learner.accumulate(batch)
            learner.forget()
        learner.accumulate(samples())
        found.append(learner.update())
    assert found[0] == found[1]


def test_asking_the_model_without_its_adapters_hooks_no_router_twice():
    batch = batch_of(rollout(model("qwen3-moe")))
    settings = config(learn={"lora_rank": 2, "moe": {"replay": True, "balance": "aux_loss", "coef": 0.5}})
    found = []
    for is_asked in (False, True):
        learner = Learner(model("qwen3-moe", seed=1), settings, get("grpo"), 1)
        if is_asked:
            asked = score(freeze(learner.model), batch, settings).values
            np.testing.assert_allclose(asked, learner.logprobs(batch).values, atol=1e-5)  # replayed alike
        learner.accumulate(batch)
        found.append({name: p.grad for name, p in learner.model.named_parameters() if p.grad is not None})
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_the_model_without_its_adapters_chooses_experts_as_it_did_before_the_bias_moved(name):
    settings = config(learn={"lr": 0.0, "lora_rank": 2, "moe": {"balance": "bias", "bias_rate": 0.3}})
    learner = Learner(model(name), settings, get("grpo"), 2)
    reference = freeze(learner.model)
    before = score(reference, samples(), settings).values
    learner.accumulate(samples(groups=8))
    learner.update()
    moved = learner.logprobs(samples()).values
    np.testing.assert_array_equal(score(reference, samples(), settings).values, before)
    assert np.abs(moved - before).max() > 1e-3
    np.testing.assert_array_equal(learner.logprobs(samples()).values, moved)  # the policy has its bias back


def test_a_critic_that_shares_the_trunk_leaves_its_routers_to_the_policy():
    batch = batch_of(rollout(model("qwen3-moe")))
    settings = config(algorithm={"name": "ppo", "critic": {"trunk": "shared"}}, learn={"moe": {"replay": True}})
    agreed = []
    for has_critic in (False, True):
        made = model("qwen3-moe", seed=1)
        critic = ValueLearner(ValueModel(made, True), settings, get("ppo"), 1) if has_critic else None
        learner = Learner(made, settings, get("ppo"), 1)
        learner.accumulate(batch)
        agreed.append(learner.update()["moe_replay_agreement"])
        assert critic is None or critic.routers is None
    assert agreed[0] == agreed[1] < 1


def test_what_cannot_be_routed_is_refused():
    with pytest.raises(ModelError, match="no routers"):
        Learner(model("qwen2"), config(learn={"moe": {"balance": "bias"}}), get("grpo"), 1)
    made = model("mixtral")
    learner = Learner(made, config(learn={"moe": {"replay": True}}), get("grpo"), 1)
    short = samples().merge({"routes": Column.jagged([[0]] * 9, np.int16)})
    with pytest.raises(DataError, match="4 layers"):
        learner.accumulate(short)


def test_the_reference_keeps_routers_of_its_own():
    made = model("mixtral")
    routers = routing.of(made)
    copied = copy.deepcopy(made)
    assert routing.of(copied) is not routers
    settings = config()
    np.testing.assert_allclose(score(copied, samples(), settings).values, score(made, samples(), settings).values)


def test_a_conversation_has_the_routes_of_all_its_turns():
    made = model("qwen3-moe")
    inner = NativeEngine(made, eos_ids=[9], max_seqs=8, max_len=64, page_size=4, record_routes=True)
    playing = TurnsEngine(
        inner, EnvironmentSettings(name="nim", max_turn_tokens=5), Speech(Words(), is_chat=False), [9]
    )
    playing.make = lambda task, **args: Echo(task, turns=3)
    playing.submit(Request(1, [3, 1, 2, 5], Sampling(max_tokens=40), n=2, task=Task()))
    done = []
    while playing.has_work:
        done += playing.step()
    assert len(done) == 2 and all(0 in c.mask for c in done)
    for completion in done:
        tokens = [*completion.request.prompt, *completion.tokens]
        found = completion.routes.reshape(len(tokens) - 1, 4, 2)
        np.testing.assert_array_equal(np.sort(found, -1), np.sort(own_routes(made, tokens[:-1]).numpy(), -1))

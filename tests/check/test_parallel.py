"""Impossible products of parallel sizes are refused before any model loads, with the sizes that would work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tidemill.check import parallel as sizes
from tidemill.check import rules
from tidemill.check.precheck import problems as all_problems
from tidemill.recipe.config import Config, ModelSettings, ParallelSettings
from tidemill.recipe.ranks import world_problem


def problems(config: Config, model: ModelSettings) -> list[str]:
    return [*sizes.problems(config, model), *rules.problems(config)]


TINY = {"hidden": 64, "layers": 4, "heads": 8, "kv_heads": 2, "intermediate": 96}
MOE = {"tiny": {**TINY, "architecture": "qwen3_moe", "experts": 12}}


def found(parallel: dict[str, Any], model: dict[str, Any] | None = None, **learn: Any) -> str:
    config = Config.model_validate(
        {
            "learn": {"parallel": parallel, **learn},
            "model": model or {"tiny": TINY},
            "train": {"tokens_per_microbatch": 64},
        }
    )
    return "\n".join(problems(config, config.model))


@pytest.mark.parametrize("parallel", [{}, {"tp": 2}, {"tp": 4}, {"fsdp": 8, "cp": 2}, {"pp": 4, "tp": 8}])
def test_possible_products_pass(parallel: dict[str, Any]) -> None:
    assert found(parallel) == ""


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"tp": 3}, "8 heads and 2 key/value heads; 1, 2, 4 or 8 would do"),
        ({"tp": 16}, "1, 2, 4 or 8 would do"),
        ({"pp": 5}, "more than the model's 4 layers; at most 4 would do"),
        ({"fsdp": 6, "ep": 4}, "does not divide fsdp × cp = 6, the ranks it lies over; 1, 2, 3 or 6 would do"),
        ({"fsdp": 2, "ep": 2}, "the model has no experts; 1 would do"),
        ({"cp": 3, "cp_form": "ulysses"}, "1, 2, 4 or 8 would do, or cp_form=ring"),
        ({"cp": 64}, "at least 128 would do"),
        ({"pp": 2, "pp_chunks": 2}, "pp_schedule=interleaved and pp above 1 would do"),
        ({"pp": 2, "pp_schedule": "interleaved"}, "pp_chunks=2"),
    ],
)
def test_impossible_products_are_refused_with_sizes_that_work(parallel: dict[str, Any], words: str) -> None:
    assert words in found(parallel)


def test_a_width_that_does_not_divide_is_refused() -> None:
    assert "MLP's width 90; 1 or 2 would do" in found({"tp": 4}, {"tiny": {**TINY, "intermediate": 90}})


def test_experts_are_counted_from_the_folder(tmp_path: Path) -> None:
    raw = {"num_attention_heads": 8, "num_hidden_layers": 4, "num_key_value_heads": 4, "hidden_size": 64,
           "intermediate_size": 96, "num_experts": 6}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    words = found({"fsdp": 4, "ep": 4}, {"path": str(tmp_path)})
    assert "which does not divide the model's 6 experts" in words
    assert found({"fsdp": 2, "ep": 2}, {"path": str(tmp_path)}) == ""


def test_settings_that_need_whole_tensors_are_refused_on_several_ranks() -> None:
    assert "learn.fp8=none" in found({"tp": 2}, fp8="rowwise")
    assert not found({"fsdp": 2}, fp8="rowwise")
    assert "whole rows" in found({"tp": 2}, lora_rank=4, dora=True)
    assert found({"fsdp": 2}, lora_rank=4, dora=True) == ""
    for fits in ({"optimizer": "muon"}, {"moments": "int8"}, {"lora_rank": 4}, {"ema": 0.9}):
        assert found({"fsdp": 2}, **fits) == ""


@pytest.mark.parametrize("moe", [{"replay": True}, {"balance": "aux_loss"}], ids=str)
def test_mlps_computed_again_in_a_pipeline_are_refused_where_routes_come_with_the_micro_batch(
    moe: dict[str, Any],
) -> None:
    mixture = {"tiny": {**TINY, "architecture": "qwen3_moe"}}
    assert "full would do" in found({"pp": 2}, mixture, recompute="mlp", moe=moe)
    assert found({"pp": 2}, mixture, recompute="full", moe=moe) == found({"fsdp": 2}, mixture, recompute="mlp", moe=moe)


def test_a_critic_is_refused_where_it_cannot_be_cut() -> None:
    def words(sizes: dict[str, int], **critic: Any) -> str:
        own = Config.model_validate({"learn": {"parallel": sizes}, "algorithm": {"name": "ppo", "critic": critic}})
        return "\n".join(problems(own, ModelSettings.model_validate({"tiny": TINY})))

    assert words({"fsdp": 2}) == ""
    assert "own would do" in words({"fsdp": 2}, trunk="shared")
    assert "cannot be split into stages" in words({"pp": 2})
    assert words({"pp": 2}, parallel={"fsdp": 2}) == ""
    assert "algorithm.critic.parallel is 4 ranks" in words({"fsdp": 2}, parallel={"fsdp": 4})
    assert "algorithm.critic.parallel.tp is 3" in words({"fsdp": 3}, parallel={"tp": 3})


def test_a_world_of_another_size_is_refused_with_the_size_that_fits() -> None:
    assert world_problem(ParallelSettings(fsdp=2, tp=2), 4) == ""
    problem = world_problem(ParallelSettings(fsdp=2, tp=2), 8)
    assert "learn.parallel.fsdp=4 would do" in problem
    problem = world_problem(ParallelSettings(tp=3), 8)
    assert "must divide 8" in problem


def test_the_check_runs_with_all_others() -> None:
    from tidemill.check import precheck

    config = Config.model_validate({"learn": {"parallel": {"tp": 3}}, "model": {"tiny": TINY}})
    assert any(
        "learn.parallel.tp" in p for p in precheck.problems(config, ModelSettings.model_validate({"tiny": TINY}))
    )


def refused(tp: int, model: dict[str, Any] | None = None, **over: Any) -> str:
    made = {
        "rollout": {"tp": tp, "max_new_tokens": 8},
        "cluster": {"executor": "processes"},
        "model": model or {"tiny": TINY},
    }
    config = Config.model_validate({**made, "data": {"max_prompt_tokens": 16}, **over})
    return "\n".join(p for p in all_problems(config, config.model) if p.startswith("rollout."))


def test_an_engine_of_as_many_ranks_as_divide_the_model_passes() -> None:
    assert refused(2) == ""
    colocated = {"executor": "processes", "placement": "colocated"}
    assert refused(2, cluster=colocated, learn={"parallel": {"fsdp": 4}}) == ""


@pytest.mark.parametrize(
    ("tp", "over", "words"),
    [
        (
            3,
            {},
            "rollout.tp is 3, which does not divide the model's 8 heads and 2 key/value heads; 1, 2, 4 or 8 would do",
        ),
        (16, {}, "rollout.tp is 16, which does not divide"),
        (1, {"rollout": {"pp": 5}}, "rollout.pp is 5, but it is more than the model's 4 layers; at most 4 would do"),
        (1, {"rollout": {"dp": 2, "engine": "hf"}}, "hf has one rank for each; 1 would do"),
        (1, {"rollout": {"dp": 4, "ep": 3}, "model": MOE}, "rollout.ep is 3: 3 parts of the experts do not lie evenly"),
        (1, {"rollout": {"ep": 2}, "model": MOE}, "none would do, or rollout.dp=2"),
        (1, {"model": {"tiny": {**TINY, "architecture": "gemma3"}}, "rollout": {"dp": 2}}, "not gemma3"),
        (2, {"cluster": {"executor": "local"}}, "cluster.executor=processes or ray would do, or 1"),
        (2, {"rollout": {"tp": 2, "engine": "hf"}}, "hf has one rank for each; 1 would do"),
        (2, {"cluster": {"executor": "ray", "placement": "colocated"}}, "cluster.placement.rollout=separated"),
        (
            2,
            {"model": {"tiny": {**TINY, "architecture": "qwen3_moe", "experts": 3}}},
            "rollout.ep is 2, which does not divide the model's 3 experts; 1 or 3 would do",
        ),
    ],
)
def test_an_engine_that_cannot_be_shared_is_refused_with_what_would_do(
    tp: int, over: dict[str, Any], words: str
) -> None:
    assert words in refused(tp, **over)


def test_engines_of_learners_must_divide_them() -> None:
    cluster = {"executor": "ray", "placement": "colocated"}
    told = refused(2, cluster=cluster, learn={"parallel": {"fsdp": 3}})
    assert "does not divide the 3 ranks of learn.parallel that engines share; 1 or 3 would do" in told

from pathlib import Path

import pytest
import torch

from tidemill.algorithms.shared.registry import every, get
from tidemill.models.load import load, save_folder
from tidemill.recipe.config import AlgorithmSettings, Config

EVERYTHING = {"old_logprobs": "recompute", "kl": {"coef": 0.1, "place": "reward"}, "covariance": {"mode": "kl"}}


@pytest.mark.parametrize("name", [a.name for a in every() if "decoder" in a.policies])
@pytest.mark.parametrize("settings", [{}, EVERYTHING], ids=["paper", "everything"])
def test_every_table_fits_together_and_ends_in_learning(name: str, settings: dict) -> None:
    graph = get(name).graph(Config(algorithm={"name": name, **settings}))
    last = graph.stages[-1]
    assert (last.name, last.scope, last.writes) == ("learn", "group", ())
    assert {"id", "group", "tokens", "prompt_length", "mask"} <= {*last.reads}


@pytest.mark.parametrize("name", [a.name for a in every() if "decoder" in a.policies])
def test_every_algorithm_says_what_it_is_and_what_its_paper_chose(name: str) -> None:
    assert get(name).about and "\n" not in get(name).about
    assert "aggregation" in get(name).paper
    assert AlgorithmSettings(name=name).name == name


@pytest.mark.parametrize("name", [a.name for a in every() if "decoder" in a.policies and a.input_kind == "prompts"])
def test_all_that_an_algorithm_reads_is_written(name: str) -> None:
    """Advantages read no column that their stage does not name."""
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[1] / "oracles"))
    from cases import batch_of, random_samples

    config = Config(algorithm={"name": name, **EVERYTHING})
    stage = get(name).graph(config).stage("advantage")
    batch = batch_of(random_samples(0)).select(stage.reads)
    written = get(name).advantages(batch, config)
    assert set(written) == set(stage.writes)
    assert len(get(name).keep(batch, config)) == batch.rows


@pytest.mark.parametrize("name", [a.name for a in every() if "decoder" in a.policies])
def test_every_algorithm_has_a_small_recipe_that_passes_the_checks(name: str, tmp_path: Path) -> None:
    from tidemill.check import precheck
    from tidemill.recipe import load as recipe

    config = recipe.load(f"cpu/{name}", [f"algorithm.teacher={tmp_path}"] if name == "distill" else []).config
    if name == "distill":
        made = load(recipe.model_of(config), seed=0, device=torch.device("cpu"))
        save_folder(made.model, made.tokenizer, tmp_path)
    precheck.check(config)
    assert config.algorithm.name == name and config.about

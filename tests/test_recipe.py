import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tidemill.errors import ConfigError
from tidemill.recipe import dialect, schema
from tidemill.recipe import load as recipe
from tidemill.recipe.config import Config


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TIDEMILL_RECIPES", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def refusal(given, overrides=()) -> str:
    with pytest.raises(ConfigError) as caught:
        recipe.load(given, overrides)
    return str(caught.value)


# Loading


def test_a_recipe_is_found_by_name_and_by_path(folder):
    path = write(folder, "small.yaml", "name: small\n")
    assert recipe.load("small").config.name == "small"
    assert recipe.load(path).config.name == "small"
    assert recipe.load("small.yaml").path == Path("small.yaml")


def test_a_missing_recipe_names_the_nearest(folder):
    write(folder, "hedgehog.yaml", "")
    assert "did you mean hedgehog?" in refusal("hegdehog")


def test_a_recipe_extends_another_and_mappings_merge_while_lists_replace(folder):
    write(
        folder,
        "base.yaml",
        "train: {steps: 5, prompts_per_step: 4}\nrollout: {stop: [a, b]}\ndata: {args: {x: 1, y: 2}}\n",
    )
    write(
        folder,
        "deep/child.yaml",
        "extends: ../base.yaml\ntrain: {steps: 7}\nrollout: {stop: [c]}\ndata: {args: {y: 3}}\n",
    )
    write(folder, "grandchild.yaml", "extends: deep/child\nseed: 3\n")
    config = recipe.load("grandchild").config
    assert (config.train.steps, config.train.prompts_per_step, config.seed) == (7, 4, 3)
    assert config.rollout.stop == ("c",)
    assert config.data.args == {"x": 1, "y": 3}


def test_recipes_that_extend_each_other_in_a_ring_are_refused(folder):
    write(folder, "a.yaml", "extends: b\n")
    write(folder, "b.yaml", "extends: a.yaml\n")
    assert "cycle: a.yaml → b.yaml → a.yaml" in refusal("a")


def test_sources_say_default_file_with_line_and_command_line(folder):
    write(folder, "base.yaml", "seed: 1\n\ntrain:\n  steps: 5\n")
    write(folder, "r.yaml", "extends: base\nname: x\n")
    sources = recipe.load("r", ["learn.lr=1e-3"]).sources
    assert sources["train.steps"] == "base.yaml:4"
    assert sources["name"] == "r.yaml:2"
    assert sources["learn.lr"] == "command line"
    assert sources["train.prompts_per_step"] == "default"
    assert set(sources) == {key for key, *_ in recipe.describe(recipe.load("r"))}


def test_numbers_words_and_none_mean_what_people_mean(folder):
    text = "learn: {lr: 1e-6, clip_norm: none, recompute: none}\nobserve: {progress: off}\n"
    write(folder, "r.yaml", text + "data: {chat: on, shuffle: no, args: {p: 5e-1}}\n")
    config = recipe.load("r").config
    assert config.learn.lr == 1e-6
    assert config.learn.clip_norm is None
    assert config.learn.recompute == "none"
    assert (config.observe.progress, config.data.chat, config.data.shuffle) == ("off", "on", False)
    assert config.data.args == {"p": 0.5}


def test_text_overrides_are_taken_as_they_stand():
    config = recipe.load({}, ["data.template={question}: ", "name=007", "model.path=none", "about='a: b'"]).config
    assert (config.data.template, config.name, config.model.path) == ("{question}: ", "007", None)
    assert config.about == "a: b"


def test_overrides_reach_into_mappings_and_lists():
    config = recipe.load({"data": {"args": {"a": 1}}}, ["data.args.digits=3", "rollout.stop=[x, y]"]).config
    assert config.data.args == {"a": 1, "digits": 3}
    assert config.rollout.stop == ("x", "y")


def test_a_short_form_changes_only_what_it_names():
    config = recipe.load({"algorithm": {"name": "grpo", "clip_high": 0.3}}, ["algorithm=dapo", "rewards=exact"]).config
    assert (config.algorithm.name, config.algorithm.clip_high) == ("dapo", 0.3)
    assert [f.function for f in config.rewards.functions] == ["exact"]


def test_an_algorithms_own_defaults_lie_under_whatever_was_written(folder):
    write(folder, "base.yaml", "algorithm: {name: gspo}\n")
    write(folder, "child.yaml", "extends: base\nalgorithm: {dual_clip: 3}\n")
    loaded = recipe.load("child")
    assert loaded.config.algorithm == recipe.load({"algorithm": {"name": "gspo", "dual_clip": 3}}).config.algorithm
    assert loaded.config.algorithm.clip_high == 4e-4
    assert loaded.sources["algorithm.clip_high"] == "default of gspo"
    assert recipe.load("child", ["algorithm=dapo"]).config.algorithm.clip_high == 0.28
    assert recipe.load("child", ["algorithm=dapo", "algorithm.clip_high=0.5"]).config.algorithm.clip_high == 0.5


def test_a_section_can_be_taken_out_and_put_back(folder):
    write(folder, "base.yaml", "model: {tiny: {layers: 2}}\n")
    write(folder, "out.yaml", "extends: base\nmodel: {tiny: none}\n")
    write(folder, "back.yaml", "extends: out\nmodel: {tiny: {}}\n")
    assert recipe.load("out").config.model.tiny is None
    assert recipe.load("back").config.model.tiny.layers == 4  # the default, not the base's
    assert recipe.load("out", ["model.tiny.layers=3"]).config.model.tiny.layers == 3


def test_a_ready_config_takes_overrides():
    config = recipe.load({"seed": 3}).config
    loaded = recipe.load(config, ["train.steps=2"])
    assert (loaded.config.seed, loaded.config.train.steps) == (3, 2)
    assert loaded.sources["seed"] == "python"


@settings(max_examples=60, deadline=None)
@example("", {"a.b": 1, "a": 2})  # a dot in a name of one's own is no path
@given(
    st.text(max_size=20),
    st.dictionaries(
        st.text(max_size=5),
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8)),
        max_size=4,
    ),
)
def test_the_dumped_config_loads_again_to_an_equal_one(text, args):
    given_tree = {
        "about": text,
        "data": {"args": args, "template": text},
        "rollout": {"stop": [text, "on", "1e-6", "null", "007"]},
    }
    config = recipe.load(given_tree, ["model.tiny.layers=2", "rewards=[exact]"]).config
    assert config.data.args == args
    assert recipe.load(dialect.parse(recipe.dump(config))).config == config


# Refusing


def test_a_misspelt_key_is_refused_with_its_place_and_the_nearest_key_of_the_whole_tree(folder):
    write(folder, "r.yaml", "name: x\nlr: 0.1\n")
    message = refusal("r", ["train.step=3", "num_generations=8", "rolout.top_k=1"])
    assert "unknown key 'lr' (r.yaml:2); did you mean learn.lr" in message
    assert "unknown key 'train.step' (command line); did you mean train.steps" in message
    assert "train.samples_per_prompt" in message
    assert "rollout.top_k" in message or "did you mean rollout" in message


def test_several_errors_are_told_at_once_with_key_value_place_and_what_would_do(folder):
    write(folder, "r.yaml", "train:\n  steps: ten\nalgorithm:\n  kl: {estimator: k4}\nrewards:\n  - {fuction: exact}\n")
    message = refusal("r", ["train.prompts_per_step=0", "rollout.top_p=2"])
    assert "train.steps is 'ten' (r.yaml:2), but wants a whole number of at least 1" in message
    assert "algorithm.kl.estimator is 'k4' (r.yaml:4), but wants one of k1, k2, k3" in message
    assert "rewards.functions[0].fuction" in message and "did you mean function?" in message
    assert "train.prompts_per_step is 0 (command line)" in message
    assert "rollout.top_p is 2 (command line), but wants a number above 0 and of at most 1" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train: [", "r.yaml:1 is not YAML"),
        ("name: a\n\tseed: 1\n", "r.yaml:2 is not YAML"),
        ("about: one: two\n", "put text that contains ': ' in quotes"),
        ("- 1\n", "a recipe is a mapping"),
        ("seed: 1\nname: b\nseed: 2\n", "seed is given twice in r.yaml, on lines 1 and 3"),
        ("extends: [a, b]\n", "wants one path or recipe name"),
        ("name: !!python/object/apply:os.getcwd []\n", "is not YAML"),
        ("name: 12\n", "name is 12 (r.yaml:1), but wants text that is not empty; put it in quotes"),
        ("train: 5\n", "train is 5 (r.yaml:1), but wants settings of its own (train.steps, "),
        ("model: {tiny: {heads: 3}}\n", "model.tiny (r.yaml:1): heads (3) must divide"),
    ],
)
def test_a_malformed_recipe_is_refused_in_one_sentence(folder, text, words):
    write(folder, "r.yaml", text)
    assert words in refusal("r")


def test_a_recipe_that_is_not_text_is_refused(folder):
    (folder / "r.yaml").write_bytes(b"\xff\xfe\x00")
    assert "r.yaml cannot be read" in refusal("r")


def test_an_override_without_equals_is_refused():
    assert "'train.steps' (command line) is not an override" in refusal({}, ["train.steps"])


# Listing


def test_listing_gives_names_and_abouts_and_survives_a_broken_recipe(folder):
    write(folder, "a.yaml", "about: learns\n")
    write(folder, "b.yaml", "extends: a\n")
    write(folder, "broken.yaml", "a: [")
    write(folder, "_part.yaml", "about: hidden\n")
    rows = dict(recipe.listing())
    assert rows["a"] == rows["b"] == "learns"
    assert rows["broken"].startswith("cannot be read")
    assert "_part" not in rows


def test_every_setting_has_help_and_says_what_it_wants():
    for key in schema.tree().values():
        if key.section is None:
            assert key.help, key.name
            assert key.wants
    assert {"learn.lr", "model.tiny.hidden", "data.args"} <= set(recipe.keys())


def test_every_default_satisfies_its_own_checks():
    assert recipe.load({}).config == Config()


def test_loading_recipes_needs_no_torch():
    code = "import sys, tidemill.recipe.load as r, tidemill.estimate.plan as p\np.plan(r.load({}).config)\nr.listing()\nassert 'torch' not in sys.modules"  # noqa: E501
    subprocess.run([sys.executable, "-c", code], check=True)

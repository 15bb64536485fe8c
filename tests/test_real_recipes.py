"""The recipes of real tasks and domains: right on paper, and one of them trained at a smaller size."""

import json
from pathlib import Path

import pytest

from tidemill.check import precheck, rules
from tidemill.data.source import open_source
from tidemill.errors import ConfigError, DataError
from tidemill.recipe import load as recipe
from tidemill.recipe.config import Data

NAMES = [name for name, _ in recipe.listing() if name.startswith(("real/", "domains/"))]
TASKS = ("gsm8k", "countdown", "json", "reasoning", "preference")


def row(n: int) -> dict[str, str]:
    worked = f"She has {n}+{n}=<<{n}+{n}={2 * n}>>{2 * n} pens."
    return {"question": f"Ana has {n} pens and buys {n}. How many?", "answer": f"{worked}\n#### {2 * n}"}


ROWS = [row(n) for n in range(1, 40)]


@pytest.fixture
def gsm8k(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "sets" / "gsm8k"
    folder.mkdir(parents=True)
    for split, rows in (("train", ROWS[:30]), ("test", ROWS[30:])):
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setenv("TIDEMILL_DATA", str(tmp_path / "sets"))
    return folder


def test_every_task_and_domain_has_a_size_for_one_gpu_and_one_for_two_cores() -> None:
    for task in TASKS:
        assert {f"real/{task}-smollm2", f"real/{task}-smollm2-cpu"} <= set(NAMES)
    for domain in ("finance", "health", "industry", "service"):
        assert {f"domains/{domain}", f"domains/{domain}-cpu"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_valid_and_every_setting_in_it_is_read(name: str, gsm8k: Path) -> None:
    config = recipe.load(name).config
    problems = [p for p in _problems(config) if "reward model" not in p and "smollm2-135m" not in p]
    assert not problems
    assert not list(rules.unread(config))
    assert recipe.model_of(config).path == "smollm2-135m"
    train, held_out = open_source(config.data, 0)
    assert train.example(0).response and held_out.size


def _problems(config: recipe.Config) -> list[str]:
    try:
        precheck.check(config)
    except ConfigError as error:
        lines = [line for line in error.message.splitlines() if line.strip()]
        return lines[1:] if lines[0].endswith("settings cannot work:") else lines
    return []


def test_a_recipe_is_found_by_its_last_name_alone() -> None:
    assert recipe.load("gsm8k-smollm2").config.name == "gsm8k-smollm2"
    assert recipe.load("countdown-smollm2-cpu").path == recipe.load("real/countdown-smollm2-cpu").path


def test_gsm8k_is_found_by_name_and_its_solutions_become_equations(gsm8k: Path) -> None:
    train, test = open_source(recipe.load("gsm8k-smollm2").config.data, 0)
    assert (train.size, test.size) == (30, 9)
    assert train.example(0).response == "1+1=2\n#### 2"
    assert train.example(0).answer == "2"


def test_where_gsm8k_is_missing_the_message_says_where_it_was_looked_for_and_whence_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path))
    monkeypatch.delenv("TIDEMILL_DATA", raising=False)
    with pytest.raises(ConfigError, match=r"train.jsonl and test.jsonl from https://github.com.*data.source=FOLDER"):
        precheck.check(recipe.load("gsm8k-smollm2").config)
    with pytest.raises(DataError, match="is not on this machine: looked in"):
        open_source(Data(source="gsm8k"), 0)


def test_rewriting_names_a_wrong_column_and_a_wrong_pattern(gsm8k: Path) -> None:
    columns = {"prompt": "question"}
    with pytest.raises(ConfigError, match="names the column 'respone'; did you mean response"):
        open_source(Data(source="gsm8k", columns=columns, rewrite={"respone": (("a", "b"),)}), 0)
    with pytest.raises(ConfigError, match="is not a valid regular expression"):
        open_source(Data(source="gsm8k", columns=columns, rewrite={"prompt": (("(", "b"),)}), 0)

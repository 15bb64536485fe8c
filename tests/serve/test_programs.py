"""Programs as environments: what is learned is what was sampled, and each sample comes back once."""

from __future__ import annotations

import sys
import time
import venv
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.serve.made import model_folder
from tidemill.batch import GROUP, ID
from tidemill.environment import program
from tidemill.environment.api import Task
from tidemill.errors import ConfigError
from tidemill.flow.stages.rolling import rollout_columns
from tidemill.learn.engine import score
from tidemill.models.load import open_folder
from tidemill.recipe.config import Config, EnvironmentSettings
from tidemill.rollout.engine import Request, Sampling
from tidemill.serve.make import close_engine, make_engine

AGENTS = Path(__file__).with_name("agents.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("programs") / "tiny")


@pytest.fixture
def playing(folder):
    """Make an engine that plays a program's samples, and play some."""
    engines = []

    def close():
        while engines:
            close_engine(engines.pop())

    def play(function, tasks, n=1, max_tokens=200, **environment):
        config = Config.model_validate(
            {
                "model": {"path": str(folder)},
                "environment": {"program": f"{AGENTS}:{function}", **environment},
                "rewards": "environment",
                "data": {"source": "multiplication", "max_prompt_tokens": 400},
                "rollout": {"max_new_tokens": 600, "concurrent": 16},
            }
        )
        loaded = open_folder(folder, config.model, torch.device("cpu"))
        close()
        engine = make_engine(loaded, config)
        engines.append(engine)
        sampled = watched(engine.inner)
        for i, task in enumerate(tasks):
            prompt = loaded.tokenizer.encode(f"what is {i}?")
            engine.submit(Request(i, prompt, Sampling(max_tokens=max_tokens), n=n, task=task))
        done, deadline = [], time.monotonic() + 60
        while engine.has_work:
            done += engine.step()
            assert time.monotonic() < deadline
        assert sorted((c.request.id, c.index) for c in done) == [(i, k) for i in range(len(tasks)) for k in range(n)]
        return done, sampled, (loaded, config)

    yield play
    close()


def watched(engine):
    """Keep what the engine itself gave."""
    sampled, step = [], engine.step

    def kept():
        made = step()
        sampled.extend(made)
        return made

    engine.step = kept
    return sampled


def test_what_is_learned_is_what_was_sampled_and_the_learner_agrees(playing):
    tasks = [Task(answer="x", meta={}, where=str(i)) for i in range(4)]
    done, sampled, (loaded, config) = playing("talk", tasks, n=2)
    made = [t for c in sampled for t in c.tokens]
    learned = [t for c in done for t, m in zip(c.tokens, c.mask) if m]
    assert sorted(learned) == sorted(made) and len(sampled) == 8 * 5
    said = {tuple(c.tokens) for c in sampled}
    for completion in done:
        assert completion.played.reward == 0.5 and completion.played.parts["calls"] == 5
        assert completion.played.parts["trajectories"] == 1 + len(completion.starts) >= 3
        runs = np.split(np.array(completion.tokens), np.flatnonzero(np.diff(completion.mask)) + 1)
        own = {tuple(run.tolist()) for run, m in zip(runs, [completion.mask[0], *_flips(completion.mask)]) if m}
        assert own <= said
    own = {GROUP: np.array([c.request.id for c in done]), ID: np.arange(len(done))}
    found = score(loaded.model, rollout_columns(done).merge(own), config).values
    mask = np.concatenate([c.mask for c in done]).astype(bool)
    recorded = np.concatenate([c.logprobs for c in done])
    assert np.abs(found - recorded)[mask].max() < 1e-4


def _flips(mask):
    return [mask[i] for i in range(1, len(mask)) if mask[i] != mask[i - 1]]


@pytest.mark.parametrize("kind", ["crash", "raise", "exit", "outcome", "noise", "broken", "disconnect"])
def test_a_faulty_program_costs_its_own_sample_alone(playing, kind):
    done, _, _ = playing("fault", [Task(answer=kind), Task(answer="good")], max_tokens=50)
    own, other = sorted(done, key=lambda c: c.request.id)
    assert other.played.reward == 1.0 and other.played.error is None
    fails = kind in ("crash", "raise", "exit", "outcome")
    assert (own.played.error is not None) == fails and own.played.reward == (0.0 if fails else 1.0)
    assert sum(own.mask) > 0  # what it had sampled is learned from
    if kind == "raise":
        assert "a mistake of the agent" in own.played.error


def test_a_program_that_hangs_is_ended_in_time(playing):
    done, _, _ = playing("fault", [Task(answer="hang"), Task(answer="good")], timeout_s=2)
    assert "did not end within 2 s" in min(done, key=lambda c: c.request.id).played.error


def test_a_flood_of_requests_ends_its_program(playing):
    done, sampled, _ = playing("fault", [Task(answer="flood"), Task(answer="good")], max_calls=8)
    own, other = sorted(done, key=lambda c: c.request.id)
    assert "more than 16 times" in own.played.error and other.played.error is None
    assert len(sampled) <= 8 + 2


def test_a_body_of_a_hundred_megabytes_is_not_taken(playing):
    done, _, _ = playing("fault", [Task(answer="body"), Task(answer="good")], max_body=1 << 16)
    assert [c.played.error for c in done] == [None, None]


def test_sub_agents_may_ask_at_once(playing):
    done, sampled, _ = playing("parallel", [Task()])
    assert done[0].played.parts["trajectories"] == 4 and len(sampled) == 4


def test_an_evaluator_makes_the_reward_of_the_programs_value(playing):
    done, _, _ = playing("talk", [Task()], evaluator=f"{AGENTS}:judged")
    assert done[0].played.reward == 1.0 and done[0].played.is_solved


def test_the_same_sample_is_the_same_beside_others(playing):
    alone = playing("talk", [Task()])[0][0]
    beside = next(c for c in playing("talk", [Task()] * 6)[0] if c.request.id == 0)
    assert beside.tokens == alone.tokens


def test_a_command_is_a_program_too(playing, folder, tmp_path):
    script = tmp_path / "agent.py"
    script.write_text(
        "import json, os, sys\n"
        f"sys.path.insert(0, {str(AGENTS.parent)!r})\n"
        "from agents import ask\n"
        "task = json.load(sys.stdin)\n"
        "ask(os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY'], "
        "[{'role': 'user', 'content': task['prompt']}], max_tokens=5)\n"
        "print('working')\n"
        "print(json.dumps({'reward': 0.25}))\n"
    )
    done, sampled, _ = playing("talk", [Task()], program=f"{sys.executable} {script}")
    assert done[0].played.reward == 0.25 and len(sampled) == 1


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """An interpreter without any package."""
    folder = tmp_path_factory.mktemp("other") / "venv"
    venv.create(folder, with_pip=False)
    return folder / "bin" / "python"


def test_a_program_runs_in_an_interpreter_of_its_own(playing, bare_python, monkeypatch):
    monkeypatch.setenv("OWN_PREFIX", str(bare_python.parents[1]))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    done, sampled, _ = playing("where", [Task(), Task()], python=str(bare_python))
    assert [c.played.reward for c in done] == [1.0, 1.0] and all(c.played.parts["is_own"] for c in done)
    assert len(sampled) == 2


@pytest.mark.parametrize(
    ("own", "says"),
    [
        ({"program": "agent.py:gone"}, "agent.py has no 'gone'"),
        ({"program": "agent.py:needs"}, "cannot be called with"),
        ({"program": "broken.py:solve"}, "No module named 'torch'"),
        ({"program": "agent.py:solve", "python": "no/such/python"}, "there is no interpreter"),
        ({"program": "agent.py:solve", "python": "/bin/true"}, "cannot run Tidemill's side"),
        ({"program": "echo hello"}, "environment.python is for functions"),
    ],
)
def test_what_another_interpreter_cannot_run_is_refused_before_a_model_is_loaded(
    bare_python, tmp_path, monkeypatch, own, says
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    Path("agent.py").write_text("def solve(base_url, api_key, task): ...\ndef needs(base_url): ...\n")
    Path("broken.py").write_text("import torch\ndef solve(base_url, api_key, task): ...\n")
    with pytest.raises(ConfigError) as refused:
        program.check(EnvironmentSettings(**{"python": str(bare_python), **own}))
    assert says in refused.value.message
    program.check(EnvironmentSettings(program="agent.py:solve", python=str(bare_python)))


def test_what_the_first_sample_imports_is_there_for_later_ones_but_for_the_agents_own(playing, tmp_path, monkeypatch):
    (tmp_path / "own_lazy.py").write_text("import os\nKEY = os.environ['OPENAI_API_KEY']\n")
    monkeypatch.chdir(tmp_path)
    done, _, _ = playing("lazily", [Task() for _ in range(6)], workers=1)
    parts = [c.played.parts for c in sorted(done, key=lambda c: c.request.id)]
    assert parts[0]["wave"] == 0.0 and parts[-1]["wave"] == parts[-1]["email_mime_audio"] == 1.0
    assert all(p["own_lazy"] == 0.0 for p in parts)

"""Trainer: a run from Python. A recipe, a model and data go in; steps, metrics and a model come out."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill import imports
from tidemill.errors import ConfigError, TidemillError
from tidemill.observe import control
from tidemill.observe.run_folder import RunFolder, metrics_of
from tidemill.recipe import load as recipes
from tidemill.recipe.config import Config
from tidemill.run import start
from tidemill.run.interrupt import drained
from tidemill.run.watcher import Watcher
from tidemill.trainer import inputs
from tidemill.trainer.callbacks import All, Callbacks, Told, as_callback
from tidemill.trainer.steps import Step, steps_of
from tidemill.trainer.table import Table

if TYPE_CHECKING:
    from tidemill.flow.records import Evaluation
    from tidemill.flow.workers import Workers
    from tidemill.run.summary import Summary

BASE = "own"  # the recipe under a model and data that come without one: sizes are taken from both


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to: its summary, the metrics of every step, and its folder."""

    summary: Summary
    metrics: Table
    folder: Path

    def _repr_html_(self) -> str:
        state = "stopped" if self.summary.is_stopped else "finished"
        head = f"<p><b>{state}</b> after {self.summary.steps} steps in {self.summary.seconds:.1f} s · {self.folder}</p>"
        return head + self.metrics._repr_html_()


class Trainer:
    """Train a language model by reinforcement learning, or by any other of Tidemill's algorithms.

    Args:
        model: a Hugging Face folder, a known model's name, `org/name` on the hub, or a model object.
        rewards: a function or several, or names of built-in rewards; `(function, weight)` gives one a weight. A
            function takes a `Sample`, or TRL's lists (`completions`, `prompts` and the data's columns by name).
        data: a list of rows, any iterable, a `datasets` dataset, a file, or a generator's name.
        algorithm: `grpo`, `ppo`, `dapo`, …: `tidemill recipes` shows what there is.
        recipe: a recipe to start from; the other arguments are laid over it.
        eval_data: held-out rows; without them some rows of `data` are kept aside.
        environment: whom the model talks to: a name, or a class of your own.
        tokenizer: of a model object.
        callbacks: functions called after each step, or `Callback` objects.
        overrides: settings as the command line writes them, `key=value`; they win over everything else.
        display: what shows progress; none: a widget in a notebook, a panel in a terminal.
        settings: any setting, by its whole key, by its section (`learn={"lr": 1e-5}`) or by its last word (`lr=1e-5`).
    """

    def __init__(
        self,
        model: Any = None,
        rewards: Any = None,
        data: Any = None,
        algorithm: str | Mapping[str, Any] | None = None,
        *,
        recipe: str | Path | Mapping[str, Any] | Config | recipes.LoadedRecipe | None = None,
        eval_data: Any = None,
        environment: Any = None,
        tokenizer: Any = None,
        callbacks: Callbacks = (),
        overrides: Sequence[str] = (),
        display: Watcher | None = None,
        **settings: Any,
    ) -> None:
        self.callbacks = [as_callback(one) for one in callbacks]
        self._display, self._object, self._tokenizer = display, None, tokenizer
        self._kept: dict[str, Any] = {}  # functions that this process alone knows, by name
        self._model_folder: Path | None = None
        self._wants_stop = False
        self._workers: Workers | None = None  # of a run under way
        self._moments: Any = None
        self._summary: Summary | None = None
        self._speaker: Any = None
        self._resumes = False
        if recipe is None:
            recipe = BASE if model is not None and data is not None else None
        if recipe is None:
            raise ConfigError(
                "nothing says what to train", "Trainer(model=…, rewards=…, data=…), or recipe='quickstart'"
            )
        tree = inputs.settings_of(settings)
        if recipe == BASE and "name" not in tree:
            tree["name"] = algorithm if isinstance(algorithm, str) else "run"
        given = {"algorithm": algorithm, "environment": environment}
        base = recipes.load(recipe, settings=tree | {k: v for k, v in given.items() if isinstance(v, str | Mapping)})
        own = self._inputs(base.config, model, rewards, data, eval_data, environment)
        self._loaded = recipes.load(base, overrides, settings=own) if own or overrides else base

    @classmethod
    def from_run(
        cls,
        run: str | Path,
        *,
        rewards: Any = None,
        environment: Any = None,
        callbacks: Callbacks = (),
        overrides: Sequence[str] = (),
        display: Watcher | None = None,
        **settings: Any,
    ) -> Trainer:
        """Open a run: `train()` goes on with it from its newest checkpoint, with changed settings if any are given.
        Rewards and environments that were given as functions of a notebook or a closure are given again."""
        folder = RunFolder.open(run, exclusive=False)
        made = cls(recipe=folder.config, rewards=rewards, environment=environment, callbacks=callbacks, display=display)
        made._changes = [*inputs.as_overrides(inputs.settings_of(settings)), *overrides]
        made._loaded = recipes.load(folder.config)
        made._resumes = True
        return made

    _changes: Sequence[str] = ()

    # Doing

    def train(self) -> Result:
        """Train to the end of the run, or until it is stopped (Ctrl-C, or `stop()`); what it came to."""
        with self._running() as moments:
            summary = drained(moments)
        return Result(summary, self.metrics, self.folder)

    def steps(self) -> Iterator[Step]:
        """Train a step at a time: `for step in trainer.steps(): …`. Leaving the loop stops the run and saves it."""
        with self._running() as moments:
            yield from steps_of(moments, self._samples_of)

    def stop(self) -> None:
        """End the run after the step under way, with everything saved. From a callback, or between steps."""
        self._wants_stop = True

    def set(self, key: str, value: float) -> None:
        """Change `learn.lr`, `rollout.temperature` or `algorithm.kl.coef` from the next step on; a resumed run
        repeats it."""
        control.ask(self.folder, control.command("set", key, value, by="trainer"))

    def evaluate(self, size: int = 0, samples: int = 1) -> Evaluation:
        """Measure the model as it is now on held-out problems: greedily, and with `samples` answers for pass@k."""
        if self._workers is not None:
            return self._workers.evaluate(size or self.config.eval.size, samples)
        self._keep_here()
        if self._is_made():
            return start.evaluate(self.folder, size=size, samples=samples)
        return start.evaluate(self._start_model(), self._prepared(), size=size, samples=samples)

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        n: int = 1,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Any:
        """Answers of the model as it is now: a text for a text, a list for a list; lists of `n` where n is not 1.
        Temperature and length are those of training unless they are given."""
        from tidemill.rollout.engine import Sampling

        rollout = self.config.rollout
        speaker = self._speaking()
        longest = min(max_new_tokens or rollout.max_new_tokens, speaker.loaded.window - 1)
        heat = rollout.temperature if temperature is None else temperature
        speaker.sampling = Sampling(temperature=heat, top_p=top_p, max_tokens=longest, seed=seed)
        asked = [prompts] if isinstance(prompts, str) else list(prompts)
        answers = []
        for prompt in asked:
            done = speaker.answer(speaker.encode([{"role": "user", "content": prompt}]), n)
            answers.append([speaker.text(one) for one in done] if n > 1 else speaker.text(done[0]))
        return answers[0] if isinstance(prompts, str) else answers

    def save(self, folder: str | Path) -> Path:
        """Write the model as it is now as a Hugging Face folder."""
        target = Path(folder).expanduser()
        if self._workers is not None:
            if target.exists() and any(target.iterdir()):
                raise ConfigError(f"{target} is not empty", "name a new folder")
            target.mkdir(parents=True, exist_ok=True)
            self._workers.save_model(target)
            return target
        from tidemill.run.trained import export

        self._must_be_made("save")
        export(self.folder, target)
        return target

    def push(self, repository: str, *, private: bool = False) -> str:
        """Upload the model to the Hugging Face hub (`org/name`); its address."""
        from tidemill.models.box import hub

        with tempfile.TemporaryDirectory() as made:
            saved = self.save(Path(made) / "model")
            message = f"step {len(self.metrics) and self.metrics[-1]['step']} of {self.folder.name}"
            return str(hub.push(saved, repository, message=message, private=private))

    # Looking

    @property
    def config(self) -> Config:
        """Every setting: as given, until the run begins; then as the run's folder has them."""
        if self._is_made():
            return RunFolder.open(self.folder, exclusive=False).config
        return self._loaded.config

    @property
    def folder(self) -> Path:
        config = self._loaded.config
        return Path(config.folder).expanduser() / config.name

    @property
    def metrics(self) -> Table:
        """Of every step and evaluation so far."""
        return Table(metrics_of(self.folder) if self._is_made() else [])

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Those that the run kept."""
        return RunFolder.open(self.folder, exclusive=False).samples_after(0) if self._is_made() else []

    @property
    def model(self) -> Any:
        """The model object that was given, with the trained weights; or the trained model, opened."""
        from tidemill.run.trained import open_trained

        self._must_be_made("model")
        trained = open_trained(self.folder).loaded.model
        if self._object is None:
            return trained
        self._object.load_state_dict(trained.state_dict(), strict=False)
        return self._object

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = self._speaking().loaded.tokenizer
        return self._tokenizer

    def __repr__(self) -> str:
        config = self._loaded.config
        return f"Trainer({config.algorithm.name} of {config.model.path or 'a small model'}, in {self.folder})"

    # Inside

    def _inputs(
        self, config: Config, model: Any, rewards: Any, data: Any, eval_data: Any, environment: Any
    ) -> dict[str, Any]:
        """What was given as objects, as settings; files and folders lie beside the runs."""
        tree: dict[str, Any] = {}
        place = Path(config.folder).expanduser() / inputs.KEPT
        if inputs.is_model(model):
            self._object = model
            self._model_folder = place / f"model-{secrets.token_hex(4)}"
            dtype = str(getattr(model, "dtype", "")).rpartition(".")[2]
            tree["model"] = {"path": str(self._model_folder.absolute())}
            tree["model"] |= {"dtype": dtype} if dtype in ("float32", "bfloat16") else {}
            inputs.model_to_folder(model, self._tokenizer, self._model_folder)
        elif model is not None:
            tree["model"] = {"path": str(model)}
        rows: dict[str, str] = {}
        for key, given in (("source", data), ("eval_source", eval_data)):
            if given is None:
                continue
            if isinstance(given, str | Path):
                rows[key] = str(given)
            elif callable(given):
                rows[key] = self._name(given, "data", config, rows.values())
            else:
                rows[key] = str(inputs.rows_to_file(given, place, "data" if key == "source" else "eval_data"))
        if rows:
            tree["data"] = rows
        if rewards is not None:
            tree["rewards"] = {"functions": self._rewards(rewards, config, rows.get("source"))}
        if environment is not None and not isinstance(environment, str | Mapping):
            tree["environment"] = {"name": self._name(environment, "environment", config)}
        return tree

    def _rewards(self, given: Any, config: Config, source: str | None) -> list[dict[str, Any]]:
        several = given if isinstance(given, list | tuple) and not _is_weighted(given) else [given]
        specs: list[dict[str, Any]] = []
        for one in several:
            if isinstance(one, Mapping):
                specs.append(dict(one) | {"function": self._name(one["function"], "rewards", config)})
                continue
            function, weight = one if _is_weighted(one) else (one, 1.0)
            path = self._name(function, "rewards", config, [spec["function"] for spec in specs])
            label = getattr(function, "__name__", "")
            specs.append(
                {"function": path, "weight": weight}
                | ({"label": label} if label.isidentifier() else {})
                | ({"args": {"as_messages": True}} if _wants_messages(function, source) else {})
            )
        return specs

    def _name(self, thing: Any, what: str, config: Config, taken: Any = ()) -> str:
        found = inputs.name_of(thing, what, config.cluster.executor, taken)
        if found.kept is not None:
            self._kept[found.path] = found.kept
        return found.path

    def _keep_here(self) -> None:
        for path, thing in self._kept.items():
            imports.keep(path, thing)

    @contextlib.contextmanager
    def _running(self) -> Iterator[Any]:
        imports.refuse_in_worker()
        self._leave()
        self._keep_here()
        self._wants_stop, self._speaker = False, None
        display = self._display if self._display is not None else _display(self._loaded.config)
        watch = All(display, Told(self, self.callbacks))
        begin = partial(start.go_on, self.folder, overrides=self._changes) if self._resumes else self._begin
        with contextlib.ExitStack() as stack:
            if isinstance(display, contextlib.AbstractContextManager):
                stack.enter_context(display)
            self._moments = begin(watch=watch)
            try:
                yield self._moments
            finally:
                self._leave()

    def _begin(self, watch: Watcher) -> Any:
        return start.begin(self._loaded, watch=watch)

    def _leave(self) -> None:
        """End a run that was left in the midst, as after an error in a loop over its steps."""
        moments, self._moments = self._moments, None
        if moments is not None:
            moments.close()
        self._workers = None

    def _has_started(self, workers: Workers) -> None:
        self._workers = workers
        self._resumes = True  # from now on there is something to go on with

    def _samples_of(self, step: int) -> list[dict[str, Any]]:
        return [sample for sample in self.samples if sample["step"] == step]

    def _is_made(self) -> bool:
        """Whether the folder holds this trainer's run, and not an older one of its name."""
        return self._resumes and (self.folder / "config.yaml").exists()

    def _must_be_made(self, what: str) -> None:
        if not self._is_made():
            raise TidemillError(f"{what}: nothing has been trained yet", "call train() first")

    def _start_model(self) -> str:
        path = self._loaded.config.model.path
        if path is None:
            raise TidemillError("the model is made when training begins: there is nothing to ask yet", "call train()")
        return path

    def _prepared(self) -> Any:
        from tidemill.run.prepare import prepare

        return prepare(self._loaded).loaded

    def _speaking(self) -> Any:
        from tidemill.rollout.engine import Sampling
        from tidemill.run.trained import Speaker, open_trained

        if self._workers is not None:
            with tempfile.TemporaryDirectory() as made:
                self._workers.save_model(Path(made))
                return Speaker(open_trained(made, self.config.device), Sampling())
        if self._speaker is None:
            where = self.folder if self._is_made() else self._start_model()
            self._speaker = Speaker(open_trained(where, self.config.device), Sampling())
        return self._speaker


def _is_weighted(given: Any) -> bool:
    return isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], int | float)


def _wants_messages(function: Any, source: str | None) -> bool:
    """Whether a reward in TRL's form is to get completions as chat messages: where the data's prompts are such."""
    from tidemill.reward.lists import takes_lists

    if source is None or not callable(function) or not takes_lists(function) or not source.endswith(".jsonl"):
        return False
    return isinstance(inputs.first_row(Path(source)).get("prompt"), list)


def _display(config: Config) -> Watcher:
    from tidemill.trainer import notebook

    if config.observe.progress != "off" and notebook.is_notebook():
        return notebook.NotebookWatcher(config)
    from rich.console import Console

    from tidemill import show

    return show.RunWatcher(Console(highlight=False, markup=False), config)

"""A trained model to generate with, evaluate or export: a checkpoint of a run, or any Hugging Face folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer

from tidemill import device as devices
from tidemill.errors import CheckpointError, ConfigError, ModelError, did_you_mean
from tidemill.learn import checkpoint
from tidemill.learn.ema import adapters_of, weights_of
from tidemill.models import lora
from tidemill.models.box import find
from tidemill.models.box.known import KNOWN, cache
from tidemill.models.load import (
    BASE,
    DEFINITION,
    DTYPES,
    EXPORTED,
    LoadedModel,
    from_config,
    load,
    open_folder,
    save_folder,
    wrap,
)
from tidemill.models.mixture import routing
from tidemill.models.parts import decoder_of
from tidemill.models.vision.eyes.find import give_eyes
from tidemill.models.vision.views import find as views
from tidemill.observe.run_folder import RunFolder
from tidemill.recipe import config as settings
from tidemill.recipe.config import Config
from tidemill.reward.verifiers import model as reward_model
from tidemill.rollout.engine import Completion, Request, Sampling
from tidemill.rollout.native.engine import NativeEngine

CACHE_TOKENS = 1 << 16  # cache for generation, unless the model's window is longer


@dataclass(slots=True)
class Trained:
    loaded: LoadedModel
    config: Config
    step: int | None  # of the checkpoint; None for a plain folder
    reward_head: torch.Tensor | None = None  # a reward model's head, in place of the vocabulary's
    is_mean: bool = False  # the weights are the running mean that learn.ema keeps
    base_dtype: str | None = None  # of the model that the run started from, where that is known


def open_trained(
    where: str | Path, device: str = "auto", *, raw: bool = False, step: int | None = None, best: bool = False
) -> Trained:
    """Open the newest checkpoint of a run, or the one that `step` or `best` names, or a Hugging Face folder. Where a
    run keeps a running mean of its weights, the mean is opened, as in evaluations, unless `raw`."""
    on = devices.pick(device).torch_device
    folder = Path(where).expanduser()
    if (folder / "config.json").exists():
        return Trained(open_folder(folder, settings.ModelSettings(path=str(folder)), on), Config(), None)
    if not folder.exists() and find.is_fetchable(where):
        return open_trained(find.resolve(where), device)
    place, _, which = str(where).partition("@")
    if which and not folder.exists():
        where, step, best = place, *_named_checkpoint(str(where), which)
    try:
        run = RunFolder.open(where, exclusive=False)
    except ConfigError as error:
        raise ModelError(
            f"{where} is neither a run nor a Hugging Face folder (no config.yaml, no config.json)"
            f"{did_you_mean(str(where), KNOWN)}",
            "give a run's folder, a model's folder, or a name: `tidemill models list`",
        ) from error
    return _from_run(run, on, raw, step, best)


def _named_checkpoint(where: str, which: str) -> tuple[int | None, bool]:
    """Read what `RUN@STEP` and `RUN@best` ask for."""
    if which == "best":
        return None, True
    if not which.isdigit():
        raise ConfigError(f"{where}: {which!r} names no checkpoint", "write RUN, RUN@STEP or RUN@best")
    return int(which), False


def _from_run(run: RunFolder, place: torch.device, raw: bool, step: int | None, best: bool) -> Trained:
    found, tensors = _checkpoint(run, step, best)
    if run.config.model.policy is not None:
        loaded, (own, is_mean) = load(run.config.model, seed=0, device=place), weights_of(tensors, raw)
        loaded.model.load_state_dict(own)
        return Trained(loaded, run.config, found.step, is_mean=is_mean)
    definition = AutoConfig.from_pretrained(run.path / DEFINITION)
    has_adapters = any(name.startswith("adapter.") for name in tensors)
    if has_adapters and not _holds_all(tensors):
        model = _base(run)
    else:
        model = from_config(definition)
        model = model.to(DTYPES[run.config.model.dtype])
    routing.widen(model)
    routing.make_room(model, run.config.learn.moe)
    own, is_mean = weights_of(tensors, raw)
    prefix = next(n for n, m in model.named_modules() if m is decoder_of(model))
    head = own.pop("head.weight", None) if _is_reward_model(tensors) else None
    own = {_policys_name(name, prefix, head): tensor for name, tensor in own.items()}
    if has_adapters and not _holds_all(tensors):
        adapters, is_mean = adapters_of(tensors, raw)
        own |= _merged(model, {_policys_name(n, prefix, head): t for n, t in adapters.items()}, run.config)
    missing = [name for name, _ in model.named_parameters() if name not in own and head is None]
    if missing and not has_adapters:
        raise CheckpointError(f"{found.path} lacks {len(missing)} of the model's tensors, first {missing[0]}")
    model.load_state_dict(own, strict=False)  # tied weights and buffers are made by the model itself
    tokenizer = AutoTokenizer.from_pretrained(run.path / DEFINITION)
    give_eyes(model, views.view_of(definition.to_dict(), tokenizer, views.settings_of(run.path / DEFINITION)))
    window = getattr(definition.get_text_config(), "max_position_embeddings", 1 << 20)
    loaded = wrap(model.to(place), tokenizer, window)
    return Trained(loaded, run.config, found.step, head, is_mean, _base_dtype(run))


def _holds_all(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Say whether the checkpoint holds the weights that adapters change, as those of earlier versions do."""
    adapted = [name for name in tensors if name.startswith("adapter.") and name.endswith(".lora_a")]
    return all(f"model.{n.removeprefix('adapter.').removesuffix('.lora_a')}.weight" in tensors for n in adapted)


def _is_reward_model(tensors: Mapping[str, torch.Tensor]) -> bool:
    return "model.head.weight" in tensors and any(n.startswith(("model.decoder.", "adapter.decoder.")) for n in tensors)


def _policys_name(name: str, prefix: str, head: torch.Tensor | None) -> str:
    """Rename a tensor of a reward model, which is the policy's decoder with a head of one number."""
    return name if head is None else name.replace("decoder", prefix, 1)


def _base(run: RunFolder) -> Any:
    """Open the model that a run with adapters started from: its checkpoints hold only the adapters."""
    warm = run.path / "warm_start" / "model"
    model = run.config.model
    try:
        return load(model, seed=run.config.seed, device=torch.device("cpu"), path=warm if warm.exists() else None).model
    except ModelError as error:
        raise CheckpointError(
            f"{run.path} has only adapters, and their base model cannot be opened: {error.message}",
            "put the base model back in its place, or export only the adapters: tidemill export RUN --adapter",
        ) from error


def _merged(model: Any, own: Mapping[str, torch.Tensor], config: Config) -> dict[str, torch.Tensor]:
    """Return the weights with the adapters merged in; the model itself is left unchanged."""
    learn = config.learn
    chosen = (learn.dora, learn.lora_experts, learn.lora_modules)
    lora.attach(model, learn.lora_rank, learn.lora_alpha, config.seed, *chosen)
    for name, parameter in model.named_parameters():
        if name in own:
            parameter.data.copy_(own[name])
    found = {name: tensor.clone() for name, tensor in lora.adapted(model).items()}
    lora.detach(model)
    return found


def _base_dtype(run: RunFolder) -> str | None:
    try:
        return str(json.loads((run.path / DEFINITION / BASE).read_text(encoding="utf-8"))["dtype"])
    except (OSError, ValueError, KeyError):
        return None


def _checkpoint(
    run: RunFolder, step: int | None = None, best: bool = False
) -> tuple[checkpoint.Found, dict[str, torch.Tensor]]:
    if step is None and not best:
        found = checkpoint.latest(run.checkpoints)
        if found is None:
            raise CheckpointError(f"{run.path} has no checkpoint yet", f"`tidemill resume {run.path}` continues it")
    else:
        found = _chosen(run, step)
    tensors, _ = checkpoint.load(found.path)
    return found, tensors


def _chosen(run: RunFolder, step: int | None) -> checkpoint.Found:
    """Find the checkpoint of a step, or the best one."""
    saved = {int(p.name[5:]): p for p in run.checkpoints.glob("step-*") if p.name[5:].isdigit()}
    path = checkpoint.best(run.checkpoints) if step is None else saved.get(step)
    if path is None:
        there = ", ".join(map(str, sorted(saved))) or "none"
        what = "no best checkpoint" if step is None else f"no checkpoint of step {step}"
        raise CheckpointError(f"{run.path} has {what}", f"there are checkpoints of step {there}")
    if why := checkpoint.fault(path):
        raise CheckpointError(f"{path} cannot be used ({why})", "name another step")
    return checkpoint.Found(path, int(path.name[5:]), [])


def checkpoint_as_folder(where: str) -> tuple[Path, int]:
    """Write a run's checkpoint as a Hugging Face folder into the cache, once; return the folder and the step."""
    place, _, which = where.partition("@")
    run = RunFolder.open(place, exclusive=False)
    found = _chosen(run, _named_checkpoint(where, which)[0]) if which else checkpoint.latest(run.checkpoints)
    if found is None:
        raise CheckpointError(f"model.path={where}: the run has no checkpoint yet", f"tidemill resume {place}")
    made_of = f"{run.path.absolute()} {found.step} {(found.path / checkpoint.MANIFEST).read_text(encoding='utf-8')}"
    kept = cache() / "from_runs" / hashlib.sha256(made_of.encode()).hexdigest()[:24]
    if not (kept / "config.json").exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        export(place, kept, step=found.step)
    return kept, found.step


def _check_free(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"--to {folder} is not empty", "name a new folder")


def export(
    where: str | Path,
    folder: Path,
    *,
    raw: bool = False,
    without_bias: bool = False,
    step: int | None = None,
    best: bool = False,
    dtype: str | None = None,
) -> Trained:
    """Write a checkpoint as a Hugging Face folder, under another name first. `dtype`: of its weights; None: that of
    the model which the run started from."""
    _check_free(folder)
    folder = folder.expanduser()
    aside = folder.with_name(f".{folder.name}.tmp")
    trained = open_trained(where, "cpu", raw=raw, step=step, best=best)
    as_base = trained.base_dtype if dtype is None else dtype
    if as_base is not None:
        trained.loaded.model.to(EXPORTED[as_base])
    if routing.given(trained.loaded.model) and not without_bias:
        name = type(trained.loaded.model).__name__
        raise ConfigError(
            f"{where} balances experts by a bias on the router, for which {name} has no place: whoever opened the "
            "folder would send tokens to other experts than this run does",
            "--without-bias writes the weights alone; learn.moe.balance=aux_loss needs no such place",
        )
    routing.take_away(trained.loaded.model)
    if trained.reward_head is None:
        save_folder(trained.loaded.model, trained.loaded.tokenizer, aside)
    else:
        model = trained.loaded.model
        decoder = decoder_of(model).state_dict()
        reward_model.save(decoder, trained.reward_head, model.config, trained.loaded.tokenizer, aside)
    if folder.exists():
        folder.rmdir()
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside.rename(folder)
    return trained


def export_adapter(
    where: str | Path, folder: Path, *, raw: bool = False, step: int | None = None, best: bool = False
) -> tuple[int, bool]:
    """Write a checkpoint's low-rank adapters as a folder that peft opens; return their step, and whether they are
    running means."""
    run = RunFolder.open(where, exclusive=False)
    found, tensors = _checkpoint(run, step, best)
    own, is_mean = adapters_of(tensors, raw)
    if not own:
        raise ConfigError(f"{run.path} trained all weights: it has no adapters", "export without --adapter")
    if any(name.startswith("decoder.") for name in own):  # of `learn.values.model.ValueModel`
        raise ConfigError(
            f"{run.path} trained a reward model, whose head a peft folder would lack",
            "export without --adapter",
        )
    _check_free(folder)
    learn = run.config.learn
    base = find.for_others(run.config.model.path or str(run.path / "warm_start" / "model"))
    base = str(Path(base).expanduser().resolve()) if Path(base).expanduser().exists() else base  # else a hub id
    tensors, about = lora.peft_files(own, learn.lora_rank, learn.lora_alpha, base)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return found.step, is_mean


class Speaker:
    """Generates text for text, a token at a time."""

    def __init__(self, trained: Trained, sampling: Sampling) -> None:
        self.loaded, self.sampling = trained.loaded, sampling
        self.chat_args = trained.config.data.chat_args
        self.engine = NativeEngine(
            trained.loaded.model,
            eos_ids=trained.loaded.eos_ids,
            tokenizer=trained.loaded.tokenizer,
            max_seqs=64,
            max_len=trained.loaded.window,
            # Room for one sequence as long as the model's window, not for 64 of them: that would be more than a device
            # has.
            cache_tokens=max(trained.loaded.window, CACHE_TOKENS),
            reuse_prefix=True,
        )
        self.asked = 0

    def answer(self, tokens: list[int], n: int = 1) -> list[Completion]:
        self.engine.submit(Request(self.asked, tokens, self.sampling, n=n))
        self.asked += 1
        done: list[Completion] = []
        while self.engine.has_work:
            done += self.engine.step()
        for completion in done:
            if completion.error is not None:
                raise ModelError(completion.error)
        return sorted(done, key=lambda c: c.index)

    def text(self, completion: Completion) -> str:
        return str(self.loaded.tokenizer.decode(completion.tokens, skip_special_tokens=True))

    def encode(self, messages: list[dict[str, str]]) -> list[int]:
        """Encode a conversation through the chat template, or only its last message where there is none."""
        tokenizer = self.loaded.tokenizer
        if tokenizer.chat_template:
            encoded = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, **self.chat_args
            )
            return list(encoded["input_ids"])
        return list(tokenizer(messages[-1]["content"])["input_ids"])

    def chat(self, lines: Iterator[str]) -> Iterator[str]:
        messages: list[dict[str, str]] = []
        for line in lines:
            messages.append({"role": "user", "content": line})
            reply = self.text(self.answer(self.encode(messages))[0])
            messages.append({"role": "assistant", "content": reply})
            yield reply

"""A model that can be asked, measured or given away: the newest checkpoint of a run, or any Hugging Face folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tidemill import device as devices
from tidemill.errors import CheckpointError, ConfigError, ModelError
from tidemill.learn import checkpoint
from tidemill.learn.ema import adapters_of, weights_of
from tidemill.models import lora, routing
from tidemill.models.attention import registry as attention
from tidemill.models.box import find
from tidemill.models.box.known import cache
from tidemill.models.load import DTYPES, LoadedModel, open_folder, save_folder, wrap
from tidemill.recipe import config as settings
from tidemill.recipe.config import Config
from tidemill.reward import model as reward_model
from tidemill.rollout.engine import Completion, Request, Sampling
from tidemill.rollout.native.engine import NativeEngine
from tidemill.run.folder import RunFolder

EXPORTED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CACHE_TOKENS = 1 << 16  # of answering, unless the model's window is longer
BASE = "base.json"  # beside it: the dtype of the model that the run started from
DEFINITION = "model"  # in a run's folder: config.json and tokenizer, without weights


@dataclass(slots=True)
class Trained:
    loaded: LoadedModel
    config: Config
    step: int | None  # of the checkpoint; None for a plain folder
    reward_head: torch.Tensor | None = None  # what a reward model has in place of words
    is_mean: bool = False  # the weights are the running mean that learn.ema keeps
    base_dtype: str | None = None  # of the model that the run started from, where that is known


def keep_definition(loaded: LoadedModel, run: Path) -> None:
    """So that a run's checkpoints can be opened without whatever the run started from."""
    base = _dtype_of(Path(loaded.model.config._name_or_path or "."))
    loaded.model.config.save_pretrained(run / DEFINITION)
    if base is not None:  # exports have it again, whatever the run computes in
        (run / DEFINITION / BASE).write_text(json.dumps({"dtype": base}) + "\n", encoding="utf-8")
    loaded.model.generation_config.save_pretrained(run / DEFINITION)
    loaded.tokenizer.save_pretrained(run / DEFINITION)


def _dtype_of(folder: Path) -> str | None:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    text = found.get("text_config") or found
    name = found.get("dtype") or found.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype")
    return str(name) if name in EXPORTED else None


def open_trained(
    where: str | Path, device: str = "auto", *, raw: bool = False, step: int | None = None, best: bool = False
) -> Trained:
    """The newest checkpoint of a run, or the one that `step` or `best` names, or a Hugging Face folder.
    Where a run keeps a running mean of its weights, the mean is opened, as evaluations see it, unless `raw`."""
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
            f"{where} is neither a run nor a Hugging Face folder (no config.yaml, no config.json)", error.remedy
        ) from error
    return _from_run(run, on, raw, step, best)


def _named_checkpoint(where: str, which: str) -> tuple[int | None, bool]:
    """What `RUN@STEP` and `RUN@best` ask for."""
    if which == "best":
        return None, True
    if not which.isdigit():
        raise ConfigError(f"{where}: {which!r} names no checkpoint", "write RUN, RUN@STEP or RUN@best")
    return int(which), False


def _from_run(run: RunFolder, place: torch.device, raw: bool, step: int | None, best: bool) -> Trained:
    found, tensors = _checkpoint(run, step, best)
    definition = AutoConfig.from_pretrained(run.path / DEFINITION)
    model = AutoModelForCausalLM.from_config(definition, attn_implementation=attention.NAME)  # type: ignore[no-untyped-call]
    model = model.to(DTYPES[run.config.model.dtype])
    routing.widen(model)
    routing.make_room(model, run.config.learn.moe)
    own, is_mean = weights_of(tensors, raw)
    head = own.pop("head.weight", None) if "decoder" in {name.partition(".")[0] for name in own} else None
    if head is not None:  # a reward model: the policy's decoder, with one number instead of words
        prefix = next(n for n, m in model.named_modules() if m is model.get_decoder())
        own = {name.replace("decoder", prefix, 1): tensor for name, tensor in own.items()}
    missing = [name for name, _ in model.named_parameters() if name not in own and head is None]
    if missing:
        raise CheckpointError(f"{found.path} lacks {len(missing)} of the model's tensors, first {missing[0]}")
    model.load_state_dict(own, strict=False)  # tied weights and buffers are made by the model itself
    tokenizer = AutoTokenizer.from_pretrained(run.path / DEFINITION)
    window = getattr(definition.get_text_config(), "max_position_embeddings", 1 << 20)
    loaded = wrap(model.to(place), tokenizer, window)
    return Trained(loaded, run.config, found.step, head, is_mean, _base_dtype(run))


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
    """The checkpoint of a step, or the best one."""
    saved = {int(p.name[5:]): p for p in run.checkpoints.glob("step-*") if p.name[5:].isdigit()}
    path = checkpoint.best(run.checkpoints) if step is None else saved.get(step)
    if path is None:
        there = ", ".join(map(str, sorted(saved))) or "none"
        what = "no best checkpoint" if step is None else f"no checkpoint of step {step}"
        raise CheckpointError(f"{run.path} has {what}", f"there are those of step {there}")
    if why := checkpoint.fault(path):
        raise CheckpointError(f"{path} cannot be used ({why})", "name another step")
    return checkpoint.Found(path, int(path.name[5:]), [])


def checkpoint_as_folder(where: str) -> tuple[Path, int]:
    """A run's checkpoint as a Hugging Face folder in the cache, written once; its step."""
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
    """A checkpoint as a Hugging Face folder, written aside and renamed. `dtype`: of its weights; None: that of the
    model which the run started from."""
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
            f"{where} balances experts by a bias on their choice, for which {name} has no place: whoever opened the "
            "folder would send tokens to other experts than this run does",
            "--without-bias writes the weights alone; learn.moe.balance=aux_loss needs no such place",
        )
    routing.take_away(trained.loaded.model)
    if trained.reward_head is None:
        save_folder(trained.loaded.model, trained.loaded.tokenizer, aside)
    else:
        model = trained.loaded.model
        decoder = model.get_decoder().state_dict()
        reward_model.save(decoder, trained.reward_head, model.config, trained.loaded.tokenizer, aside)
    if folder.exists():
        folder.rmdir()
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside.rename(folder)
    return trained


def export_adapter(
    where: str | Path, folder: Path, *, raw: bool = False, step: int | None = None, best: bool = False
) -> tuple[int, bool]:
    """A checkpoint's low-rank adapters as a folder that peft opens; the step they are of, and whether they are
    running means."""
    run = RunFolder.open(where, exclusive=False)
    found, tensors = _checkpoint(run, step, best)
    own, is_mean = adapters_of(tensors, raw)
    if not own:
        raise ConfigError(f"{run.path} learned all weights: it has no adapters", "export without --adapter")
    if any(name.startswith("decoder.") for name in own):  # of `learn.critic.ValueModel`
        raise ConfigError(
            f"{run.path} learned a reward model, of which a folder of peft would lack the head",
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
    """Text in, text out, a token at a time."""

    def __init__(self, trained: Trained, sampling: Sampling) -> None:
        self.loaded, self.sampling = trained.loaded, sampling
        self.chat_args = trained.config.data.chat_args
        self.engine = NativeEngine(
            trained.loaded.model,
            eos_ids=trained.loaded.eos_ids,
            tokenizer=trained.loaded.tokenizer,
            max_seqs=64,
            max_len=trained.loaded.window,
            # Room for one as long as the model's window, not for 64 of them: that would be more than a device has.
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
        """A conversation through the chat template, or its last message alone where there is none."""
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

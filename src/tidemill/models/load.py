"""Models in and out: a Hugging Face folder or a tiny model made on the spot, always with our attention plugged in."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.utils import logging as hf_logging

from tidemill.errors import ModelError
from tidemill.models import lora, tiny
from tidemill.models.attention import registry as attention
from tidemill.models.box import find
from tidemill.models.buffers import persistent
from tidemill.models.calling import plug
from tidemill.models.mixture import routing
from tidemill.models.network import make as network
from tidemill.models.policy import Policy
from tidemill.models.trial import try_out
from tidemill.models.vision import small
from tidemill.models.vision.eyes import eyes
from tidemill.models.vision.eyes.find import give_eyes
from tidemill.models.vision.views import find as views
from tidemill.models.vision.views.view import View
from tidemill.recipe import config as settings

hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # of shards being read and written: a run has its own display

DEFINITION = "model"  # in a run's folder: config.json and tokenizer, without weights
BASE = "base.json"  # beside it: the dtype of the model that the run started from
EXPORTED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
UNBOUNDED = 1 << 40  # window of a policy that reads no sequence
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(slots=True)
class LoadedModel:
    model: Any  # a transformers causal language model whose attention is ours, or a network
    tokenizer: Any  # None: of a network
    eos_ids: tuple[int, ...]
    window: int  # longest sequence the model was made for

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())


def load(
    model: settings.ModelSettings, *, seed: int, device: torch.device, path: str | Path | None = None
) -> LoadedModel:
    """`path` (a finished warm start) goes before `model.path`, which goes before `model.tiny`."""
    if model.policy is not None:
        return LoadedModel(network.make(model.policy, seed, device), None, (), UNBOUNDED)
    folder = path or model.path
    if folder is not None:
        return open_folder(find.resolve(folder), model, device)
    return make_tiny(model.tiny or settings.TinyModel(), DTYPES[model.dtype], seed, device)


def load_tokenizer(model: settings.ModelSettings, path: str | Path | None = None) -> Any:
    """The tokenizer alone, for who only turns text into tokens or back."""
    if model.policy is not None:
        return None
    folder = path or model.path
    if folder is None:
        return tiny.make_tokenizer(model.tiny or settings.TinyModel())
    return open_tokenizer(find.resolve(folder), model)


def make_tiny(shape: settings.TinyModel, dtype: torch.dtype, seed: int, device: torch.device) -> LoadedModel:
    tokenizer = tiny.make_tokenizer(shape)
    config = tiny.make_config(shape, len(tokenizer))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = from_config(config)
    give_eyes(module, views.view_of(config.to_dict(), tokenizer, small.small_images(shape)))
    return wrap(module.to(dtype=dtype, device=device), tokenizer, shape.window)


def from_config(config: Any, **how: Any) -> Any:
    """A model with fresh weights and our attention."""
    make = auto_class(config).from_config
    towered = config if _looks(config) else None
    return attention.plugged(towered, lambda attn: make(config, attn_implementation=attn, **how))


def auto_class(config: Any) -> Any:
    """Which of transformers' classes opens a model of this config."""
    return AutoModelForImageTextToText if _looks(config) else AutoModelForCausalLM


def _looks(config: Any) -> bool:
    return views.looks(config.to_dict())


def view_of(model: settings.ModelSettings, tokenizer: Any, path: str | Path | None = None) -> View | None:
    """How the model takes images, from its settings alone; None for one that reads text."""
    folder = path or model.path
    if folder is None:
        shape = model.tiny or settings.TinyModel()
        return views.view_of(tiny.make_config(shape, len(tokenizer)).to_dict(), tokenizer, small.small_images(shape))
    place = find.resolve(folder)
    config = AutoConfig.from_pretrained(place, trust_remote_code=model.trust_remote_code)
    return views.view_of(config.to_dict(), tokenizer, views.settings_of(place))


def open_folder(folder: Path, model: settings.ModelSettings, device: torch.device) -> LoadedModel:
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
        make = partial(
            auto_class(config).from_pretrained,
            folder,
            config=config,
            dtype=DTYPES[model.dtype],
            trust_remote_code=model.trust_remote_code,
        )
        module: Any = attention.plugged(config if _looks(config) else None, lambda attn: make(attn_implementation=attn))
    except Exception as error:
        raise ModelError(
            f"model.path={folder}: transformers cannot open it: {_first_line(error)}",
            "the folder needs config.json and *.safetensors of a causal language model",
        ) from error
    tokenizer = open_tokenizer(folder, model)
    give_eyes(module, views.view_of(config.to_dict(), tokenizer, views.settings_of(folder)))
    window = getattr(config.get_text_config(), "max_position_embeddings", 1 << 20)
    loaded = wrap(module.to(device), tokenizer, window)
    try_out(loaded.model)
    return loaded


def open_tokenizer(folder: Path, model: settings.ModelSettings) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    except Exception as error:
        raise ModelError(
            f"model.path={folder}: no usable tokenizer: {_first_line(error)}",
            "copy tokenizer.json and tokenizer_config.json of the model into the folder",
        ) from error


def save_folder(model: Any, tokenizer: Any, folder: Path) -> None:
    """A folder that AutoModelForCausalLM and AutoTokenizer open, in any program that has transformers."""
    if isinstance(model, Policy):
        network.save(model, folder)
        return
    state = lora.merged(model) | persistent(model) if lora.is_attached(model) else model.state_dict()
    own = {name: tensor for name, tensor in state.items() if not name.endswith(f".{routing.GIVEN}")}
    model.save_pretrained(folder, state_dict=own)
    save_reading(model, tokenizer, folder)


def save_reading(model: Any, tokenizer: Any, folder: Path) -> None:
    """What turns texts and images into what the model reads."""
    tokenizer.save_pretrained(folder)
    if (own := eyes.of(model)) is not None:
        settings = json.dumps(own.view.processor(), indent=2) + "\n"
        (folder / views.FILES[0]).write_text(settings, encoding="utf-8")


def keep_definition(loaded: LoadedModel, run: Path) -> None:
    """Keep what a run's checkpoints need to be opened when the model it began with is gone."""
    if isinstance(loaded.model, Policy):
        return  # the recipe has it
    base = _dtype_of(Path(loaded.model.config._name_or_path or "."))
    loaded.model.config.save_pretrained(run / DEFINITION)
    if base is not None:  # exports have it again, whatever the run computes in
        (run / DEFINITION / BASE).write_text(json.dumps({"dtype": base}) + "\n", encoding="utf-8")
    loaded.model.generation_config.save_pretrained(run / DEFINITION)
    save_reading(loaded.model, loaded.tokenizer, run / DEFINITION)


def _dtype_of(folder: Path) -> str | None:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    text = found.get("text_config") or found
    name = found.get("dtype") or found.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype")
    return str(name) if name in EXPORTED else None


def wrap(module: Any, tokenizer: Any, window: int) -> LoadedModel:
    """Ready to roll out and to learn."""
    plug(module)
    routing.widen(module)
    module.eval()  # dropout has no place in RL: rollout and learning must agree
    ids = module.generation_config.eos_token_id
    ids = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ids:
        ids.append(tokenizer.eos_token_id)
    if not ids:
        raise ModelError("the model has no end-of-sequence token", "set eos_token in tokenizer_config.json")
    return LoadedModel(module, tokenizer, tuple(ids), window)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]

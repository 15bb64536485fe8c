"""Models for `tidemill serve`: a folder, a run, a run that is learning, and adapters under names of their own."""

from __future__ import annotations

import gc
import json
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tidemill.data.pictures.shown import Pictures
from tidemill.errors import ConfigError, TidemillError
from tidemill.learn import checkpoint
from tidemill.models.load import LoadedModel
from tidemill.models.vision.eyes import eyes
from tidemill.observe.run_folder import RunFolder
from tidemill.recipe.images import ImageSettings
from tidemill.rollout.native.engine import NativeEngine
from tidemill.run.trained import Trained, open_trained
from tidemill.serve.app import App, OneKey
from tidemill.serve.connections import MOST_CONNECTIONS
from tidemill.serve.link import EngineLink, EngineThread
from tidemill.serve.server import LOOPBACK_NAMES, HttpServer, listen
from tidemill.serve.service import Served, Service
from tidemill.serve.talk import Talk

logger = logging.getLogger(__name__)
LOOK_S = 2.0  # between looks at a run's checkpoints


@dataclass(frozen=True, slots=True)
class ServeOptions:
    where: str
    name: str | None = None
    models: tuple[str, ...] = ()  # NAME=WHERE
    adapters: tuple[str, ...] = ()  # NAME=FOLDER of peft
    device: str = "auto"
    concurrent: int = 256
    cache_tokens: int | None = None
    window: int | None = None
    follows: bool = False
    key: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    most_body: int = 8 << 20
    most_connections: int = MOST_CONNECTIONS
    most_open: int = 4096
    cache_on_host_gb: float = 0.0


class ModelServer:
    """Opens the models, steps their engines in a thread, and serves them."""

    def __init__(self, options: ServeOptions) -> None:
        self.options = options
        self.listener = listen(options.host, options.port)  # first: a taken port is no reason to load a model
        try:
            models = [_named("--model", given) for given in options.models]
            adapters = [_named("--adapter", given) for given in options.adapters]
            first = open_trained(options.where, options.device)
            self.served = [self._served(options.name or _name_of(options.where), first, options.where)]
            for name, where in models:
                self.served.append(self._served(name, open_trained(where, options.device), where))
            for name, folder in adapters:
                adapted = open_trained(options.where, options.device)
                merge(adapted.loaded.model, Path(folder))
                self.served.append(self._served(name, adapted, folder, parent=self.served[0].name))
            names = [model.name for model in self.served]
            if len(set(names)) < len(names):
                raise ConfigError(f"two models are called {max(names, key=names.count)!r}", "give them other names")
        except BaseException:
            self.listener.close()
            raise
        self.service = Service(self.served, most_open=options.most_open)
        links = [model.link for model in self.served]
        self.engines = EngineThread(links)
        hosts = () if options.key else LOOPBACK_NAMES
        app = App(self.service, OneKey(self.service, options.key), options.most_body, hosts)
        self.http = HttpServer(app, links, self.listener, options.most_connections, own_user_only=not options.key)
        self.follower = Follower(options.where, self.served[0], first.step) if options.follows else None

    def _served(self, name: str, trained: Trained, root: str, parent: str | None = None) -> Served:
        loaded, config = trained.loaded, trained.config
        if trained.reward_head is not None:
            raise ConfigError(f"{root} is a reward model, which generates no text", "name a policy")
        window = min(loaded.window, self.options.window or loaded.window)
        options = self.options
        host_bytes = int(options.cache_on_host_gb * 1e9)
        engine = make_engine(loaded, window, options.concurrent, options.cache_tokens, host_bytes)
        engine.version = trained.step or 0
        looks = eyes.of(loaded.model)
        pictures = None if looks is None else Pictures.of(looks.view, config.data.images or ImageSettings())
        talk = Talk(loaded.tokenizer, config.data.chat_args, config.data.chat != "off", pictures)
        return Served(name, talk, EngineLink(engine), window, frozenset(loaded.eos_ids), root, parent)

    def start(self) -> None:
        """Serve in threads: for tests and benchmarks."""
        self.engines.start()
        self.http.start()
        if self.follower is not None:
            self.follower.start()

    def run(self, told: Any) -> None:
        self.engines.start()
        if self.follower is not None:
            self.follower.start()
        # A million objects of imported packages live as long as the server: looking through them for garbage again and
        # again takes about a tenth of the tokens per second.
        gc.collect()
        gc.freeze()
        self.http.run(told)

    def end(self) -> None:
        if self.follower is not None:
            self.follower.end()
        self.http.end()
        self.engines.end()


def make_engine(
    loaded: LoadedModel, window: int, concurrent: int, cache_tokens: int | None, host_bytes: int = 0
) -> NativeEngine:
    room = cache_tokens or max(window, min(concurrent * window, 1 << 18))
    return NativeEngine(
        loaded.model,
        eos_ids=loaded.eos_ids,
        tokenizer=loaded.tokenizer,
        max_seqs=concurrent,
        max_len=window,
        cache_tokens=room,
        host_bytes=host_bytes,
        reuse_prefix=True,
    )


def _name_of(where: str) -> str:
    return Path(where).name or where


def _named(option: str, given: str) -> tuple[str, str]:
    name, equals, where = given.partition("=")
    if not equals or not name or not where:
        raise ConfigError(f"{option} {given}: the name that clients use is missing", f"{option} NAME={given}")
    return name, where


def merge(model: Any, folder: Path) -> None:
    """Add a peft folder's low-rank adapters to the weights."""
    try:
        about = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "adapter_model.safetensors")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder} is not the folder of a LoRA adapter: {error}", "it needs adapter_config.json"
        ) from error
    if about.get("use_dora") or about.get("modules_to_save"):
        raise ConfigError(f"{folder} has more than low-rank adapters (DoRA, or whole modules)", "merge it yourself")
    rank = int(about["r"])
    scale = float(about["lora_alpha"]) / (rank**0.5 if about.get("use_rslora") else rank)
    weights = dict(model.named_parameters())
    downs = {name: tensor for name, tensor in tensors.items() if name.endswith(".lora_A.weight")}
    if not downs:
        raise ConfigError(f"{folder} has no lora_A tensor of any layer", "export it with tidemill export --adapter")
    with torch.no_grad():
        for name, down in downs.items():
            place = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight") + ".weight"
            up = tensors[name.replace(".lora_A.", ".lora_B.")]
            if place not in weights or weights[place].shape != (up.shape[0], down.shape[1]):
                raise ConfigError(f"{folder}: the model has no {place} of shape {(up.shape[0], down.shape[1])}")
            target = weights[place]
            change = (up.float() @ down.float()) * scale
            target.copy_((target.float() + change.to(target.device)).to(target.dtype))


class Follower:
    """Takes up each new checkpoint of a run that is learning, between two tokens."""

    def __init__(self, where: str, served: Served, step: int | None) -> None:
        self.where, self.served, self.step = where.partition("@")[0], served, step or 0
        self.checkpoints = RunFolder.open(self.where, exclusive=False).checkpoints
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ending.set()
        self._thread.join(30.0)

    def _run(self) -> None:
        while not self._ending.wait(LOOK_S):
            try:
                self.look()
            except (TidemillError, OSError) as error:  # half written, or removed as it was read: the next one comes
                logger.warning("%s: a new checkpoint cannot be read: %s", self.where, error)

    def look(self) -> bool:
        """Take up a checkpoint that is newer; true where there was one."""
        found = checkpoint.latest(self.checkpoints)
        if found is None or found.step <= self.step:
            return False
        trained = open_trained(self.where, "cpu")
        weights = trained.loaded.model.state_dict()
        self.step = trained.step or found.step
        taken = threading.Event()

        def take_up() -> None:
            self.served.link.engine.load(weights, self.step)
            taken.set()

        self.served.link.call(take_up)
        return taken.wait(60.0)


def serve(options: ServeOptions, told: Any) -> None:
    server = ModelServer(options)
    try:
        server.run(lambda: told(server))
    finally:
        server.end()


__all__: Sequence[str] = ["Follower", "ModelServer", "ServeOptions", "make_engine", "merge", "serve"]

"""Which engine a recipe asks for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tidemill.models import lora
from tidemill.models.load import LoadedModel
from tidemill.models.policy import Policy
from tidemill.models.vision.eyes import eyes
from tidemill.recipe.config import Config
from tidemill.rollout.control.engine import VectorEngine
from tidemill.rollout.engine import RolloutEngine

if TYPE_CHECKING:
    from tidemill.rollout.native.ranks.links import Links


def with_turns(
    engine: RolloutEngine, loaded: LoadedModel, config: Config, run: Path | None = None, writer: str = "0"
) -> RolloutEngine:
    """As it is, or with the recipe's environment talking to it. `run`: the run's folder, where a league is kept;
    `writer`: this worker's name there."""
    if config.environment is None:
        return engine
    if isinstance(engine, VectorEngine):
        return engine.at(run, writer)
    from tidemill.data.pictures.shown import Pictures
    from tidemill.environment.registry import offered
    from tidemill.environment.speech import Speech
    from tidemill.rollout.turns import TurnsEngine

    is_chat = bool(loaded.tokenizer.chat_template) and config.data.chat != "off"
    looks = eyes.of(loaded.model)
    pictures = Pictures.of(None if looks is None else looks.view, config.data.images)
    own = (config.environment.role, config.data.chat_args, offered(config.environment), pictures)
    speech = Speech(loaded.tokenizer, is_chat, *own)
    if config.environment.players > 1:
        from tidemill.rollout.seats import SeatsEngine

        return SeatsEngine(engine, loaded, config, speech, run, writer)
    return TurnsEngine(engine, config.environment, speech, loaded.eos_ids)


def make_apart(loaded: LoadedModel, config: Config) -> RolloutEngine:
    """An engine over a copy of the learner's model. Where vLLM takes the learner's adapters by themselves, the copy has
    adapters too, and only their tensors come to it."""
    learn = config.learn
    if config.rollout.engine != "vllm" or not learn.lora_rank:
        return make_plain(loaded, config)
    chosen = (learn.dora, learn.lora_experts, learn.lora_modules)
    lora.attach(loaded.model, learn.lora_rank, learn.lora_alpha, config.seed, *chosen)
    engine: Any = make_plain(loaded, config)
    if engine.adapter is None:
        lora.detach(loaded.model)
    return cast(RolloutEngine, engine)


def make_plain(loaded: LoadedModel, config: Config, links: Links | None = None) -> RolloutEngine:
    """An engine whose samples are one turn each. `links`: to the ranks that share the work (native engine)."""
    if isinstance(loaded.model, Policy):
        return VectorEngine(loaded.model, config)
    rollout, replicas = config.rollout, 1 if links is None else links.grid.dp
    max_len = min(loaded.window, config.data.max_prompt_tokens + rollout.max_new_tokens)
    match rollout.engine:
        case "native":
            from tidemill.rollout.native.engine import NativeEngine
            from tidemill.rollout.native.ranks.replicas import Replicas
            from tidemill.rollout.native.trial import try_rollout

            native = NativeEngine(
                loaded.model,
                eos_ids=loaded.eos_ids,
                tokenizer=loaded.tokenizer,
                max_seqs=-(-rollout.concurrent // replicas),
                max_len=max_len,
                links=links,
                page_size=rollout.page_size,
                cache_tokens=None if rollout.cache_tokens is None else -(-rollout.cache_tokens // replicas),
                batch_invariant=rollout.batch_invariant,
                record_routes=config.learn.moe.replay,
                speculate=rollout.speculate,
                cache_dtype=rollout.cache_dtype,
                host_bytes=int(rollout.cache_on_host_gb * 1e9) // rollout.ranks,
                keeps_asleep=config.flow.unfinished_samples == "keep_kv",
                weights=rollout.weights,
                reuse_prefix=config.environment is not None,  # each turn begins with those before it
            )
            if links is not None:
                return Replicas(native, links)
            try_rollout(native)
            return native
        case "hf":
            from tidemill.rollout.hf import HFEngine

            return HFEngine(loaded.model, eos_ids=loaded.eos_ids, max_len=max_len, tokenizer=loaded.tokenizer)
        case "vllm":
            from tidemill.rollout.vllm.engine import start

            return start(
                loaded.model,
                eos_ids=loaded.eos_ids,
                tokenizer=loaded.tokenizer,
                max_len=max_len,
                max_seqs=rollout.concurrent,
                memory_share=rollout.vllm.memory_share,
                sleep_level=rollout.vllm.sleep_level,
                truncates=rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0,
                python=rollout.vllm.python,
                seed=config.seed,
                **rollout.vllm.args,
            )

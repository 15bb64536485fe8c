"""The native rollout engine inside TRL's trainers: on the trainer's own weights, in the trainer's own process.

    from tidemill.bridges.trl import rollout
    trainer = GRPOTrainer(..., rollout_func=rollout())

There is no copy of the model and no server. Trainers that call `model.generate` themselves (RLOO, online DPO) take
`take_over(model)` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from tidemill import imports
from tidemill.chat.template import Chat
from tidemill.errors import ConfigError
from tidemill.models.shape import parse
from tidemill.rollout.generation import CACHE_TOKENS, CONCURRENT, Answer, Engine

Made = dict[str, list[Any]]
RolloutFunction = Callable[[list[Any], Any], Made]
PROMPT_TOKENS = 512  # of a sample, when the cache's size is chosen; a group's samples hold their prompt once
# What `generate` may be asked for besides lengths and sampling, and the value at which it changes nothing.
NEUTRAL: dict[str, Any] = {
    "num_beams": 1, "num_beam_groups": 1, "penalty_alpha": None, "constraints": None, "force_words_ids": None,
    "bad_words_ids": None, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "typical_p": 1.0,
    "guidance_scale": None, "assistant_model": None, "streamer": None, "logits_processor": None,
    "stopping_criteria": None, "prefix_allowed_tokens_fn": None, "inputs_embeds": None, "output_scores": False,
    "output_logits": False, "return_dict_in_generate": False,
}  # fmt: skip


def rollout(
    *,
    tools: Sequence[Callable[..., Any]] = (),
    environment: str | Mapping[str, Any] | None = None,
    max_turns: int = 8,
    keeps_cache: bool = False,
    **engine: Any,
) -> RolloutFunction:
    """Make a `rollout_func` for TRL's GRPOTrainer. Lengths and sampling are those of the trainer's arguments.

    `tools`: functions that the model may call, given here instead of to the trainer: the whole conversation is rolled
    out by the engine, and what the model did not say is masked. `environment`: a registered environment or its
    settings, as in a recipe. `keeps_cache` holds the memory of keys and values while the trainer learns. `engine`:
    arguments of `tidemill.Engine`, such as concurrent and cache_tokens."""
    if tools and environment is not None:
        raise ConfigError("rollout() was given tools and an environment", "give one of them")
    given = _tools_settings(tools) if tools else environment
    return _Rollout(given, max_turns, keeps_cache, engine)


class _Rollout:
    """Generates for one trainer. The engine is made at the first call, when the model lies where it will be trained."""

    def __init__(self, environment: Any, max_turns: int, keeps_cache: bool, options: Mapping[str, Any]) -> None:
        self.environment, self.max_turns = environment, max_turns
        self.keeps_cache, self.options = keeps_cache, dict(options)
        self.engine: Engine | None = None
        self.calls = 0

    def __call__(self, prompts: list[Any], trainer: Any) -> Made:
        engine = self._engine_of(trainer, len(prompts))
        engine.refresh()
        self.calls += 1
        sampling = _sampling_of_args(trainer.args, seed=(trainer.args.seed << 32) + self.calls)
        groups = _runs(self._encoded(prompts, trainer))
        asked = [engine.submit(prompt, n, sampling, place) for place, (prompt, n) in enumerate(groups)]
        answers = [answer for one in asked for answer in engine.collect(one)]
        if not self.keeps_cache:
            engine.sleep()
        return _columns(answers, has_mask=self.environment is not None)

    def _engine_of(self, trainer: Any, samples: int) -> Engine:
        if self.engine is None:
            model = whole(trainer.accelerator.unwrap_model(trainer.model))
            tokenizer = _tokenizer_of(trainer.processing_class)
            usual = {
                "max_length": _longest(model),  # prompts are as long as the data's, so the limit is the model's own
                "concurrent": max(CONCURRENT, samples),
                "cache_tokens": _cache_tokens(model, samples * (PROMPT_TOKENS + trainer.args.max_completion_length)),
                "reuse_prefix": self.environment is not None,
            }
            self.engine = Engine(model, tokenizer, **(usual | self.options))
            if self.environment is not None:
                self.engine.converse(self.environment, max_turns=self.max_turns)
        return self.engine

    def _encoded(self, prompts: list[Any], trainer: Any) -> list[list[int]]:
        """Tokenize as the trainer does: conversations by its chat template and arguments, text by its tokenizer."""
        if isinstance(prompts[0], str):
            return [list(ids) for ids in trainer.processing_class(text=prompts)["input_ids"]]
        if trainer.chat_template is None and self.environment is not None:
            assert self.engine is not None
            chat = Chat(_tokenizer_of(trainer.processing_class), trainer.chat_template_kwargs or {})
            return [chat.prompt(prompt, self.engine.tools or None) for prompt in prompts]
        encoded = trainer.processing_class.apply_chat_template(
            conversation=prompts,
            tools=trainer.tools or None,
            chat_template=trainer.chat_template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **(trainer.chat_template_kwargs or {}),
        )
        return [list(ids) for ids in encoded["input_ids"]]


def _cache_tokens(model: Any, wanted: int) -> int | None:
    """Room for a whole batch on an accelerator, if a third of its free memory holds that. Sequences beyond it wait."""
    shape = parse(model.config.to_dict())
    place = next(model.parameters()).device
    if place.type == "cpu" or shape is None:
        return None
    each = 2 * shape.layers * shape.kv_heads * shape.head_dim * next(model.parameters()).element_size()
    held: int = torch.accelerator.get_memory_info(place)[0] // 3 // each
    return max(min(wanted, held), CACHE_TOKENS, _longest(model))


def take_over(model: Any, tokenizer: Any = None, **engine: Any) -> Engine:
    """Let `model.generate` run the native engine, with the arguments and the result of transformers'. Serves every
    trainer that generates with the model it trains, such as TRL's RLOO and online DPO. `give_back(model)` undoes it.

    What the engine cannot do (beams, processors of logits, streamers) is refused by name."""
    made = Engine(model, tokenizer, **{"max_length": _longest(whole(model)), "reuse_prefix": False, **engine})
    model.__dict__["generate"] = _Generate(model, made)
    return made


def give_back(model: Any) -> None:
    """Let `model.generate` be transformers' own again."""
    taken = model.__dict__.pop("generate", None)
    if isinstance(taken, _Generate):
        taken.engine.close()


def is_taken_over(model: Any) -> bool:
    """Say whether `model.generate` runs the native engine."""
    return isinstance(model.__dict__.get("generate"), _Generate)


class _Generate:
    def __init__(self, model: Any, engine: Engine) -> None:
        self.model, self.engine, self.calls = model, engine, 0

    @torch.no_grad()
    def __call__(
        self, input_ids: Tensor, generation_config: Any = None, attention_mask: Tensor | None = None, **given: Any
    ) -> Tensor:
        """Left-padded prompts (batch, longest prompt) in; prompts with answers (batch, longest whole) out."""
        config = self.model.generation_config if generation_config is None else generation_config
        settings = config.to_dict() | given
        _refuse_foreign(settings)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        prompts = [ids[kept].tolist() for ids, kept in zip(input_ids, mask.bool())]
        n = settings.get("num_return_sequences") or 1
        self.calls += 1
        self.engine.refresh()
        sampling = _sampling_of_settings(settings, input_ids.shape[1], seed=torch.initial_seed() + self.calls)
        groups = enumerate(_runs(prompts))
        asked = [self.engine.submit(prompt, n * repeated, sampling, place) for place, (prompt, repeated) in groups]
        answers = [answer.tokens for one in asked for answer in self.engine.collect(one)]
        self.engine.sleep()
        longest = max(map(len, answers))
        padding = self._padding(settings)
        made = input_ids.new_full((len(answers), longest), padding)
        for row, tokens in zip(made, answers):
            row[: len(tokens)] = row.new_tensor(tokens)
        return torch.cat([input_ids.repeat_interleave(n, 0), made], 1)

    def _padding(self, settings: Mapping[str, Any]) -> int:
        named = settings.get("pad_token_id")
        own = getattr(self.engine.tokenizer, "pad_token_id", None)
        ends = settings.get("eos_token_id")
        ends = ends[0] if isinstance(ends, list) else ends
        return int(next(token for token in (named, own, ends, 0) if token is not None))


def _runs(prompts: Sequence[list[int]]) -> list[tuple[list[int], int]]:
    """Prompts that stand one behind another are one group: its samples share the prompt's computation."""
    return [(prompt, len(list(same))) for prompt, same in groupby(prompts)]


def _columns(answers: Sequence[Answer], has_mask: bool) -> Made:
    made: Made = {
        "prompt_ids": [answer.prompt_tokens for answer in answers],
        "completion_ids": [answer.tokens for answer in answers],
        "logprobs": [answer.logprobs for answer in answers],
    }
    if has_mask:
        made["env_mask"] = [answer.mask or [1] * len(answer.tokens) for answer in answers]
        made["env_reward"] = [answer.reward for answer in answers]
    return made


def _sampling_of_args(args: Any, seed: int) -> dict[str, Any]:
    """The sampling settings of GRPOConfig."""
    return {
        "max_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": max(0, args.top_k or 0),
        "min_p": args.min_p or 0.0,
        "repetition_penalty": args.repetition_penalty,
        "seed": seed,
    } | _known(args.generation_kwargs or {})


def _known(given: Mapping[str, Any]) -> dict[str, Any]:
    """`generation_kwargs` of the trainer: what transformers calls otherwise gets our name."""
    names = {"max_new_tokens": "max_tokens", "stop": "stop_strings"}
    return {names.get(key, key): value for key, value in given.items() if key not in ("do_sample", "use_cache")}


def _sampling_of_settings(settings: Mapping[str, Any], prompt_length: int, seed: int) -> dict[str, Any]:
    """The sampling settings of transformers' GenerationConfig."""
    longest = settings.get("max_new_tokens") or (settings.get("max_length") or 20) - prompt_length
    is_greedy = not settings.get("do_sample")
    heat = settings.get("temperature")
    return {
        "max_tokens": max(1, longest),
        "temperature": 0.0 if is_greedy else 1.0 if heat is None else heat,
        "top_p": settings.get("top_p") or 1.0,
        "top_k": settings.get("top_k") or 0,
        "min_p": settings.get("min_p") or 0.0,
        "repetition_penalty": settings.get("repetition_penalty") or 1.0,
        "stop_tokens": _listed(settings.get("eos_token_id")),
        "stop_strings": tuple(settings.get("stop_strings") or ()),
        "seed": seed,
    }


def _listed(tokens: Any) -> tuple[int, ...]:
    return () if tokens is None else (tokens,) if isinstance(tokens, int) else tuple(tokens)


def _refuse_foreign(settings: Mapping[str, Any]) -> None:
    for name, neutral in NEUTRAL.items():
        if settings.get(name, neutral) not in (neutral, None, [], ()):
            raise ConfigError(
                f"generate({name}={settings[name]!r}): the native engine has nothing like it",
                f"leave {name} out, or call give_back(model) before",
            )


def whole(model: Any) -> Any:
    """The model whose tensors the engine reads. Parameters cut over processes cannot be read in place."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id") or type(parameter).__name__ == "DTensor":
            raise ConfigError(
                f"{name} lies in pieces over the processes (ZeRO-3 or FSDP): the engine reads whole tensors in place",
                "train with DDP or ZeRO-2, or publish the weights to an engine: docs/bridges.md",
            )
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _longest(model: Any) -> int:
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 15)


def _tokenizer_of(processor: Any) -> Any:
    return getattr(processor, "tokenizer", processor)


def _tools_settings(tools: Sequence[Callable[..., Any]]) -> dict[str, Any]:
    """The settings of the environment in which the model calls these functions."""
    names = []
    for tool in tools:
        path = f"{imports.HERE}:{tool.__name__}"
        imports.keep(path, tool)
        names.append(path)
    return {"name": "tools", "args": {"functions": names}}

"""vLLM behind the rollout interface: generation, log-probabilities, weights loaded in place, sleep, pause and resume.

Only vLLM's public API and a worker extension are used. Every sample is a vLLM request of its own, so that it can be
paused, limited and cancelled alone; prefix caching reads a group's prompt once. After each load a short text is scored
by both sides, because a load that went wrong gives no error by itself.
"""

from __future__ import annotations

import atexit
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidemill.errors import ModelError
from tidemill.interpreter import find_python
from tidemill.models import lora
from tidemill.models.buffers import persistent
from tidemill.models.mixture import routing
from tidemill.owned import OwnedFolder
from tidemill.rollout.engine import (
    Completion,
    Finish,
    Fresh,
    OnTokens,
    Partial,
    Request,
    Sampling,
    run_callbacks,
    token_limit,
)
from tidemill.rollout.hf import _plain
from tidemill.rollout.mismatch import Mismatch, measure
from tidemill.rollout.native.check import RequestLimits, find_problem, refused
from tidemill.rollout.native.draw.sampling import is_steered, is_truncated
from tidemill.rollout.stops import ends_by_string
from tidemill.rollout.vllm.adapter import ServedAdapter, adapter_options, if_all_adapted, make_adapter
from tidemill.rollout.vllm.kept import NAME, KeptMass
from tidemill.rollout.vllm.process import ToldMass, VLLMProcess
from tidemill.rollout.vllm.start import VLLMHere

# Mean gap of log-probabilities after a load. bfloat16 alone makes hundredths; a stale output layer whole nats.
PARITY_NATS = 0.15
PROBE_TOKENS = 48
REMEDY = "give the Python of an environment that has vLLM, such as .venv-vllm/bin/python"


class VLLMEngine:
    """Implements `RolloutEngine` over an `LLM` whose engine lives in this process; `start` makes one. `model` is the
    learner's: the source of weights where `load` is given none, and what a load is checked against. With `kept`, which
    must be what `llm` truncates with, requests may ask for top_p, top_k and min_p."""

    def __init__(
        self,
        llm: Any,
        make_params: Callable[..., Any],
        model: Any,
        *,
        eos_ids: Sequence[int],
        max_len: int,
        tokenizer: Any = None,
        sleep_level: int = 1,
        kept: KeptMass | ToldMass | None = None,
        adapter: ServedAdapter | None = None,
    ) -> None:
        self.llm, self.model, self.tokenizer = llm, model, tokenizer
        self.engine = llm.llm_engine
        self.eos_ids = list(eos_ids)
        self.max_len = max_len
        self.sleep_level = sleep_level
        self.kept = kept
        self.adapter = adapter
        self.brought_bytes = 0  # that vLLM was given by the latest load
        self.has_weights, self.is_asleep = True, False
        self.version = 0
        self.parity: Mismatch | None = None  # of the latest load
        vocab = int(model.get_output_embeddings().weight.shape[0])
        self.limits = RequestLimits(vocab, max_len, 1 << 62, tokenizer is not None)
        self.on_tokens: OnTokens | None = None
        self._make_params = make_params
        self._running: dict[str, Partial] = {}
        self._before: dict[str, int] = {}  # tokens a sample had when it was given to vLLM
        self._done: list[Completion] = []
        self._asleep: list[Partial] = []
        self._names = self._loads = 0

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        problem = find_problem(request, self.limits) or _unsupported(request.sampling, self.kept is not None)
        if problem:
            self._done += refused(request, problem)
            return
        for index in range(request.n):
            self._start(Partial(request, index, [], [], []))

    def _start(self, sample: Partial) -> None:
        request = sample.request
        context = [*request.prompt, *sample.tokens]
        left = min(token_limit(request, sample.index) - len(sample.tokens), self.max_len - len(context))
        if left < 1:
            self._done.append(_completion(sample, "length"))
            return
        self._names += 1
        name = f"{request.id}/{sample.index}/{self._names}"
        self._running[name] = sample
        settings = params_of(request.sampling, left, self.eos_ids)
        if self.kept is not None:
            self.kept.expect(name, request.sampling)
            settings["extra_args"] = {NAME: name}
        self._before[name] = len(sample.tokens)
        self._add(name, context, self._make_params(**settings))

    def _add(self, name: str, tokens: list[int], params: Any) -> None:
        """With a salt for the prefix cache: keys and values of other weights are not found, even where requests that
        run keep them from being forgotten."""
        adapted = {} if self.adapter is None else {"lora_request": self.adapter.request}
        prompt = {"prompt_token_ids": tokens, "cache_salt": str(self._loads)}
        self.engine.add_request(name, prompt, params, **adapted)

    @property
    def has_work(self) -> bool:
        return bool(self._done or self._running or self._asleep)

    def step(self) -> list[Completion]:
        if self.is_asleep and (self._running or self._asleep):
            self.wake()
        if self._running:
            self._need_weights()
            self._absorb(self.engine.step())
        done, self._done = self._done, []
        return run_callbacks(done, self._done)

    def _absorb(self, outputs: Iterable[Any]) -> None:
        """Write new tokens down, and tell of them; what ended goes to `_done`."""
        stopped = []
        fresh: list[tuple[int, int, float, float]] = []
        for output in outputs:
            sample = self._running.get(output.request_id)
            if sample is None:  # aborted while it was on its way
                continue
            made = output.outputs[0]
            logprobs = [chosen[token].logprob for token, chosen in zip(made.token_ids, made.logprobs or ())]
            if self.kept is not None and is_truncated(sample.request.sampling):
                # vLLM's are of what was kept; ours are of the whole distribution, with the mass beside them.
                first = len(sample.tokens) - self._before[output.request_id]
                masses = self.kept.of(output.request_id, first, len(logprobs))
                logprobs = [logprob + mass for logprob, mass in zip(logprobs, masses)]
                sample.kept = [*(sample.kept or ()), *masses]
            sample.tokens += made.token_ids
            sample.logprobs += logprobs
            sample.versions += [self.version] * len(made.token_ids)
            if sample.request.stream is not None:
                stream, masses = sample.request.stream + sample.index, (sample.kept or [])[-len(logprobs) :]
                fresh += zip(repeat(stream), made.token_ids, logprobs, masses or repeat(0.0))
            stops = sample.request.sampling.stop_strings
            finish = _finish(made.finish_reason)
            if finish in (None, "length") and ends_by_string(sample.tokens, stops, self.tokenizer):
                if finish is None:
                    stopped.append(output.request_id)
                finish = "stop"
            if finish is not None:
                self._end(output.request_id, finish)
        if stopped:
            self.engine.abort_request(stopped)
        if fresh and self.on_tokens is not None:
            self.on_tokens(Fresh(*(np.array(column) for column in zip(*fresh))))

    def _end(self, name: str, finish: Finish) -> None:
        sample = self._take_out(name)
        if not np.isfinite(sample.logprobs).all():
            self._done.append(_completion(sample, "error", "the model gave logits that are not numbers"))
        else:
            self._done.append(_completion(sample, finish))

    def _take_out(self, name: str) -> Partial:
        del self._before[name]
        if self.kept is not None:
            self.kept.forget(name)
        return self._running.pop(name)

    # -- control -------------------------------------------------------------------------------------------------

    def pause(self) -> list[Partial]:
        names = list(self._running)
        if names:
            self.engine.abort_request(names)
        asleep, self._asleep = self._asleep, []
        return asleep + [self._take_out(name) for name in names]

    def resume(self, partials: Sequence[Partial]) -> None:
        for sample in partials:
            self._start(sample)

    def cancel(self, request_id: int) -> None:
        names = [name for name, sample in self._running.items() if sample.request.id == request_id]
        if names:
            self.engine.abort_request(names)
        ended = [self._take_out(name) for name in names]
        ended += [sample for sample in self._asleep if sample.request.id == request_id]
        self._asleep = [sample for sample in self._asleep if sample.request.id != request_id]
        self._done += [_completion(sample, "cancelled") for sample in ended]

    def load(self, weights: Any, version: int) -> None:
        """Copy weights (Hugging Face names; None: the learner's as they are) into the ones that serve, and check.
        Running samples keep their keys and values; those that come later find only those of these weights. Of a learner
        with adapters vLLM gets the adapter alone, where it can."""
        if self.is_asleep and weights is None:  # there is no room for them; they come before the next token
            self.version, self.has_weights = version, False
            return
        if weights is not None:
            self.wake()
            self._need_weights()  # what is given may be a part
        self._bring(weights)
        self.version = version
        self._check()

    def _bring(self, weights: Any) -> None:
        self.brought_bytes = 0
        if self.adapter is None:
            self._send(self._whole() if weights is None else weights)
        elif weights is not None:
            self.adapter.has_base = False
            self._send(self._whole() | dict(_pairs(weights)))
            self.adapter.bring(self.engine, is_on=False)
        else:
            if not self.adapter.has_base:
                self._send(self.adapter.base() | _router_biases(self.model))
            self.adapter.has_base = True
            self.brought_bytes += self.adapter.bring(self.engine)
        self._loads += 1
        self.has_weights = True

    def _whole(self) -> dict[str, Tensor]:
        return lora.merged(self.model) | _router_biases(self.model)

    def _send(self, weights: Any) -> None:
        named = _with_tied(self.model, _pairs(weights))
        self.engine.collective_rpc("tidemill_load", args=(named,))
        self.brought_bytes += sum(tensor.nbytes for _, tensor in named)

    def _need_weights(self) -> None:
        """Before tokens are made: those of now, where a sleep dropped them and no load has come since."""
        if not self.has_weights:
            self.load(None, self.version)

    def sleep(self) -> None:
        """Give memory back; what was running is read again after `wake`. At level 2 the weights go too: they come with
        the next `load`, or before the next token if that is earlier."""
        self._asleep = self.pause()
        if not self.is_asleep:
            self.llm.sleep(level=self.sleep_level)
        self.is_asleep = True
        if self.sleep_level == 2:
            self.has_weights = False
            if self.adapter is not None:
                self.adapter.has_base = False

    def wake(self) -> None:
        if self.is_asleep:
            self.llm.wake_up()
        self.is_asleep = False
        asleep, self._asleep = self._asleep, []
        self.resume(asleep)

    def close(self) -> None:
        """End vLLM, so that another can start in this process."""
        self.engine.engine_core.shutdown()
        if self.adapter is not None:
            self.adapter.close()

    # -- parity --------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Score one text on both sides."""
        length = min(PROBE_TOKENS, self.max_len - 1)
        probe = np.random.default_rng(0).integers(0, self.limits.vocab, length).tolist()
        self.parity = measure(self._score(probe), _score_plainly(self.model, probe))
        if not self.parity.mean < PARITY_NATS:
            raise ModelError(
                f"after loading weights, vLLM's log-probabilities are {self.parity.mean:.2f} nats from the learner's "
                f"on average (at most {PARITY_NATS} are rounding)",
                "a weight may have kept its old value, such as a tied output layer; use rollout.engine=native, or a "
                "vLLM version whose in-place load refreshes it",
            )

    def _score(self, tokens: list[int]) -> np.ndarray:
        """vLLM's log-probability of each token after the first. Others that run go on meanwhile."""
        self._names += 1
        name = f"probe/{self._names}"
        params = self._make_params(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        self._add(name, tokens, params)
        while True:
            outputs = self.engine.step()
            self._absorb(output for output in outputs if output.request_id != name)
            for output in outputs:
                if output.request_id == name and output.finished:
                    scored = zip(tokens[1:], output.prompt_logprobs[1:])
                    return np.array([chosen[token].logprob for token, chosen in scored], np.float32)


def start(
    model: Any, *, eos_ids: Sequence[int], max_len: int, max_seqs: int, tokenizer: Any = None,
    memory_share: float = 0.5, sleep_level: int = 1, truncates: bool = False, python: str = "", **options: Any,
) -> VLLMEngine:  # fmt: skip
    """vLLM with the learner's model: made with random weights of its shape, then loaded from it. `truncates`: requests
    may ask for top_p, top_k and min_p. A learner's LoRA adapters are served as such where vLLM can. `python`: another
    interpreter, which has vLLM. `options` go to `vllm.LLM` as they are."""
    vllm = VLLMProcess(find_python("rollout.vllm.python", python, "", REMEDY)) if python else VLLMHere()
    try:
        vllm.open(truncates)
        adapter = make_adapter(model, options, vllm)
        if adapter is not None:
            options = {**adapter_options(model), **options}
        parameter = next(model.parameters())
        llm = vllm.make_llm({
            "model": _config_folder(model), "load_format": "dummy", "skip_tokenizer_init": True,
            "dtype": str(parameter.dtype).removeprefix("torch."), "max_model_len": max_len, "max_num_seqs": max_seqs,
            "gpu_memory_utilization": memory_share, "generation_config": "vllm", "logprobs_mode": "processed_logprobs",
            "enable_sleep_mode": parameter.device.type != "cpu", **options_of(parameter.device.type, options),
        })  # fmt: skip
        engine = VLLMEngine(
            llm, vllm.make_params, model, eos_ids=eos_ids, max_len=max_len, tokenizer=tokenizer,
            sleep_level=sleep_level, kept=vllm.kept, adapter=if_all_adapted(adapter, llm.llm_engine),
        )  # fmt: skip
        engine.load(None, 0)
    except BaseException:
        vllm.close()
        raise
    return engine


def options_of(device: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """A user's arguments, with what a device's plug-in must be told. Weights in Ascend's NZ format can neither be
    replaced in place nor taken up again after a sleep."""
    if device != "npu":
        return dict(given)
    return {**given, "additional_config": {"weight_nz_mode": 0, **given.get("additional_config", {})}}


def _config_folder(model: Any) -> str:
    """vLLM reads a model's shape from a folder, and again whenever it likes: it stays until the process ends."""
    folder = OwnedFolder()
    atexit.register(folder.close)
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder.path)
    return str(folder.path)


def params_of(how: Sampling, left: int, eos_ids: Sequence[int]) -> dict[str, Any]:
    """A sample's settings in vLLM's words. End tokens are named, so that one rule holds for all of them."""
    ends = {*how.stop_tokens, *(() if how.ignore_eos else eos_ids)}
    return {
        "temperature": how.temperature,
        "max_tokens": left,
        "ignore_eos": True,
        "stop_token_ids": sorted(ends),
        "logprobs": 0,
        "detokenize": False,
    }


def _unsupported(how: Sampling, truncates: bool) -> str | None:
    if is_steered(how):
        return (
            "penalties, logit_bias, allowed_tokens and grammars: vLLM gives log-probabilities of what it drew from, "
            "after these, and not the model's own; use rollout.engine=native for them"
        )
    if how.top_logprobs:
        return "top_logprobs: vLLM gives those of what it drew from; use rollout.engine=native for them"
    if is_truncated(how) and not truncates:
        return (
            "top_p, top_k and min_p: this vLLM was started without the part that writes down the mass they keep; set "
            "them in the recipe (rollout.top_p, …), give truncates=True to start(), or use rollout.engine=native"
        )
    return None


def _pairs(weights: Any) -> Iterable[tuple[str, Tensor]]:
    pairs: Iterable[tuple[str, Tensor]] = weights.items() if hasattr(weights, "items") else weights
    return pairs


def _router_biases(model: Any) -> dict[str, Tensor]:
    """What is learned of routers of DeepSeek-V3's kind beside their parameters; vLLM knows it by the same name."""
    return {name: b for name, b in persistent(model).items() if name.endswith(f".{routing.PLACE}")}


def _with_tied(model: Any, named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Parameters that share a tensor under every name they have: vLLM keeps some of them (an output layer packed for a
    CPU) as copies, which it refreshes only when they are named."""
    pairs = list(named)
    given = dict(pairs)
    alike: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        alike.setdefault(id(parameter), []).append(name)
    for names in alike.values():
        known = next((name for name in names if name in given), None)
        if known is not None:
            pairs += [(name, given[known]) for name in names if name not in given]
    return pairs


def _finish(reason: str | None) -> Finish | None:
    if reason is None:
        return None
    return "stop" if reason == "stop" else "length" if reason == "length" else "error"


@torch.no_grad()
def _score_plainly(model: Any, tokens: list[int]) -> np.ndarray:
    ids = torch.tensor([tokens], device=next(model.parameters()).device)
    with _plain(model):
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    scored: np.ndarray = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].cpu().numpy()
    return scored


def _completion(s: Partial, finish: Finish, error: str | None = None) -> Completion:
    return Completion(s.request, s.index, s.tokens, s.logprobs, s.versions, finish, error, s.kept)

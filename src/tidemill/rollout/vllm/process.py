"""vLLM in a process of another Python interpreter, whose versions need not fit beside this one's: it takes the calls
of `vllm.LLM` and of its engine that `rollout.vllm` makes, and `rollout.vllm.child` answers them there.

Requests go over a socket pair, all new ones of a step at once; weights go through memory that both processes map.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidemill.interpreter import Interpreter
from tidemill.rollout.engine import Sampling
from tidemill.rollout.native.draw.sampling import is_truncated
from tidemill.shared_tensors import SharedTensors

MODULE = "tidemill.rollout.vllm.child"
WEIGHT = "weight"
Forms = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, slots=True)
class Logprob:
    logprob: float


@dataclass(frozen=True, slots=True)
class Made:
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Output:
    """As much of vLLM's `RequestOutput` as an engine reads."""

    request_id: str
    outputs: tuple[Made]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None]


class ToldMass:
    """`KeptMass` of the other process, as its answers tell it."""

    def __init__(self) -> None:
        self.asked: dict[str, Sampling] = {}
        self.told: dict[str, list[float]] = {}

    def expect(self, name: str, how: Sampling) -> None:
        if is_truncated(how):
            self.asked[name] = how

    def of(self, name: str, first: int, count: int) -> list[float]:
        """Those of the tokens that came with the latest answer."""
        masses = self.told.pop(name)
        if len(masses) != count:
            raise AssertionError(f"{name}: {count} tokens from {first} on came with {len(masses)} kept masses")
        return masses

    def forget(self, name: str) -> None:
        self.asked.pop(name, None)
        self.told.pop(name, None)


class VLLMProcess:
    """What starts vLLM, as `VLLMHere` does, and what it starts: both `LLM` and its engine."""

    def __init__(self, python: Path) -> None:
        self.llm_engine = self.engine_core = self
        self.kept: ToldMass | None = None
        self._new: dict[str, dict[str, Any]] = {}  # since the latest step
        self._prompts: dict[str, list[int]] = {}  # of new requests, and of those whose prompt is scored
        self._memory: SharedTensors | None = None
        self._forms: Forms = {}
        self._process = Interpreter(python, MODULE, "vLLM's process", None, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})

    def open(self, truncates: bool) -> None:
        self.kept = ToldMass() if truncates else None
        self._process.call("open", {"truncates": truncates})

    def make_llm(self, arguments: Mapping[str, Any]) -> VLLMProcess:
        self._process.call("make_llm", {"arguments": dict(arguments)})
        return self

    @staticmethod
    def make_params(**how: Any) -> dict[str, Any]:
        return how

    @staticmethod
    def make_adapter_request(name: str, number: int, path: str, load_inplace: bool = False) -> dict[str, Any]:
        return {"place": [name, number, path], "how": {"load_inplace": True} if load_inplace else {}}

    def adapter_refusal(self, architecture: str) -> str | None:
        reason: str | None = self._process.call("adapter_refusal", {"architecture": architecture}).fields["reason"]
        return reason

    def close(self) -> None:
        self._process.close()

    # Requests

    def add_request(
        self,
        name: str,
        prompt: Mapping[str, Any],
        params: Mapping[str, Any],
        lora_request: Mapping[str, Any] | None = None,
    ) -> None:
        how = None if self.kept is None else self.kept.asked.get(name)
        cut = None if how is None else {"temperature": how.temperature, **_limits(how)}
        rest = {key: value for key, value in prompt.items() if key != "prompt_token_ids"}
        self._new[name] = {"name": name, "params": params, "cut": cut, "prompt": rest, "adapter": lora_request}
        self._prompts[name] = prompt["prompt_token_ids"]

    def abort_request(self, names: Iterable[str]) -> None:
        names = list(names)
        known = [name for name in names if self._new.pop(name, None) is None]
        for name in names:
            self._prompts.pop(name, None)
        if known:
            self._process.call("abort", {"names": known})

    def step(self) -> list[Output]:
        new, self._new = list(self._new.values()), {}
        prompts = {f"prompt.{i}": np.array(self._prompts[one["name"]], np.int64) for i, one in enumerate(new)}
        for one in new:
            if "prompt_logprobs" not in one["params"]:
                del self._prompts[one["name"]]
        answer = self._process.call("step", {"new": new}, **prompts)
        places = dict.fromkeys(("tokens", "logprobs", "kept", "scored"), 0)

        def take(kind: str, count: int) -> list[Any]:
            start = places[kind]
            places[kind] = start + count
            values: list[Any] = answer.arrays[kind][start : start + count].tolist()
            return values

        return [self._output(told, take) for told in answer.fields["made"]]

    def _output(self, told: Mapping[str, Any], take: Any) -> Output:
        name, tokens = told["name"], take("tokens", told["count"])
        logprobs = [{token: Logprob(value)} for token, value in zip(tokens, take("logprobs", told["count"]))]
        if self.kept is not None and told["is_cut"]:
            self.kept.told[name] = take("kept", told["count"])
        scored: list[dict[int, Logprob] | None] = []
        if told["scored"]:
            values = take("scored", told["scored"])
            scored = [None, *({t: Logprob(v)} for t, v in zip(self._prompts.pop(name)[1:], values))]
        return Output(name, (Made(tokens, logprobs, told["finish"]),), told["finished"], scored)

    # Weights and memory

    def add_lora(self, request: Mapping[str, Any]) -> None:
        self._process.call("add_lora", {"request": request})

    def collective_rpc(self, method: str, args: tuple[Sequence[tuple[str, Tensor]]] | tuple[()] = ()) -> list[Any]:
        """Call a method of vLLM's workers, with named tensors where it takes some."""
        if not args:
            answers: list[Any] = self._process.call("rpc", {"method": method, "names": None}).fields["answers"]
            return answers
        pairs = args[0]
        forms = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in pairs}
        fields: dict[str, Any] = {"method": method, "names": [name for name, _ in pairs]}
        is_new = self._memory is None or forms != self._forms
        if is_new:
            self._memory, self._forms = None, forms  # the old memory goes before the new comes
            dtypes = {name: dtype for name, (_, dtype) in forms.items()}
            self._memory = SharedTensors({name: shape for name, (shape, _) in forms.items()}, (WEIGHT,), dtypes)
            fields |= {"file": self._memory.file, "layout": self._memory.layout[WEIGHT]}
            fields["dtypes"] = {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()}
        memory = self._memory
        assert memory is not None
        for name, tensor in pairs:
            memory.views[WEIGHT][name].copy_(tensor.detach())
        answers = self._process.call("rpc", fields).fields["answers"]
        memory.close_file()
        return answers

    def sleep(self, level: int) -> None:
        self._process.call("sleep", {"level": level})

    def wake_up(self) -> None:
        self._process.call("wake_up")

    def shutdown(self) -> None:
        self._process.close()


def _limits(how: Sampling) -> dict[str, float]:
    return {"top_k": how.top_k, "top_p": how.top_p, "min_p": how.min_p}

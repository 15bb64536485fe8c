"""The process in which vLLM runs, when it has an interpreter of its own: it answers what `rollout.vllm.process` asks.

    python -m tidemill.rollout.vllm.child FILE_DESCRIPTOR

This interpreter has vLLM and what vLLM brought; of Tidemill only what needs no more than that is imported.
"""

from __future__ import annotations

import socket
import sys
from typing import Any

import numpy as np
import torch

from tidemill.interpreter import Answer, Message, serve
from tidemill.rollout.engine import Sampling
from tidemill.rollout.vllm.kept import KeptMass
from tidemill.rollout.vllm.start import VLLMHere

NONE: Answer = ({}, {})


class Server:
    def __init__(self) -> None:
        self.vllm = VLLMHere()
        self.llm: Any = None
        self.kept: KeptMass | None = None
        self.weights: dict[str, torch.Tensor] = {}
        self.prompts: dict[str, list[int]] = {}  # of requests whose prompt is scored
        self.made: dict[str, int] = {}  # tokens of each request that is truncated

    def open(self, request: Message) -> Answer:
        self.vllm.open(request.fields["truncates"])
        self.kept = self.vllm.kept
        return NONE

    def adapter_refusal(self, request: Message) -> Answer:
        return {"reason": self.vllm.adapter_refusal(request.fields["architecture"])}, {}

    def make_llm(self, request: Message) -> Answer:
        self.llm = self.vllm.make_llm(request.fields["arguments"])
        return NONE

    @property
    def engine(self) -> Any:
        return self.llm.llm_engine

    def step(self, request: Message) -> Answer:
        for i, new in enumerate(request.fields["new"]):
            self._add(new, request.arrays[f"prompt.{i}"].tolist())
        told = Told()
        for output in self.engine.step():
            self._tell(output, told)
        return {"made": told.made}, told.arrays()

    def abort(self, request: Message) -> Answer:
        self.engine.abort_request(request.fields["names"])
        for name in request.fields["names"]:
            self._forget(name)
        return NONE

    def _add(self, new: dict[str, Any], prompt: list[int]) -> None:
        name, params = new["name"], new["params"]
        if new["cut"] is not None and self.kept is not None:
            self.kept.expect(name, Sampling(**new["cut"]))
            self.made[name] = 0
        if "prompt_logprobs" in params:
            self.prompts[name] = prompt
        adapter = new["adapter"]
        adapted = {} if adapter is None else {"lora_request": self._adapter(adapter)}
        whole = {**new["prompt"], "prompt_token_ids": prompt}
        self.engine.add_request(name, whole, self.vllm.make_params(**params), **adapted)

    def _tell(self, output: Any, told: Told) -> None:
        name, part = output.request_id, output.outputs[0]
        tokens = list(part.token_ids)
        told.tokens += tokens
        told.logprobs += [chosen[token].logprob for token, chosen in zip(tokens, part.logprobs or ())]
        is_cut = self.kept is not None and name in self.made
        if self.kept is not None and is_cut:
            told.kept += self.kept.of(name, self.made[name], len(tokens))
            self.made[name] += len(tokens)
        scored = 0
        if name in self.prompts and output.prompt_logprobs:
            pairs = zip(self.prompts[name][1:], output.prompt_logprobs[1:])
            values = [chosen[token].logprob for token, chosen in pairs]
            told.scored += values
            scored = len(values)
        told.made.append(
            {
                "name": name,
                "count": len(tokens),
                "is_cut": is_cut,
                "finish": part.finish_reason,
                "finished": output.finished,
                "scored": scored,
            }
        )
        if output.finished:
            self._forget(name)

    def _forget(self, name: str) -> None:
        self.prompts.pop(name, None)
        self.made.pop(name, None)
        if self.kept is not None:
            self.kept.forget(name)

    def add_lora(self, request: Message) -> Answer:
        self.engine.add_lora(self._adapter(request.fields["request"]))
        return NONE

    def _adapter(self, told: dict[str, Any]) -> Any:
        return self.vllm.make_adapter_request(*told["place"], **told["how"])

    def rpc(self, request: Message) -> Answer:
        fields = request.fields
        if "file" in fields:
            self.weights = _mapped(fields["file"], fields["layout"], fields["dtypes"])
        names = fields["names"]
        args = () if names is None else ([(name, self.weights[name]) for name in names],)
        return {"answers": self.engine.collective_rpc(fields["method"], args=args)}, {}

    def sleep(self, request: Message) -> Answer:
        self.llm.sleep(level=request.fields["level"])
        return NONE

    def wake_up(self, _: Message) -> Answer:
        self.llm.wake_up()
        return NONE


class Told:
    """What a step made: a record of each output, and the values of all in a row."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.kept: list[float] = []
        self.scored: list[float] = []

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        values = {"logprobs": self.logprobs, "kept": self.kept, "scored": self.scored}
        return {"tokens": np.array(self.tokens, np.int64), **{k: np.array(v, np.float64) for k, v in values.items()}}


def _mapped(file: str, layout: list[Any], dtypes: dict[str, str]) -> dict[str, torch.Tensor]:
    whole = torch.from_numpy(np.memmap(file, np.uint8, "r+"))

    def view(name: str, shape: list[int], at: int) -> torch.Tensor:
        dtype = getattr(torch, dtypes[name])
        size = dtype.itemsize * int(np.prod(shape))
        return whole[at : at + size].view(dtype).view(shape)

    return {name: view(name, shape, at) for name, shape, at in layout}


def main() -> None:
    server = Server()
    kinds = ("open", "adapter_refusal", "make_llm", "step", "abort", "add_lora", "rpc", "sleep", "wake_up")
    try:
        serve(socket.socket(fileno=int(sys.argv[1])), {kind: getattr(server, kind) for kind in kinds})
    finally:
        if server.llm is not None:
            server.engine.engine_core.shutdown()


if __name__ == "__main__":
    main()

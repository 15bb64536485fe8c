"""The process in which vLLM runs, when it has an interpreter of its own: it answers what `rollout.vllm_process` asks.

    python -m tidemill.rollout.vllm_child FILE_DESCRIPTOR

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
from tidemill.rollout.vllm_kept import KeptMass

NONE: Answer = ({}, {})


class Server:
    def __init__(self) -> None:
        self.llm: Any = None
        self.kept: KeptMass | None = None
        self.weights: dict[str, torch.Tensor] = {}
        self.prompts: dict[str, list[int]] = {}  # of requests whose prompt is scored
        self.made: dict[str, int] = {}  # tokens of each request that is truncated

    def begin(self, request: Message) -> Answer:
        from tidemill.rollout.vllm_start import make_llm

        self.kept = KeptMass() if request.fields["truncates"] else None
        self.llm = make_llm(request.fields["arguments"], self.kept)
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
        from tidemill.rollout.vllm_start import make_params

        name, params = new["name"], new["params"]
        if new["cut"] is not None and self.kept is not None:
            self.kept.expect(name, Sampling(**new["cut"]))
            self.made[name] = 0
        if "prompt_logprobs" in params:
            self.prompts[name] = prompt
        self.engine.add_request(name, {"prompt_token_ids": prompt}, make_params(**params))

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

    def rpc(self, request: Message) -> Answer:
        fields = request.fields
        if "file" in fields:
            self.weights = _mapped(fields["file"], fields["layout"], fields["dtypes"])
        pairs = [(name, self.weights[name]) for name in fields["names"]]
        self.engine.collective_rpc(fields["method"], args=(pairs,))
        return NONE

    def reset_prefix_cache(self, _: Message) -> Answer:
        self.engine.reset_prefix_cache()
        return NONE

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
    kinds = ("begin", "step", "abort", "rpc", "reset_prefix_cache", "sleep", "wake_up")
    try:
        serve(socket.socket(fileno=int(sys.argv[1])), {kind: getattr(server, kind) for kind in kinds})
    finally:
        if server.llm is not None:
            server.engine.engine_core.shutdown()


if __name__ == "__main__":
    main()

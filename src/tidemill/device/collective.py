"""What carries collectives between ranks, by kind of device. Plain values always travel over gloo."""

from __future__ import annotations

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}


def backend(kind: str) -> str:
    return BACKENDS[kind]

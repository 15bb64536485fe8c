"""A dataflow as verl has it: rollout, reward, reference and update are processes of their own, which find their work by
the tags of keys. And consumers that are killed. Both run with TransferQueue and with ours.

    python -m tests.bridges.transfer_queue.flow theirs|ours rows|killed [--ray]
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

from tests.bridges.transfer_queue.cases import plain
from tests.bridges.transfer_queue.run import MODULES

SPAWN = multiprocessing.get_context("spawn")
PROMPTS, SAMPLES, STEPS = 4, 4, 2
PARTITION = "train"
PAUSE_S, WITHIN_S = 0.02, 120.0


def connected(side: str, address: str) -> Any:
    """The module, in a new process."""
    if address:
        import ray

        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    tq = importlib.import_module(MODULES[side])
    tq.init()
    return tq


def waiting(tq: Any, is_mine: Callable[[dict[str, Any]], bool]) -> list[str]:
    """Wait for keys with work; none when the flow is over."""
    deadline = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline:
        keys = tq.kv_list(PARTITION).get(PARTITION, {})
        found = sorted(key for key, tag in keys.items() if is_mine(tag))
        if found or "over" in keys:
            return found
        time.sleep(PAUSE_S)
    raise TimeoutError(f"nothing to do within {WITHIN_S} s")


def rollout(side: str, address: str) -> None:
    """Answer each prompt: `answers` differ in length, `logprobs` go with them."""
    tq = connected(side, address)
    while keys := waiting(tq, lambda tag: tag.get("status") == "prompt"):
        data = tq.kv_batch_get(keys, PARTITION, select_fields=["prompt"])
        answers, logprobs = [], []
        for key, prompt in zip(keys, data["prompt"].unbind()):
            draw = torch.Generator().manual_seed(int(prompt.sum()) * 100 + int(key.rpartition("_")[2]))
            n = int(torch.randint(2, 9, (1,), generator=draw))
            answers.append(torch.randint(0, 100, (n,), generator=draw))
            logprobs.append(-torch.rand(n, generator=draw))
        fields = {
            "answer": torch.nested.as_nested_tensor(answers, layout=torch.jagged),
            "logprob": torch.nested.as_nested_tensor(logprobs, layout=torch.jagged),
            "text": NonTensorStack(*[" ".join(map(str, answer.tolist())) for answer in answers]),
        }
        tq.kv_batch_put(keys, PARTITION, TensorDict(fields, batch_size=len(keys)), [{"status": "rolled"}] * len(keys))


def score(side: str, address: str) -> None:
    tq = connected(side, address)
    while keys := waiting(tq, lambda tag: tag.get("status") == "rolled" and "scored" not in tag):
        texts = tq.kv_batch_get(keys, PARTITION, select_fields="text").get("text").tolist()
        rewards = torch.tensor([[len(set(text.split())) / 10] for text in texts])
        tq.kv_batch_put(
            keys, PARTITION, TensorDict({"reward": rewards}, batch_size=len(keys)), [{"scored": 1}] * len(keys)
        )


def reference(side: str, address: str) -> None:
    tq = connected(side, address)
    while keys := waiting(tq, lambda tag: tag.get("status") == "rolled" and "referred" not in tag):
        data = tq.kv_batch_get(keys, PARTITION, select_fields=["answer"])
        parts = [answer.float().neg() / 100 for answer in data["answer"].unbind()]
        fields = TensorDict({"ref": torch.nested.as_nested_tensor(parts, layout=torch.jagged)}, batch_size=len(keys))
        tq.kv_batch_put(keys, PARTITION, fields, [{"referred": 1}] * len(keys))


def update(side: str, address: str, told: Any) -> None:
    """Take whole groups, compute advantages, tell the rows, and clear them."""
    tq = connected(side, address)
    seen: dict[str, Any] = {}
    for step in range(STEPS):
        keys: list[str] = []
        while len(keys) < PROMPTS * SAMPLES:
            keys = waiting(tq, lambda tag, step=step: tag.get("step") == step and {"scored", "referred"} <= tag.keys())
        rewards = torch.cat(list(tq.kv_batch_get(keys, PARTITION, "reward")["reward"].unbind())).view(PROMPTS, SAMPLES)
        advantages = (rewards - rewards.mean(1, keepdim=True)).view(-1, 1)
        meta = tq.kv_batch_put(keys, PARTITION, TensorDict({"advantage": advantages}, batch_size=len(keys)))
        for part in meta.chunk(3):  # as ranks take their shares
            data = tq.kv_batch_get_by_meta(part)
            for i, key in enumerate(part.keys):
                row = {name: rows_of(data.get(name))[i] for name in data.keys()}  # noqa: SIM118
                seen[key] = {name: plain(value) for name, value in row.items()} | {"tag": plain(part.tags[i])}
        tq.kv_clear(keys, PARTITION)
    tq.kv_put("over", PARTITION, tag={})
    told.put(seen)
    time.sleep(3 * PAUSE_S)


def rows_of(value: Any) -> list[Any]:
    return list(value.unbind()) if isinstance(value, torch.Tensor) else value.tolist()


def rows(side: str, address: str) -> dict[str, Any]:
    """Run the flow. Returns every row as the update saw it."""
    tq = connected(side, "")
    told = SPAWN.Queue()
    workers = [SPAWN.Process(target=role, args=(side, address)) for role in (rollout, score, reference)]
    workers.append(SPAWN.Process(target=update, args=(side, address, told)))
    for worker in workers:
        worker.start()
    for step in range(STEPS):
        keys = [f"s{step}p{p}_{i}" for p in range(PROMPTS) for i in range(SAMPLES)]
        prompts = torch.arange(step * 100, step * 100 + PROMPTS * 3).view(PROMPTS, 3).repeat_interleave(SAMPLES, 0)
        tags = [{"status": "prompt", "step": step, "group": p} for p in range(PROMPTS) for _ in range(SAMPLES)]
        tq.kv_batch_put(keys, PARTITION, TensorDict({"prompt": prompts}, batch_size=len(keys)), tags)
    seen: dict[str, Any] = told.get(timeout=2 * WITHIN_S)
    for worker in workers:
        worker.join(30)
    left = sorted(tq.kv_list(PARTITION)[PARTITION])
    tq.close()
    return {"rows": seen, "left": left}


# -- killed consumers -------------------------------------------------------------------------------------------------

ROWS, BATCH = 48, 8


def consume(side: str, address: str, began: Any, dies: bool) -> None:
    """Fetch batches of a task and write what was made of them; one that dies has fetched and not written."""
    tq = connected(side, address)
    client = tq.get_client()
    while True:
        try:
            meta = client.get_meta(["x"], BATCH, PARTITION, task_name="work")
        except RuntimeError:  # nothing is left
            break
        began.put(meta.global_indexes)
        if dies:
            signal.pause()
        data = client.get_data(meta)
        made = torch.cat([row.view(1, -1) for row in data["x"].unbind()]) * 2
        client.put(TensorDict({"y": made}, batch_size=meta.size), metadata=meta)
    tq.close() if side == "ours" else client.close()  # theirs would end the queue for all


def killed(side: str, address: str) -> dict[str, int]:
    """Kill a consumer with -9 while it has a batch, then let another finish. Returns how many rows came through."""
    tq = connected(side, "")
    client = tq.get_client()
    client.put(TensorDict({"x": torch.arange(ROWS).view(ROWS, 1)}, batch_size=ROWS), partition_id=PARTITION)
    began = SPAWN.Queue()
    first = SPAWN.Process(target=consume, args=(side, address, began, True))
    first.start()
    began.get(timeout=WITHIN_S)
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    second = SPAWN.Process(target=consume, args=(side, address, began, False))
    second.start()
    second.join(WITHIN_S)
    _, status = client.get_production_status(["y"], PARTITION)
    done = 0 if status is None else int(status.sum())
    tq.close()
    return {"rows": ROWS, "came_through": done, "lost": ROWS - done}


def main() -> None:
    side, what = sys.argv[1:3]
    kept, _ = os.dup(1), os.dup2(2, 1)
    address = ""
    if "--ray" in sys.argv:
        import ray

        context = ray.init(
            address="local", num_cpus=16, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
        )
        address = context.address_info["address"]
    found = {"rows": rows, "killed": killed}[what](side, address)
    os.write(kept, (json.dumps(found) + "\n").encode())
    os._exit(0)


if __name__ == "__main__":
    main()

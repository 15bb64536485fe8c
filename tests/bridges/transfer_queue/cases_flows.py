"""Cases of whole systems: samplers in the controller, the streaming loader, checkpoints, start and end."""

from __future__ import annotations

import json
from typing import Any

import torch
from tensordict import TensorDict

from tests.bridges.transfer_queue.cases import Room, case, jagged, names, outcome, plain, rows
from tests.bridges.transfer_queue.cases_client import FIELDS, field


@case("not started")
def nothing_works_before_init(tq: Any, room: Room) -> Any:
    return [
        outcome(tq.get_client), outcome(lambda: tq.kv_list()), outcome(lambda: tq.save_checkpoint(room.folder / "c")),
        outcome(lambda: tq.load_checkpoint(room.folder / "c")), outcome(tq.close), outcome(tq.get_metrics_endpoint),
    ]  # fmt: skip


@case("not started")
def init_refuses_what_it_does_not_know(tq: Any, _: Room) -> Any:
    return [outcome(lambda: tq.init(settings({"controller": {"sampler": "NoSuchSampler"}}))), outcome(tq.get_client)]


@case("not started")
def init_answers_with_the_whole_configuration(tq: Any, _: Room) -> Any:
    given = tq.init(settings({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    again = tq.init()
    seen = [
        given.controller.sampler, given.controller.polling_mode, given.backend.storage_backend, given.metrics.enabled,
        given.backend.SimpleStorage.num_data_storage_units, given.controller.zmq_info is None, again,
        type(tq.get_client()).__name__, tq.get_metrics_endpoint(),
    ]  # fmt: skip
    tq.close()
    return [seen, outcome(tq.get_client), outcome(tq.close)]


@case("not started")
def a_closed_system_can_be_started_again(tq: Any, room: Room) -> Any:
    found = []
    for _ in range(2):
        tq.init()
        found.append([tq.kv_list(), tq.kv_put("a", room.partition(), fields={"x": torch.ones(1)})])
        tq.close()
    return found


@case("not started")
def metrics_are_served(tq: Any, _: Room) -> Any:
    from urllib.request import urlopen

    tq.init(settings({"metrics": {"enabled": True}}))
    endpoint = tq.get_metrics_endpoint()
    text = urlopen(f"http://{endpoint}/metrics", timeout=10).read().decode()
    tq.close()
    return [isinstance(endpoint, str), "# TYPE" in text]


def settings(given: dict[str, Any]) -> Any:
    try:
        from omegaconf import OmegaConf
    except ModuleNotFoundError:  # TransferQueue needs it; without it, ours takes a dict
        return given
    return OmegaConf.create(given, flags={"allow_objects": True})


@case("groups")
def groups_are_given_whole(tq: Any, room: Room) -> Any:
    client, p = tq.get_client(), room.partition()
    meta = client.put(rows(8), partition_id=p)
    client.put(field("r", 5), metadata=meta.select_samples([0, 1, 2, 3, 6]))
    first = client.get_meta(["r"], 2, p, task_name="a")
    second = client.get_meta(["r"], 2, p, task_name="a")
    odd = outcome(lambda: client.get_meta(["ids"], 3, p, task_name="b"))
    none = outcome(lambda: client.get_meta(["r"], 2, p, task_name="a"))
    client.put(field("r", 3), metadata=meta.select_samples([4, 5, 7]))
    return [first, second, odd, none, client.get_meta(["r"], 4, p, task_name="a")]


@case("ranks")
def ranks_get_their_own_and_the_same_again(tq: Any, room: Room) -> Any:
    client, p = tq.get_client(), room.partition()
    client.put(rows(8), partition_id=p)

    def ask(rank: int, index: int, n: int = 2) -> Any:
        config = {"dp_rank": rank, "batch_index": index, "task_name": "a", "partition_id": p}
        return client.get_meta(FIELDS, n, p, task_name="a", sampling_config=config)

    metas = [ask(0, 0), ask(1, 0), ask(0, 0), ask(0, 1), ask(1, 1), ask(1, 0), ask(1, 1)]
    return [
        [meta.global_indexes for meta in metas], ask(0, 2), outcome(lambda: ask(-1, 0)),
        outcome(lambda: client.get_meta(FIELDS, 1, p, task_name="b")), client.check_consumption_status("a", p),
    ]  # fmt: skip


@case("balanced")
def ranks_get_equal_lengths(tq: Any, room: Room) -> Any:
    client, p = tq.get_client(), room.partition()
    meta = client.put(rows(8), partition_id=p)
    meta.update_custom_meta([{"total_lengths": n} for n in (9, 1, 8, 2, 7, 3, 6, 4)])
    client.set_custom_meta(meta)
    config = {"batch_index": 0, "task_name": "a", "partition_id": p}
    found = [
        client.get_meta(FIELDS, 4, p, task_name="a", sampling_config={**config, "dp_rank": rank}) for rank in (0, 1)
    ]
    return [found, client.check_consumption_status("a", p)]


@case("own sampler")
def a_sampler_of_ones_own(tq: Any, room: Room) -> Any:
    client, p = tq.get_client(), room.partition()
    client.put(rows(6), partition_id=p)
    metas = [
        client.get_meta(FIELDS, 2, p, task_name="a"), client.get_meta(FIELDS, 2, p, task_name="a"),
        client.get_meta(FIELDS, 2, p, task_name="a", sampling_config={"keep": True}),
        client.get_meta(FIELDS, 2, p, task_name="a"),
    ]  # fmt: skip
    return [[meta.global_indexes for meta in metas], client.check_consumption_status("a", p)]


def last_first_sampler(tq: Any) -> Any:
    """A sampler that a user could write: the newest first, and with `keep` they stay."""

    class LastFirst(tq.BaseSampler):  # type: ignore[misc]
        def sample(self, ready: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Any:
            chosen = ready[-batch_size:][::-1]
            return chosen, [] if kwargs.get("keep") else chosen

    return LastFirst()


@case("stream")
def the_loader_streams_micro_batches(tq: Any, room: Room) -> Any:
    client, p = tq.get_client(), room.partition()
    data = rows(8, jag=jagged(*range(1, 9)))
    client.put(data, partition_id=p)
    fields = ["ids", "jag"]
    usual = {"batch_size": 4, "micro_batch_size": 3, "data_fields": fields, "partition_id": p, "task_name": "a"}
    dataset = tq.StreamingDataset(config=room.config, dp_rank=0, should_check_consumption_status=True, **usual)
    loader = tq.StreamingDataLoader(dataset)
    first = list(loader)
    loader.reset()
    again = [meta.global_indexes for _, meta in loader]
    kept = len(loader.get_buffer())
    q = room.partition()
    client.put(rows(4, jag=jagged(1, 2, 3, 4)), partition_id=q)
    loader.step(q)
    return [first, again, kept, [meta.global_indexes for _, meta in loader], len(loader.get_buffer())]


@case("stream")
def the_loader_checks_its_settings(tq: Any, room: Room) -> Any:
    def make(**given: Any) -> Any:
        usual = {
            "config": room.config, "batch_size": 2, "micro_batch_size": 2, "data_fields": ["ids"],
            "partition_id": "p", "task_name": "a", "dp_rank": 0,
        }  # fmt: skip
        return tq.StreamingDataset(**usual | given)

    return [
        outcome(lambda: make(micro_batch_size=0)), outcome(lambda: make(data_fields=[])),
        outcome(lambda: make(dp_rank=-1)), type(make()).__name__,
    ]  # fmt: skip


@case("stream")
def the_loader_takes_functions(tq: Any, room: Room) -> Any:
    client, p = tq.get_client(), room.partition()
    client.put(rows(4), partition_id=p)

    def process(data: Any, meta: Any, micro_batch_size: int = 1) -> Any:
        yield data, meta.size

    dataset = tq.StreamingDataset(
        config=room.config, batch_size=2, micro_batch_size=1, data_fields=["ids"], partition_id=p, task_name="a",
        dp_rank=0, should_check_consumption_status=True, process_batch_fn=process,
    )  # fmt: skip
    return [(plain(data), n) for data, n in tq.StreamingDataLoader(dataset, collate_fn=lambda pair: pair)]


@case("checkpoint")
def a_checkpoint_brings_everything_back(tq: Any, room: Room) -> Any:
    client, p, where = tq.get_client(), room.partition(), room.folder / "saved"
    tq.kv_batch_put(names(4), p, fields=rows(4, jag=jagged(1, 2, 3, 4)), tags=[{"i": i} for i in range(4)])
    tq.kv_put("more", p, fields={"text": "x", "ids": torch.zeros(3).long()})
    client.get_meta(["ids"], 3, p, task_name="a")
    answer = tq.save_checkpoint(where, metadata={"step": 3})
    saved = json.loads((where / "metadata.json").read_text())
    tq.kv_clear(names(4), p)
    tq.kv_put("other", room.partition(), fields={"x": torch.ones(1)})
    answers = [answer, tq.load_checkpoint(where), saved]
    found = [sorted(tq.kv_list()), tq.kv_list(p), tq.kv_batch_get(names(4), p), tq.kv_batch_get("more", p)]
    return [answers, found, client.get_consumption_status("a", p), client.get_meta(["ids"], 2, p, task_name="a")]


@case("checkpoint")
def a_checkpoint_replaces_the_one_before(tq: Any, room: Room) -> Any:
    p, where = room.partition(), room.folder / "again"
    for i in range(2):
        tq.kv_put("a", p, fields={"x": torch.full((2,), float(i))})
        tq.save_checkpoint(str(where), metadata={"i": i}, include_storage=False)
    left = sorted(path.name for path in room.folder.iterdir() if path.name.startswith("again"))
    tq.kv_clear("a", p)
    tq.load_checkpoint(str(where))
    return [left, json.loads((where / "metadata.json").read_text()), tq.kv_batch_get("a", p)]


@case("checkpoint")
def a_checkpoint_that_is_not_there(tq: Any, room: Room) -> Any:
    where = room.folder / "broken"
    missing = outcome(lambda: tq.load_checkpoint(where))
    where.mkdir()
    empty = outcome(lambda: tq.load_checkpoint(where))
    (where / "metadata.json").write_text(json.dumps({"storage_saved": True}))
    partial = outcome(lambda: tq.load_checkpoint(where))
    (room.folder / "file").write_text("x")
    blocked = outcome(lambda: tq.save_checkpoint(room.folder / "file" / "deeper"))
    return [missing, empty, partial, blocked]


@case("checkpoint")
def an_interrupted_replacement_is_rolled_back(tq: Any, room: Room) -> Any:
    p, where = room.partition(), room.folder / "cut"
    tq.kv_put("a", p, fields={"x": torch.ones(2)})
    tq.save_checkpoint(where)
    where.rename(room.folder / "cut.old")
    tq.load_checkpoint(where)
    return [tq.kv_batch_get("a", p), where.exists(), (room.folder / "cut.old").exists()]


@case("checkpoint ranks")
def a_sampler_goes_on_after_a_checkpoint(tq: Any, room: Room) -> Any:
    client, p, where = tq.get_client(), room.partition(), room.folder / "ranks"
    client.put(rows(6), partition_id=p)
    config = {"dp_rank": 0, "batch_index": 0, "task_name": "a", "partition_id": p}
    first = client.get_meta(FIELDS, 2, p, task_name="a", sampling_config=config)
    tq.save_checkpoint(where)
    client.get_meta(FIELDS, 2, p, task_name="a", sampling_config={**config, "batch_index": 1})
    tq.load_checkpoint(where)
    again = client.get_meta(FIELDS, 2, p, task_name="a", sampling_config=config)
    new = client.get_meta(FIELDS, 2, p, task_name="a", sampling_config={**config, "dp_rank": 1})
    return [first.global_indexes, again.global_indexes, new.global_indexes, TensorDict({}, batch_size=0)]

"""Cases of the client's own calls: metadata, put, get, consumption, partitions, clearing."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

from tests.bridges.transfer_queue.cases import Room, case, jagged, names, outcome, rows

FIELDS = ["ids", "mask"]


def field(name: str, n: int, value: float = 1.0) -> Any:
    return TensorDict({name: torch.full((n, 1), value)}, batch_size=n)


@case("client")
def insert_fetch_and_write_back(tq: Any, room: Room) -> Any:
    client, p = tq.get_client(), room.partition()
    made = client.put(rows(6), partition_id=p)
    metas = [client.get_meta(FIELDS, 2, p, task_name="a") for _ in range(3)]
    data = [client.get_data(meta) for meta in metas]
    written = client.put(field("reward", 2), metadata=metas[1])
    other = client.get_meta(["ids"], 4, p, mode="fetch", task_name="b")
    late = client.get_meta(["reward"], 2, p, task_name="c")
    return [made, metas, data, written, other, late, client.get_data(late), client.get_data(late.select_fields([]))]


@case("client")
def fetch_without_enough_rows_fails_after_a_while(tq: Any, room: Room) -> Any:
    client, p = tq.get_client(), room.partition()
    client.put(rows(3), partition_id=p)
    return [
        outcome(lambda: client.get_meta(FIELDS, 4, p, task_name="a")),
        outcome(lambda: client.get_meta(["later"], 1, p, task_name="a")),
        outcome(lambda: client.get_meta(FIELDS, 1, "no such partition", task_name="a")),
        client.get_meta(FIELDS, 3, p, task_name="a"), outcome(lambda: client.get_meta(FIELDS, 1, p, task_name="a")),
    ]  # fmt: skip


@case("client")
def calls_that_are_wrong(tq: Any, room: Room) -> Any:
    client, p = tq.get_client(), room.partition()
    client.put(rows(2), partition_id=p)
    none = tq.BatchMeta.empty()
    return [
        outcome(lambda: client.get_meta(FIELDS, 1, p)),
        outcome(lambda: client.get_meta(FIELDS, None, p, task_name="a")),
        outcome(lambda: client.get_meta(FIELDS, 1, p, mode="other", task_name="a")),
        outcome(lambda: client.get_meta(FIELDS, 1, "nowhere", mode="force_fetch")),
        outcome(lambda: client.get_meta(None, 1, p, mode="insert")),
        outcome(lambda: client.get_meta(FIELDS, None, p, mode="insert")),
        outcome(lambda: client.put(rows(2))), outcome(lambda: client.put(rows(2), metadata=none)),
        outcome(lambda: client.get_data(none)), outcome(lambda: client.clear_samples(none)),
        outcome(lambda: client.put(rows(3), metadata=client.get_meta(FIELDS, 2, p, mode="force_fetch"))),
        outcome(lambda: client.kv_retrieve_meta([], p)), outcome(lambda: client.kv_retrieve_meta(5, p)),
        outcome(lambda: client.kv_retrieve_keys([], p)), outcome(lambda: client.kv_retrieve_keys("a", p)),
        outcome(lambda: client.kv_retrieve_keys(["a"], p)), outcome(lambda: client.clear_partition("nowhere")),
    ]  # fmt: skip


@case("client")
def fetch_by_force_shows_everything(tq: Any, room: Room) -> Any:
    client, p = tq.get_client(), room.partition()
    client.put(rows(4), partition_id=p)
    client.put(field("reward", 2), metadata=client.get_meta(["ids"], 2, p, task_name="a"))
    found = client.get_meta(["ids", "reward"], 99, p, mode="force_fetch")
    return [
        found, client.get_meta(["ids", "unknown"], 1, p, mode="force_fetch"),
        client.get_meta(["unknown"], 1, p, mode="force_fetch"), client.get_meta([], 1, p, mode="force_fetch"),
        outcome(lambda: client.get_data(found)),
    ]  # fmt: skip


@case("client")
def insert_reserves_rows(tq: Any, room: Room) -> Any:
    client, p = tq.get_client(), room.partition()
    meta = client.get_meta(FIELDS, 3, p, mode="insert")
    before = [client.get_production_status(FIELDS, p), client.get_production_status(["ids"], p)]
    data = outcome(lambda: client.get_data(meta))
    written = client.put(rows(3), metadata=meta)
    return [meta, before, data, written, client.get_production_status(FIELDS, p), client.get_data(written)]


@case("client")
def consumption_is_told(tq: Any, room: Room) -> Any:
    client, p = tq.get_client(), room.partition()
    client.put(rows(4), partition_id=p)
    found: list[Any] = [client.get_consumption_status("a", p), client.check_consumption_status("a", p)]
    client.get_meta(FIELDS, 3, p, task_name="a")
    found += [client.get_consumption_status("a", p), client.check_consumption_status("a", p)]
    client.get_meta(FIELDS, 1, p, task_name="a")
    client.get_meta(FIELDS, 4, p, task_name="b")
    found += [client.check_consumption_status(task, p) for task in "abc"]
    found += [client.reset_consumption(p, "a"), [client.check_consumption_status(task, p) for task in "ab"]]
    again = client.get_meta(FIELDS, 2, p, task_name="a")
    found += [again, client.reset_consumption(p), [client.get_consumption_status(task, p) for task in "ab"]]
    return [
        *found, client.reset_consumption("nowhere"), client.get_consumption_status("a", "nowhere"),
        client.check_consumption_status("a", "nowhere"), client.reset_consumption(p, "unknown"),
    ]  # fmt: skip


@case("client")
def production_is_told(tq: Any, room: Room) -> Any:
    client, p = tq.get_client(), room.partition()
    client.put(rows(3), partition_id=p)
    found: list[Any] = [client.get_production_status(["mask"], p), client.check_production_status(FIELDS, p)]
    found += [client.get_production_status(["reward"], p), client.check_production_status(["reward"], p)]
    client.put(field("reward", 2), metadata=client.get_meta(["ids"], 2, p, task_name="a"))
    found += [client.get_production_status(["reward", "ids"], p), client.check_production_status(["reward"], p)]
    return [
        *found, client.get_production_status([], p), client.get_production_status(["ids"], "nowhere"),
        client.check_production_status(["ids"], "nowhere"), client.get_production_status(["ids", "unknown"], p),
    ]  # fmt: skip


@case("client")
def samples_and_partitions_are_cleared(tq: Any, room: Room) -> Any:
    client, p = tq.get_client(), room.partition()
    client.put(rows(4), partition_id=p)
    part = client.get_meta(FIELDS, 2, p, task_name="a")
    answers = [client.clear_samples(part), client.clear_samples(part)]
    status = [client.get_production_status(FIELDS, p), client.get_consumption_status("a", p)]
    gone = outcome(lambda: client.get_data(part))
    rest = client.get_meta(FIELDS, 99, p, mode="force_fetch")
    here = p in client.get_partition_list()
    answers += [client.clear_partition(p), p in client.get_partition_list(), client.clear_partition(p)]
    new = client.put(rows(2), partition_id=p)
    return [answers, status, gone, rest, here, outcome(lambda: client.get_data(rest)), new]


@case("client")
def cleared_rows_keep_other_partitions(tq: Any, room: Room) -> Any:
    client, p, q = tq.get_client(), room.partition(), room.partition()
    one, two = client.put(rows(2), partition_id=p), client.put(rows(2, 9), partition_id=q)
    both = tq.BatchMeta.concat([one, two])
    data = client.get_data(both)
    client.clear_samples(tq.BatchMeta.concat([one[0], two[1]]))
    left = [client.get_meta(FIELDS, 9, name, mode="force_fetch") for name in (p, q)]
    return [data, [client.get_data(meta) for meta in left], [meta.size for meta in left]]


@case("client")
def put_with_metadata_of_other_order(tq: Any, room: Room) -> Any:
    client, p = tq.get_client(), room.partition()
    meta = client.put(rows(4), partition_id=p)
    meta.reorder([3, 1, 0, 2])
    client.put(TensorDict({"x": torch.arange(4).view(4, 1)}, batch_size=4), metadata=meta)
    everything = client.get_meta(["ids", "x"], 4, p, task_name="a")
    return [client.get_data(everything), client.get_data(everything[1:3]), client.get_data(meta.select_fields(["ids"]))]


@case("client")
def custom_metadata_travels(tq: Any, room: Room) -> Any:
    client, p = tq.get_client(), room.partition()
    meta = client.put(rows(3), partition_id=p)
    meta.update_custom_meta([{"len": 1}, {"len": 2, "x": [1]}, {}])
    answer = client.set_custom_meta(meta)
    seen = client.get_meta(FIELDS, 3, p, task_name="a")
    seen.clear_custom_meta()
    seen.update_custom_meta([{"new": 1}, {}, {"new": 3}])
    client.put(field("r", 3), metadata=seen)
    client.set_custom_meta(tq.BatchMeta.empty())
    unknown = tq.BatchMeta([1], ["nowhere"], custom_meta=[{"a": 1}])
    return [answer, seen, client.get_meta(["r"], 3, p, task_name="b"), outcome(lambda: client.set_custom_meta(unknown))]


@case("client")
def keys_and_indexes(tq: Any, room: Room) -> Any:
    client, p = tq.get_client(), room.partition()
    missing = [client.kv_retrieve_meta("a", p), client.kv_retrieve_meta(["a"], p, create=False)]
    made = client.kv_retrieve_meta(["a", "b"], p, create=True)
    client.put(rows(2), metadata=made)
    again = client.kv_retrieve_meta(["b", "c", "a"], p)
    keys = client.kv_retrieve_keys(again.global_indexes, p)
    unkeyed = client.put(rows(1), partition_id=p)
    one = client.kv_retrieve_keys(made.global_indexes[0], p)
    return [
        missing, made, again, keys, one, client.kv_list(p), outcome(lambda: client.kv_retrieve_keys([99999], p)),
        outcome(lambda: client.kv_retrieve_keys([1], "nowhere")),
        outcome(lambda: client.kv_retrieve_keys(unkeyed.global_indexes, p)), sorted(client.kv_list("nowhere")),
    ]  # fmt: skip


@case("client")
def rows_of_keys_and_fetched_rows_are_the_same(tq: Any, room: Room) -> Any:
    client, p = tq.get_client(), room.partition()
    tq.kv_batch_put(names(4), p, fields=rows(4))
    meta = client.get_meta(["ids"], 3, p, task_name="a")
    client.put(field("reward", 3), metadata=meta)
    keys = client.kv_retrieve_keys(meta.global_indexes, p)
    return [keys, tq.kv_batch_get(keys, p), client.check_consumption_status("a", p)]


@case("client")
def nested_and_objects_through_metadata(tq: Any, room: Room) -> Any:
    client, p = tq.get_client(), room.partition()
    td = TensorDict(
        {"j": jagged(2, 1, 3), "text": NonTensorStack("x", "yy", "zzz"), "n": torch.arange(3)}, batch_size=3
    )
    made = client.put(td, partition_id=p)
    meta = client.get_meta(["j", "text", "n"], 2, p, task_name="a")
    return [
        made,
        meta,
        client.get_data(meta),
        client.get_data(meta.select_fields(["text"])),
        list(map(list, meta.get_shapes("j"))),
    ]


@case("client")
def fields_in_the_order_of_first_writing(tq: Any, room: Room) -> Any:
    client, p = tq.get_client(), room.partition()
    meta = client.put(TensorDict({"z": torch.ones(2, 1), "a": torch.ones(2, 1)}, batch_size=2), partition_id=p)
    client.put(field("m", 1), metadata=meta[0])
    return [client.get_production_status(["a", "m", "z"], p), client.get_meta(["z", "m", "a"], 1, p, task_name="t")]


@case("client")
def everything_of_the_client_has_an_async_form(tq: Any, room: Room) -> Any:
    client, p = tq.get_client(), room.partition()

    async def go() -> Any:
        made = await client.async_put(rows(4), partition_id=p)
        meta = await client.async_get_meta(FIELDS, 2, p, task_name="a")
        data = await client.async_get_data(meta)
        meta.update_custom_meta([{"a": 1}, {}])
        await client.async_set_custom_meta(meta)
        told = [
            await client.async_get_consumption_status("a", p), await client.async_check_consumption_status("a", p),
            await client.async_get_production_status(FIELDS, p), await client.async_check_production_status(FIELDS, p),
            await client.async_reset_consumption(p), p in await client.async_get_partition_list(),
        ]  # fmt: skip
        keyed = await client.async_kv_retrieve_meta(["a"], p, create=True)
        keys = await client.async_kv_retrieve_keys(keyed.global_indexes, p)
        listed = await client.async_kv_list(p)
        await client.async_clear_samples(meta)
        left = await client.async_get_meta(["ids"], 9, p, mode="force_fetch")
        await client.async_clear_partition(p)
        return [made, meta, data, told, keyed, keys, listed, left, p in await client.async_get_partition_list()]

    return asyncio.run(go())


@case("client")
def indexes_are_given_in_order_and_used_again(tq: Any, room: Room) -> Any:
    client, p, q = tq.get_client(), room.partition(), room.partition()
    first = client.put(rows(3), partition_id=p).global_indexes
    client.clear_partition(p)
    second = client.put(rows(2), partition_id=q).global_indexes
    return [first, second]


@case("polling")
def polling_gives_nothing_instead_of_waiting(tq: Any, room: Room) -> Any:
    client, p = tq.get_client(), room.partition()
    client.put(rows(3), partition_id=p)
    return [
        client.get_meta(FIELDS, 4, p, task_name="a"), client.get_meta(FIELDS, 2, p, task_name="a"),
        client.get_meta(FIELDS, 2, p, task_name="a"), client.get_meta(FIELDS, 1, "nowhere", task_name="a"),
    ]  # fmt: skip


@case("prealloc")
def rows_counted_before_they_come(tq: Any, room: Room) -> Any:
    client, p = tq.get_client(), room.partition()
    client.put(rows(2), partition_id=p)
    found: list[Any] = [client.get_consumption_status("a", p), client.get_production_status(FIELDS, p)]
    client.get_meta(FIELDS, 2, p, task_name="a")
    found += [client.check_consumption_status("a", p), client.check_production_status(FIELDS, p)]
    client.put(rows(2, 5), partition_id=p)
    client.get_meta(FIELDS, 2, p, task_name="a")
    found += [client.check_consumption_status("a", p), client.check_production_status(FIELDS, p)]
    more = client.put(rows(1), partition_id=p)
    return [*found, more, client.get_consumption_status("a", p)]

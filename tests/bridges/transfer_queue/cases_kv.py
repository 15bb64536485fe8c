"""Cases of the key-value interface: put, get, list, clear, tags, fields of every kind, and errors."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

from tests.bridges.transfer_queue.cases import Room, Thing, case, jagged, names, outcome, rows


@case("kv")
def put_a_dict_and_get_it(tq: Any, room: Room) -> Any:
    p = room.partition()
    value = {
        "ids": torch.arange(4), "text": "hello", "number": 7, "matrix": torch.ones(2, 3), "nothing": None,
        "half": torch.ones(2, dtype=torch.bfloat16), "scalar": torch.tensor(3.5), "flag": torch.tensor([True]),
    }  # fmt: skip
    made = tq.kv_put("one", p, fields=value, tag={"score": 0.5, "status": "new"})
    return [made, tq.kv_batch_get("one", p), tq.kv_batch_get(["one"], p, select_fields="text"), tq.kv_list(p)]


@case("kv")
def put_a_tensordict_of_one_row(tq: Any, room: Room) -> Any:
    p = room.partition()
    made = tq.kv_put("one", p, fields=rows(1))
    return [made, tq.kv_batch_get("one", p)]


@case("kv")
def put_tag_alone_then_fields(tq: Any, room: Room) -> Any:
    p = room.partition()
    first = tq.kv_put("one", p, tag={"status": "waiting", "n": 1})
    early = outcome(lambda: tq.kv_batch_get("one", p))
    second = tq.kv_put("one", p, fields={"x": torch.ones(2)})
    third = tq.kv_put("one", p, tag={"status": "done"})
    return [first, early, second, third, tq.kv_list(p), tq.kv_batch_get("one", p)]


@case("refusals")
def put_refuses(tq: Any, room: Room) -> Any:
    p = room.partition()
    return [
        outcome(lambda: tq.kv_put("one", p)),
        outcome(lambda: tq.kv_put("one", p, fields={"x": jagged(1, 2)})),
        outcome(lambda: tq.kv_put("one", p, fields=[1])),
        outcome(lambda: tq.kv_put(1, p, tag={})),
        outcome(lambda: tq.kv_put("two", p, fields=rows(2))),
        outcome(lambda: tq.kv_batch_put(["a", "b"], p)),
        outcome(lambda: tq.kv_batch_put(["a", "b"], p, fields=rows(3))),
        outcome(lambda: tq.kv_batch_put(["a", "b"], p, tags=[{}])),
        outcome(lambda: tq.kv_batch_put([], p, tags=[])),
        outcome(lambda: tq.kv_batch_put(["a", 5], p, tags=[{}, {}])),
        outcome(lambda: tq.kv_batch_put(("a", "b"), p, tags=[{}, {}])),
        outcome(lambda: tq.kv_batch_put(["a", "a"], p, tags=[{}, {}])),
    ]  # fmt: skip


@case("kv")
def put_many_and_get_some(tq: Any, room: Room) -> Any:
    p = room.partition()
    made = tq.kv_batch_put(names(6), p, fields=rows(6), tags=[{"i": i} for i in range(6)])
    return [
        made, tq.kv_batch_get(names(6), p), tq.kv_batch_get(["key4", "key1"], p), tq.kv_batch_get("key2", p, "mask"),
        tq.kv_batch_get(["key5", "key5"], p), tq.kv_batch_get(["key0", "nobody", "key3"], p, ["ids"]),
    ]  # fmt: skip


@case("refusals")
def get_refuses(tq: Any, room: Room) -> Any:
    p = room.partition()
    tq.kv_batch_put(names(2), p, fields=rows(2))
    return [
        outcome(lambda: tq.kv_batch_get("nobody", p)), outcome(lambda: tq.kv_batch_get("key0", "no such partition")),
        outcome(lambda: tq.kv_batch_get([], p)), outcome(lambda: tq.kv_batch_get(5, p)),
        outcome(lambda: tq.kv_batch_get([5], p)), outcome(lambda: tq.kv_batch_get("key0", p, select_fields="nope")),
        outcome(lambda: tq.kv_batch_get("key0", p, select_fields=["ids", "nope"])),
        outcome(lambda: tq.kv_batch_get("key0", p, select_fields=[])),
    ]  # fmt: skip


@case("kv")
def get_gives_the_fields_that_all_keys_have(tq: Any, room: Room) -> Any:
    p = room.partition()
    tq.kv_batch_put(names(3), p, fields=rows(3))
    more = tq.kv_batch_put(["key1", "key2"], p, fields=TensorDict({"reward": torch.ones(2, 1)}, batch_size=2))
    lonely = tq.kv_batch_put(["lonely"], p, fields=TensorDict({"other": torch.ones(1, 1)}, batch_size=1))
    return [
        more, lonely, tq.kv_batch_get(names(3), p), tq.kv_batch_get(["key2", "key1"], p),
        outcome(lambda: tq.kv_batch_get(["key0", "lonely"], p)),
        outcome(lambda: tq.kv_batch_get(names(3), p, select_fields="reward")),
        outcome(lambda: tq.kv_batch_get(names(3), p, select_fields=["ids", "reward"])),
    ]  # fmt: skip


@case("kv")
def put_again_replaces(tq: Any, room: Room) -> Any:
    p = room.partition()
    tq.kv_batch_put(names(4), p, fields=rows(4), tags=[{"v": 1, "w": 1}] * 4)
    again = tq.kv_batch_put(["key3", "key1", "new"], p, fields=rows(3, 50), tags=[{"v": 2}] * 3)
    return [again, tq.kv_batch_get([*names(4), "new"], p), tq.kv_list(p)]


@case("kv")
def rows_of_other_shapes_join_a_field(tq: Any, room: Room) -> Any:
    p = room.partition()
    first = tq.kv_batch_put(["a", "b"], p, fields=TensorDict({"x": torch.ones(2, 3)}, batch_size=2))
    second = tq.kv_batch_put(["c"], p, fields=TensorDict({"x": torch.ones(1, 5)}, batch_size=1))
    third = tq.kv_batch_put(["d", "e"], p, fields=TensorDict({"x": jagged(2, 7)}, batch_size=2))
    client = tq.get_client()
    metas = [client.kv_retrieve_meta(keys, p) for keys in (["a", "b"], ["a", "c"], ["e", "a", "d"])]
    tq.kv_clear(["c", "d", "e"], p)
    return [first, second, third, metas, client.kv_retrieve_meta(["a", "b"], p), tq.kv_batch_get(["a", "b"], p)]


@case("kv")
def tensors_of_many_kinds(tq: Any, room: Room) -> Any:
    p = room.partition()
    td = TensorDict(
        {
            "one_dimension": torch.arange(3), "empty": torch.zeros(3, 0), "deep": torch.arange(24).view(3, 2, 2, 2),
            "jagged": jagged(1, 4, 2), "jagged_ints": jagged(3, 3, 3, dtype=torch.int32),
            "bf16": torch.ones(3, 2, dtype=torch.bfloat16), "f16": torch.ones(3, 2, dtype=torch.float16),
            "f64": torch.ones(3, 2, dtype=torch.float64), "bool": torch.tensor([[True], [False], [True]]),
            "i8": torch.ones(3, 1, dtype=torch.int8), "u8": torch.ones(3, 1, dtype=torch.uint8),
            "columns": torch.arange(12).view(4, 3).T, "tail": jagged_with_tail(),
            "strided": torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(3, 4), torch.ones(2, 2)]),
        },
        batch_size=3,
    )  # fmt: skip
    made = tq.kv_batch_put(names(3), p, fields=td)
    return [made, tq.kv_batch_get(names(3), p), tq.kv_batch_get("key1", p), tq.get_client().kv_retrieve_meta("key2", p)]


def jagged_with_tail() -> torch.Tensor:
    parts = [torch.arange(n * 2).view(n, 2).float() for n in (2, 1, 3)]
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


@case("kv")
def objects_of_many_kinds(tq: Any, room: Room) -> Any:
    p = room.partition()
    td = TensorDict(
        {
            "text": NonTensorStack("a", "", "żółw"), "numbers": NonTensorStack(1, 2, 3),
            "mixed": NonTensorStack("a", 1, 2.5), "dicts": NonTensorStack({"a": 1}, {"b": [1, 2]}, {}),
            "things": NonTensorStack(Thing(1), Thing(2), Thing(3)),
        },
        batch_size=3,
    )  # fmt: skip
    made = tq.kv_batch_put(names(3), p, fields=td)
    got = tq.kv_batch_get(names(3), p)
    return [made, got, tq.kv_batch_get("key1", p), tq.get_client().kv_retrieve_meta("key2", p)]


@case("kv")
def objects_given_one_by_one(tq: Any, room: Room) -> Any:
    p = room.partition()
    values = {
        "list": [1, "a"],
        "dict": {"k": (1, 2)},
        "array": np.arange(3),
        "thing": Thing(4),
        "text": "x",
        "no": None,
    }
    made = tq.kv_put("one", p, fields=values)
    return [made, tq.kv_batch_get("one", p)]


@case("kv")
def got_tensors_are_the_callers_own(tq: Any, room: Room) -> Any:
    p = room.partition()
    given = rows(2)
    tq.kv_batch_put(names(2), p, fields=given)
    given["ids"].zero_()
    one = tq.kv_batch_get(names(2), p)
    first = one["ids"].unbind()[0].clone()
    one["ids"].unbind()[0].add_(100)
    return [first, tq.kv_batch_get(names(2), p)]


@case("kv")
def tags_of_many_kinds(tq: Any, room: Room) -> Any:
    p = room.partition()
    tag = {
        "int": 1, "float": 0.1, "text": "a", "none": None, "list": [1, [2]], "tuple": (1, 2), "dict": {"a": {"b": 1}},
        "bool": True, "array": np.arange(2), "tensor": torch.ones(2), "thing": Thing(3),
    }  # fmt: skip
    made = tq.kv_put("one", p, tag=tag)
    return [made, tq.kv_list(p)]


@case("kv")
def list_one_all_and_none(tq: Any, room: Room) -> Any:
    p, q = room.partition(), room.partition()
    tq.kv_batch_put(["b", "a"], p, tags=[{"x": 1}, {}])
    tq.kv_put("z", q, fields={"x": torch.ones(1)})
    everything = tq.kv_list()
    return [list(tq.kv_list(p)[p].items()), tq.kv_list("none"), {k: everything[k] for k in (p, q)}]


@case("kv")
def clear_some_and_all(tq: Any, room: Room) -> Any:
    p = room.partition()
    tq.kv_batch_put(names(4), p, fields=rows(4), tags=[{"i": i} for i in range(4)])
    answers = [tq.kv_clear("key1", p), tq.kv_clear(["key0", "nobody"], p), tq.kv_list(p)]
    gone = outcome(lambda: tq.kv_batch_get("key1", p))
    left = tq.kv_batch_get(["key0", "key1", "key2", "key3"], p)
    tq.kv_clear(["key2", "key3"], p)
    tq.kv_clear(["key2", "key3"], p)
    again = tq.kv_put("key1", p, fields={"y": torch.ones(1)})
    return [
        answers, gone, left, again, tq.kv_list(p), tq.kv_batch_get("key1", p),
        outcome(lambda: tq.kv_clear("a", "none")),
        outcome(lambda: tq.kv_clear([], p)), outcome(lambda: tq.kv_clear(5, p)),
    ]  # fmt: skip


@case("kv")
def cleared_indexes_are_used_again_without_leaks(tq: Any, room: Room) -> Any:
    p, q = room.partition(), room.partition()
    tq.kv_batch_put(names(3), p, fields=rows(3), tags=[{"old": True}] * 3)
    before = tq.get_client().kv_retrieve_meta(names(3), p).global_indexes
    tq.kv_clear(names(3), p)
    made = tq.kv_batch_put(names(3), q, fields=TensorDict({"x": torch.ones(3, 1)}, batch_size=3))
    after = tq.get_client().kv_retrieve_meta(names(3), q).global_indexes
    return [len(set(before) & set(after)), made, tq.kv_batch_get(names(3), q), tq.kv_list(p), tq.kv_list(q)]


@case("kv")
def get_by_meta(tq: Any, room: Room) -> Any:
    p = room.partition()
    meta = tq.kv_batch_put(names(4), p, fields=rows(4))
    tq.kv_batch_put(names(4), p, fields=TensorDict({"late": torch.ones(4, 1)}, batch_size=4))
    nothing = tq.KVBatchMeta(keys=["key0"], tags=[{}])
    unnamed = tq.KVBatchMeta(keys=["key0"], tags=[{}], partition_id=p)
    return [
        tq.kv_batch_get_by_meta(meta), tq.kv_batch_get_by_meta(meta.select_keys(["key3", "key0"]), "ids"),
        tq.kv_batch_get_by_meta(unnamed), outcome(lambda: tq.kv_batch_get_by_meta(nothing)),
        outcome(lambda: tq.kv_batch_get_by_meta(meta, ["late"])),
        outcome(lambda: tq.kv_batch_get_by_meta(unnamed, "ids")),
        [tq.kv_batch_get_by_meta(part) for part in meta.chunk(2)],
    ]  # fmt: skip


@case("kv")
def parse_on_the_way(tq: Any, room: Room) -> Any:
    p = room.partition()

    def double(fields: dict[str, Any]) -> dict[str, Any]:
        return {**fields, "ids": fields["ids"] * 2}

    def measure(fields: dict[str, Any]) -> dict[str, Any]:
        return {**fields, "path": [len(str(path)) for path in fields["path"]]}

    made = tq.kv_batch_put(names(3), p, fields=rows(3), data_parser=double)
    texts = TensorDict({"path": NonTensorStack("a", "bb", "ccc")}, batch_size=3)
    second = tq.kv_batch_put(names(3), p, fields=texts, data_parser=measure)
    third = tq.kv_put("key0", p, fields={"ids": torch.ones(3)}, data_parser=double)
    return [
        made, second, third, tq.kv_batch_get(["key1", "key2"], p),
        outcome(lambda: tq.kv_batch_put(["x"], p, fields=rows(1), data_parser=lambda f: None)),
        outcome(lambda: tq.kv_batch_put(["x"], p, fields=rows(1), data_parser=lambda f: {"other": f["ids"]})),
        outcome(lambda: tq.kv_batch_put(["x"], p, fields=rows(1), data_parser=lambda f: {**f, "ids": f["ids"][:0]})),
        outcome(lambda: tq.kv_batch_put(["x"], p, fields=rows(1), data_parser=lambda f: 1 / 0)),
        outcome(lambda: tq.kv_batch_put(["x"], p, fields=rows(1), data_parser=5)),
        outcome(lambda: tq.kv_batch_get("x", p)),
    ]  # fmt: skip


@case("kv")
def other_types_of_a_field_are_told(tq: Any, room: Room) -> Any:
    p = room.partition()
    tq.kv_batch_put(["a"], p, fields=TensorDict({"x": torch.ones(1, 2)}, batch_size=1))
    second = outcome(lambda: tq.kv_batch_put(["b"], p, fields=TensorDict({"x": torch.ones(1, 2).int()}, batch_size=1)))
    return [second, outcome(lambda: tq.kv_batch_get("a", p)), outcome(lambda: tq.kv_batch_get("b", p))]


@case("kv")
def everything_has_an_async_form(tq: Any, room: Room) -> Any:
    p = room.partition()

    async def go() -> Any:
        one = await tq.async_kv_put("one", p, fields={"x": torch.ones(2)}, tag={"a": 1})
        many = await tq.async_kv_batch_put(names(3), p, fields=rows(3))
        both = await asyncio.gather(
            tq.async_kv_batch_get("one", p), tq.async_kv_batch_get(names(3), p, select_fields=["ids"])
        )
        by_meta = await tq.async_kv_batch_get_by_meta(many, select_fields="mask")
        listed = await tq.async_kv_list(p)
        cleared = await tq.async_kv_clear(["key0", "one"], p)
        errors = []
        for call in (
            tq.async_kv_put("z", p), tq.async_kv_batch_put(["z"], p), tq.async_kv_batch_get("one", p),
            tq.async_kv_batch_get_by_meta(tq.KVBatchMeta()), tq.async_kv_clear([], p),
        ):  # fmt: skip
            try:
                errors.append(await call)
            except Exception as error:
                errors.append(type(error).__name__)
        return [one, many, both, by_meta, listed, cleared, errors, await tq.async_kv_list(p)]

    return asyncio.run(go())


@case("kv")
def many_at_once(tq: Any, room: Room) -> Any:
    """Writers of one event loop do not disturb one another."""
    p = room.partition()

    async def write(i: int) -> None:
        await tq.async_kv_batch_put(names(5, f"w{i}-"), p, fields=rows(5, 10 * i), tags=[{"writer": i}] * 5)

    async def go() -> None:
        await asyncio.gather(*(write(i) for i in range(8)))

    asyncio.run(go())
    listed = tq.kv_list(p)[p]
    return [sorted(listed.items()), [tq.kv_batch_get(names(5, f"w{i}-"), p) for i in range(8)]]


@case("small")
def more_samples_than_there_is_room_for(tq: Any, room: Room) -> Any:
    p = room.partition()
    tq.kv_batch_put(names(6), p, fields=rows(6))
    full = outcome(lambda: tq.kv_batch_put(names(20, "more"), p, fields=rows(20)))
    tq.kv_clear(names(6), p)
    return [full, tq.kv_batch_put(names(6, "again"), p, fields=rows(6)), tq.kv_batch_get("again3", p)]

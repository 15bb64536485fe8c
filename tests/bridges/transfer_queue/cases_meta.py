"""Cases of the metadata classes, which need no system."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

from tests.bridges.transfer_queue.cases import case, jagged, outcome, rows

SCHEMA = {
    "b": {"dtype": torch.float32, "shape": (4,), "is_nested": False, "is_non_tensor": False},
    "a": {
        "dtype": torch.int64, "shape": None, "is_nested": True, "is_non_tensor": False,
        "per_sample_shapes": [(1,), (2,), (3,)],
    },
}  # fmt: skip


def meta(tq: Any, n: int = 3, ready: bool = True, **given: Any) -> Any:
    usual = {
        "global_indexes": list(range(n)), "partition_ids": ["p"] * n,
        "field_schema": SCHEMA if n == 3 else {"b": SCHEMA["b"]},
        "production_status": np.ones(n, np.int8) if ready else None,
        "custom_meta": [{"score": i} for i in range(n)],
    }  # fmt: skip
    return tq.BatchMeta(**usual | given)


@case("none")
def batch_meta_checks_what_it_is_made_of(tq: Any, _: Any) -> Any:
    return [
        outcome(lambda: meta(tq, partition_ids=["p"])),
        outcome(lambda: meta(tq, production_status=np.ones(2, np.int8))),
        outcome(lambda: meta(tq, custom_meta=[{}])),
        outcome(lambda: meta(tq, _custom_backend_meta=[{}])),
        outcome(lambda: meta(tq, global_indexes=[1, 2], partition_ids=["p", "p"], custom_meta=None)),
    ]


@case("none")
def batch_meta_tells_of_itself(tq: Any, _: Any) -> Any:
    one, fresh, none = meta(tq), meta(tq, ready=False), tq.BatchMeta.empty({"x": 1})
    return [
        one, fresh, none, len(one), one.field_names, str(one), str(none), one.get_dtypes("a"), one.get_shapes("a"),
        one.get_shapes("b"), outcome(lambda: one.get_dtypes("c")), outcome(lambda: one.get_shapes("c")), bool(none),
    ]  # fmt: skip


@case("none")
def batch_meta_shows_its_samples(tq: Any, _: Any) -> Any:
    samples = meta(tq).samples

    def write() -> None:
        samples[0].custom_meta["score"] = 5

    def write_field() -> None:
        samples[0].fields["a"]["shape"] = 5

    one = samples[1]
    return [
        len(samples), [s.global_index for s in samples], one.partition_id, one.production_status, one.custom_meta,
        one.fields, outcome(write), outcome(write_field), outcome(lambda: samples[7].global_index),
    ]  # fmt: skip


@case("none")
def batch_meta_keeps_extra_information(tq: Any, _: Any) -> Any:
    one = meta(tq, extra_info={"a": [1]})
    one.set_extra_info("b", 2)
    one.update_extra_info({"c": 3, "a": [2]})
    copy = one.get_all_extra_info()
    copy["a"].append(5)
    found = [one.get_extra_info("a"), one.get_extra_info("z"), one.get_extra_info("z", 4), one.has_extra_info("c")]
    removed = [one.remove_extra_info("c"), one.remove_extra_info("c"), one.has_extra_info("c")]
    one.clear_extra_info()
    return [found, removed, one.extra_info]


@case("none")
def batch_meta_keeps_custom_metadata(tq: Any, _: Any) -> Any:
    one = meta(tq)
    one.update_custom_meta([{"x": 1}, {"score": 9}, {}])
    all_of_it = one.get_all_custom_meta()
    all_of_it[0]["x"] = 7
    one.update_custom_meta(None)
    errors = [outcome(lambda: one.update_custom_meta([{}]))]
    before = one.get_all_custom_meta()
    one.clear_custom_meta()
    return [before, errors, one.custom_meta]


@case("none")
def batch_meta_adds_fields(tq: Any, _: Any) -> Any:
    one = meta(tq, 2, ready=False)
    data = rows(2, flat=torch.ones(2), jag=jagged(2, 3), text=NonTensorStack("a", "b"))
    same = one.add_fields(data) is one
    waiting = meta(tq, 2, ready=False).add_fields(rows(2), set_all_ready=False)
    empty = meta(tq, 2, ready=False).add_fields(TensorDict({}, batch_size=0))
    return [same, one, waiting, empty, outcome(lambda: one.add_fields(rows(3)))]


@case("none")
def batch_meta_selects(tq: Any, _: Any) -> Any:
    one = meta(tq, extra_info={"k": [1]})
    part = one.select_samples([2, 0])
    part.custom_meta[0]["score"] = 50
    fields = one.select_fields(["a", "zzz"])
    return [
        part, fields, one, one[1], one[-1], one[0:2], one[::2], one[np.int64(1)], one.select_samples([]),
        outcome(lambda: one.select_samples([3])), outcome(lambda: one.select_samples([-1])),
        outcome(lambda: one[3]), outcome(lambda: one[-4]), outcome(lambda: one["a"]),
    ]  # fmt: skip


@case("none")
def batch_meta_copies_deeply(tq: Any, _: Any) -> Any:
    one = meta(tq)
    two = one.copy()
    two.global_indexes[0], two.custom_meta[0]["score"] = 9, 9
    two.field_schema["b"]["shape"], two.production_status[0] = (1,), 0
    return [one, two]


@case("none")
def batch_meta_splits(tq: Any, _: Any) -> Any:
    one = meta(tq, 5, partition_ids=["p", "q", "p", "q", "r"])
    return [one.chunk(2), [c.size for c in one.chunk(7)], one.chunk_by_partition(), meta(tq).chunk(2)]


@case("none")
def batch_meta_unites(tq: Any, _: Any) -> Any:
    one = meta(tq, extra_info={"a": 1})
    two = meta(tq, ready=False, field_schema={"c": SCHEMA["b"]}, custom_meta=[{"x": 1}, {"score": 8}, {}])
    none = tq.BatchMeta.empty()
    return [
        one.union(two), one.union(none), none.union(one), outcome(lambda: one.union(meta(tq, 2))),
        outcome(lambda: one.union(meta(tq, partition_ids=["q"] * 3))),
    ]  # fmt: skip


@case("none")
def batch_meta_joins(tq: Any, _: Any) -> Any:
    one, two = meta(tq, extra_info={"a": 1}), meta(tq, extra_info={"a": 1, "b": torch.ones(2)})
    plain_a = {"b": SCHEMA["b"], "a": {**SCHEMA["b"], "dtype": torch.int64}}
    mixed = tq.BatchMeta.concat([meta(tq), meta(tq, field_schema=plain_a)])
    other_type = meta(tq, field_schema={"a": SCHEMA["a"], "b": {**SCHEMA["b"], "dtype": torch.int8}})
    return [
        tq.BatchMeta.concat([one, two]), mixed, tq.BatchMeta.concat([]), tq.BatchMeta.concat([tq.BatchMeta.empty()]),
        outcome(lambda: tq.BatchMeta.concat([one, meta(tq, 2)])),
        outcome(lambda: tq.BatchMeta.concat([one, meta(tq, 2)], validate=False)),
        outcome(lambda: tq.BatchMeta.concat([one, other_type])),
        outcome(lambda: tq.BatchMeta.concat([one, meta(tq, extra_info={"a": 2})])),
        outcome(lambda: tq.BatchMeta.concat([two, meta(tq, extra_info={"b": torch.zeros(2)})])),
    ]  # fmt: skip


@case("none")
def batch_meta_reorders_in_place(tq: Any, _: Any) -> Any:
    one = meta(tq)
    answer = one.reorder([2, 0, 1])
    return [
        answer, one, outcome(lambda: one.reorder([0])), outcome(lambda: one.reorder([0, 0, 1])),
        outcome(lambda: one.reorder([0, 1, 5])), pickle.loads(pickle.dumps(one)),
    ]  # fmt: skip


def kv(tq: Any, n: int = 5, **given: Any) -> Any:
    usual = {
        "keys": [f"k{i}" for i in range(n)], "tags": [{"t": [i]} for i in range(n)], "partition_id": "p",
        "fields": ["a", "b"], "extra_info": {"x": 1},
    }  # fmt: skip
    return tq.KVBatchMeta(**usual | given)


@case("none")
def kv_batch_meta_checks_and_tells(tq: Any, _: Any) -> Any:
    tags = [{"t": [1]}]
    one = kv(tq, 1, tags=tags)
    tags[0]["t"].append(2)
    return [
        one, kv(tq), tq.KVBatchMeta(), len(kv(tq)), str(kv(tq)), pickle.loads(pickle.dumps(kv(tq))),
        outcome(lambda: kv(tq, tags=[])), outcome(lambda: kv(tq, keys=["a"] * 5)),
        outcome(lambda: kv(tq, fields=["a", "a"])), kv(tq) == kv(tq),
    ]  # fmt: skip


@case("none")
def kv_batch_meta_selects_splits_and_joins(tq: Any, _: Any) -> Any:
    one = kv(tq)
    one.reorder([4, 3, 2, 1, 0])
    join = tq.KVBatchMeta.concat
    array = {"m": np.ones(2)}
    return [
        one, one.select_keys(["k1", "k4"]), one.chunk(2), [c.size for c in one.chunk(6)], join(one.chunk(3)),
        join([]), join([kv(tq, 0)]), join([kv(tq, extra_info=array), kv(tq, 2, keys=["x", "y"], extra_info=array)]),
        join([kv(tq, 2), kv(tq, 1, keys=["z"], fields=["b", "a"], extra_info=None)]),
        outcome(lambda: one.select_keys(["k1", "k1"])), outcome(lambda: one.select_keys(["nope"])),
        outcome(lambda: one.reorder([0])), outcome(lambda: one.reorder([0, 0, 1, 2, 3])),
        outcome(lambda: join([kv(tq, 1), kv(tq, 1, keys=["z"], fields=["a"])])),
        outcome(lambda: join([kv(tq, 1), kv(tq, 1, keys=["z"], partition_id="q")])),
        outcome(lambda: join([kv(tq, 1), kv(tq, 1, keys=["z"], extra_info={"x": 2})])),
        outcome(lambda: join([kv(tq, 1), kv(tq, 1)])),
    ]  # fmt: skip

"""Memory for what is read: used again, never shared."""

from __future__ import annotations

import gc
import threading

import torch

from tidemill.bridges.transfer_queue.memory import STEP_BYTES, Pool


def test_a_buffer_is_lent_again_when_its_last_tensor_is_gone() -> None:
    pool = Pool()
    tensor = torch.from_numpy(pool.lend(3_000_000)).view(torch.float32)
    part = tensor.fill_(1.0)[10:20].clone(), tensor[5:]
    where = tensor.untyped_storage().data_ptr()
    del tensor
    gc.collect()
    other = torch.from_numpy(pool.lend(3_000_000)).view(torch.float32)
    assert other.untyped_storage().data_ptr() != where and bool((part[1] == 1).all())
    del part
    gc.collect()
    assert pool.held_bytes == 2 * STEP_BYTES
    assert torch.from_numpy(pool.lend(2_500_000)).untyped_storage().data_ptr() == where and pool.held_bytes == 0


def test_no_more_is_kept_than_allowed_and_the_size_asked_for_longest_ago_goes_first() -> None:
    pool = Pool(kept_bytes=3 * STEP_BYTES)
    old, new = pool.lend(2 * STEP_BYTES), pool.lend(STEP_BYTES)
    del old
    del new
    assert pool.held_bytes == 3 * STEP_BYTES
    again = pool.lend(2 * STEP_BYTES)
    big = pool.lend(3 * STEP_BYTES)
    del again
    del big
    gc.collect()
    assert pool.held_bytes == 3 * STEP_BYTES and list(pool._free) == [3 * STEP_BYTES]


def test_small_ones_are_left_to_malloc_and_many_threads_lend_at_once() -> None:
    pool = Pool()
    pool.lend(100)

    def lend() -> None:
        for i in range(200):
            loan = pool.lend(STEP_BYTES * (1 + i % 2))
            loan[0] = i % 251
            assert loan[0] == i % 251

    threads = [threading.Thread(target=lend) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.held_bytes == sum(size * len(free) for size, free in pool._free.items())

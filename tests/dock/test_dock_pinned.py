"""Batches gathered into page-locked memory, where there is a device to read it."""

import numpy as np
import pytest

from tidemill.batch import Batch
from tidemill.dock import LocalDock, PackedBuffer, Want
from tidemill.graph import Stage

torch = pytest.importorskip("torch")


def filled_dock(rows=256, width=4096) -> LocalDock:
    dock = LocalDock((Stage("learn", "actor", ("x",)),))
    ids = np.arange(rows)
    for part in np.split(ids, 4):  # four chunks, so that a view cannot serve
        x = np.repeat(part[:, None], width, 1).astype(np.float32)
        dock.put(Batch({"id": part, "group": part, "x": x}))
    return dock


def test_a_packed_batch_is_the_batch():
    lease = filled_dock().take("learn", Want(rows=256))
    packed = lease.packed(PackedBuffer())
    assert np.array_equal(packed.values("x"), lease.batch.values("x"))


@pytest.mark.gpu
def test_with_a_device_the_buffer_is_page_locked_and_reused():
    if not torch.accelerator.is_available():
        pytest.skip("needs an accelerator")
    buffer = PackedBuffer()
    assert buffer.pinned
    lease = filled_dock().take("learn", Want(rows=256))
    tensor = torch.from_numpy(lease.packed(buffer).values("x"))
    assert tensor.is_pinned()
    device = torch.accelerator.current_accelerator()
    moved = tensor.to(device, non_blocking=True)
    torch.accelerator.synchronize()
    assert np.array_equal(moved.cpu().numpy(), lease.batch.values("x"))
    again = torch.from_numpy(lease.packed(buffer).values("x"))
    assert again.data_ptr() == tensor.data_ptr()

"""Shared memory of the weight flow is taken from nobody but the ranks that hold the link's secret."""

from __future__ import annotations

import json
import os
import pickle
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.hostile import strangers
from tidemill.errors import ReshardError
from tidemill.reshard.wires import segment
from tidemill.reshard.wires.handle import DeviceHandle, _from_plain
from tidemill.reshard.wires.one_node import SharedWire

SIZE = 1 << 13

# Waits for a name of ours in the shared memory, and puts what looks like another rank's beside it, ready to be opened.
FORGE = r"""
import os, select, struct, sys
made = []
while not select.select([sys.stdin], [], [], 0.001)[0]:
    for name in os.listdir("/dev/shm"):
        if not name.startswith("tidemill-") or name in made:
            continue
        for other in (name[:-1] + "1", name + "-1", name[:-2] + "-1"):
            if other in os.listdir("/dev/shm"):
                continue
            with open("/dev/shm/" + other, "wb") as file:
                file.write(struct.pack("<qq", 2, os.getppid()) + bytes(SIZE))
            os.chmod("/dev/shm/" + other, 0o666)
            os.truncate("/dev/shm/" + other, os.stat("/dev/shm/" + name).st_size)
            made.append(other)
print(len(made))
for name in made:
    os.unlink("/dev/shm/" + name)
""".replace("SIZE", str(SIZE))


@pytest.fixture
def token() -> Iterator[str]:
    made = secrets.token_hex(16)
    yield made
    for rank in range(2):
        segment._path(made, rank).unlink(missing_ok=True)


def opened(token: str, rank: int, within_s: float = 0.3) -> Any:
    return segment.attached(token, rank, SIZE, time.monotonic() + within_s)


@strangers.needs_root
def test_what_another_user_puts_beside_a_ring_is_not_taken_for_a_rank(token: str) -> None:
    forger = strangers.start(FORGE)
    with pytest.raises(ReshardError, match="in time"):
        SharedWire(token, 0, 2, bucket_bytes=1 << 12, timeout_s=2.0)
    assert int(strangers.told(forger)) > 0, "nothing was forged"


@strangers.needs_root
def test_a_segment_of_another_user_is_refused_even_under_the_right_name(token: str) -> None:
    path = segment._path(token, 1)
    strangers.told(strangers.start(f"import os; os.truncate(os.open({str(path)!r}, os.O_CREAT | os.O_RDWR), {SIZE})"))
    path.chmod(0o600)
    try:
        with pytest.raises(ReshardError, match="not this user's alone"):
            opened(token, 1)
        with pytest.raises(ReshardError, match="exists"), segment.created(token, 1, SIZE):
            pass
    finally:
        path.unlink(missing_ok=True)


@strangers.needs_root
def test_another_user_can_neither_read_a_ring_nor_learn_the_secret_from_its_name(token: str) -> None:
    with segment.created(token, 0, SIZE):
        path = segment._path(token, 0)
        assert token not in path.name and path.exists()
        code = f"import os\ntry: os.open({str(path)!r}, os.O_RDONLY)\nexcept PermissionError: print('refused')"
        assert strangers.told(strangers.start(code)).strip() == "refused"


def test_a_segment_that_others_may_write_is_refused(token: str) -> None:
    with segment.created(token, 1, SIZE):
        segment._path(token, 1).chmod(0o666)
        with pytest.raises(ReshardError, match="not this user's alone"):
            opened(token, 1)


def test_a_link_to_a_file_of_ours_is_refused(token: str, tmp_path: Path) -> None:
    (tmp_path / "own").write_bytes(bytes(SIZE))
    (tmp_path / "own").chmod(0o600)
    segment._path(token, 1).symlink_to(tmp_path / "own")
    with pytest.raises(ReshardError, match="not this user's alone"):
        opened(token, 1)


def test_a_seal_of_another_secret_or_of_another_rank_is_refused(token: str) -> None:
    with segment.created(token, 1, SIZE) as made:
        segment.seal(made, 64, token, 1, b"handle")
        seen = opened(token, 1)
        assert segment.unsealed(seen, 64, token, 1) == b"handle"
        for other, rank in ((secrets.token_hex(16), 1), (token, 0)):
            with pytest.raises(ReshardError, match="not made by a rank of this link"):
                segment.unsealed(seen, 64, other, rank)
        made[64 + 40] ^= 1
        with pytest.raises(ReshardError, match="not made by a rank of this link"):
            segment.unsealed(seen, 64, token, 1)


def test_no_name_is_left_when_a_wire_is_open_or_could_not_be_opened(token: str) -> None:
    before = set(segment._folder().glob("tidemill-ring-*"))
    ranks: list[SharedWire] = []
    open_both = [threading.Thread(target=lambda r=r: ranks.append(SharedWire(token, r, 2))) for r in range(2)]
    for thread in open_both:
        thread.start()
    for thread in open_both:
        thread.join()
    assert len(ranks) == 2 and set(segment._folder().glob("tidemill-ring-*")) <= before
    with pytest.raises(ReshardError, match="in time"):
        SharedWire(secrets.token_hex(16), 0, 2, timeout_s=0.1)
    assert set(segment._folder().glob("tidemill-ring-*")) <= before


def test_what_a_killed_rank_left_is_removed_and_nothing_else(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left = segment._path(token, 0)
    left.write_bytes(bytes(SIZE))
    other = left.with_name("tidemill-ring-not-one-of-ours")
    other.write_bytes(b"")
    try:
        assert left not in segment.remove_orphans()  # too young: its maker may be about to lock it
        monkeypatch.setattr(segment, "ORPHAN_S", -1.0)
        with segment.created(token, 1, SIZE):
            assert left in segment.remove_orphans()
            assert segment._path(token, 1).exists(), "one whose maker lives was removed"
        assert not left.exists() and other.exists()
    finally:
        left.unlink(missing_ok=True)
        other.unlink(missing_ok=True)


class Mark:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_pickle_in_place_of_a_device_handle_is_not_read(tmp_path: Path) -> None:
    handle = DeviceHandle(torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(ValueError):  # it is no JSON
        handle.open(pickle.dumps(Mark(tmp_path / "mark")))
    assert not (tmp_path / "mark").exists()


def test_fields_of_a_device_handle_keep_their_kinds() -> None:
    for field in (7, True, b"\0handle\xff", None):
        plain = json.loads(json.dumps({"bytes": field.hex()} if isinstance(field, bytes) else field))
        assert _from_plain(plain, field) == field
    for field, own in ((7, b"x"), ("text", b"x"), (True, 1), ({"bytes": "00"}, 3)):
        with pytest.raises(ReshardError, match="device handle"):
            _from_plain(field, own)


def test_a_ring_is_still_shared_memory() -> None:
    token = secrets.token_hex(16)
    ranks: dict[int, SharedWire] = {}

    def opening(rank: int) -> None:
        ranks[rank] = SharedWire(token, rank, 2, bucket_bytes=1 << 12)

    threads = [threading.Thread(target=opening, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ranks[0]._rings[0][:4] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    assert np.array_equal(ranks[1]._rings[0][:4].numpy(), [1, 2, 3, 4])

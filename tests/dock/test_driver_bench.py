"""The driver's benchmark in small: every sample gets through once, and none through the driver."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


def test_a_driver_touches_no_sample_and_every_sample_gets_through_once():
    import driver

    result = driver.drive(workers=3, samples_per_s=300, seconds=1.5, settle_s=0.5)
    assert result["driver_sample_bytes"] == 0 and not result["driver_maps_segments"]
    assert result["worker_bytes"]["written"] > 100_000
    assert result["put"] == result["learned"] == result["learned_by_the_ledger"] > 0
    assert result["left_in_the_dock"] == 0 and not result["failed_workers"]


def test_who_writes_and_reads_samples_counts_their_bytes(tmp_path):
    from tests.dock.test_dock_remote import LEARN, rows

    from tidemill.dock import Want
    from tidemill.dock.server import DockServer
    from tidemill.dock.setup import DockSetup

    with DockServer(DockSetup(LEARN), tmp_path) as server:
        writer, reader, looker = server.connect(), server.connect(), server.connect()
        writer.put(rows([1, 2]))
        reader.take("learn", Want(rows=2), wait=30).commit()
        looker.state()
        assert writer.written_bytes == reader.read_bytes > 2 * 16
        assert (writer.read_bytes, reader.written_bytes, looker.written_bytes, looker.read_bytes) == (0, 0, 0, 0)
        for dock in (writer, reader, looker):
            dock.close()

"""Topologies: which link joins two devices, what a description may say, and what this machine says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tidemill.errors import ConfigError
from tidemill.topology import describe, discover
from tidemill.topology.tree import KINDS, LEVELS, Level, Link, Topology

PLAIN: dict[str, Any] = {
    "name": "two super-nodes",
    "device": "910C",
    "levels": [
        {"level": "socket", "holds": 2, "link": "hccs"},
        {"level": "node", "holds": 2, "link": {"kind": "hccs", "gb_per_s": 150}},
        {"level": "supernode", "holds": 3, "link": {"kind": "ub", "gb_per_s": 100, "us": 2}},
        {"level": "pod", "holds": 2, "link": "roce200"},
    ],
}


def changed(path: str, value: Any) -> dict[str, Any]:
    plain = yaml.safe_load(yaml.safe_dump(PLAIN))
    *outer, last = path.split(".")
    inner = plain
    for key in outer:
        inner = inner[int(key)] if key.isdigit() else inner[key]
    inner[last] = value
    return dict(plain)


def test_two_devices_meet_at_the_innermost_level_that_holds_both() -> None:
    made = describe.parse(PLAIN)
    names = [level.name if (level := made.shared(0, other)) else "device" for other in (0, 1, 2, 4, 11, 12)]
    assert names == ["device", "socket", "node", "supernode", "supernode", "pod"]


def test_a_message_takes_its_levels_latency_and_rate() -> None:
    made = describe.parse(PLAIN)
    assert made.seconds(1e9, 0, 4) == pytest.approx(2e-6 + 0.01)
    assert made.seconds(1e9, 3, 3) == 0.0


def test_groups_cover_every_rank_once_at_every_level() -> None:
    made = describe.parse(PLAIN)
    assert made.devices == 24 and made.size("rack") == 12
    for name in LEVELS:
        assert [rank for group in made.groups(name) for rank in group] == list(range(24))


def test_a_ring_in_the_order_of_ranks_crosses_the_slow_links_least() -> None:
    made = describe.parse(PLAIN)
    assert made.crossings(range(24)) == {"socket": 12, "node": 6, "supernode": 4, "pod": 2}
    assert made.crossings([r for pair in zip(range(12), range(12, 24)) for r in pair])["pod"] == 24


def test_a_dumped_topology_is_read_back_as_it_was() -> None:
    made = describe.parse(PLAIN)
    assert describe.parse(yaml.safe_load(describe.dump(made))) == made


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        (changed("levels.0.hold", 2), "no field 'hold'; did you mean holds"),
        (changed("levels.0.level", "sockt"), "did you mean socket"),
        (changed("levels.0.link", "hcs"), "did you mean hccs"),
        (changed("levels.0.holds", 0), "above 0"),
        (changed("levels.0.holds", 1.5), "above 0"),
        (changed("levels.2.link", {"kind": "ub", "gb_per_s": -1}), "above 0"),
        (changed("levels.2.link", {"kind": "hccs", "us": -1}), "0 or more"),
        (changed("levels.0.level", "node"), "in this order"),
        (changed("levels", [{"level": "rack", "holds": 2, "link": "tcp"}]), "node is missing"),
        (changed("levels", []), "levels is a list"),
        ([], "fields are expected"),
    ],
)
def test_a_description_that_cannot_be_meant_is_refused(plain: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        describe.parse(plain)


def test_ranks_and_levels_that_are_not_there_are_refused(tmp_path: Path) -> None:
    made = describe.parse(PLAIN)
    with pytest.raises(ConfigError, match="rank 24"):
        made.shared(0, 24)
    with pytest.raises(ConfigError, match="did you mean rack"):
        made.size("rak")
    with pytest.raises(ConfigError, match="nowhere"):
        describe.load(tmp_path / "nowhere.yaml")


def test_servers_of_a_rank_table_are_nodes_of_super_nodes() -> None:
    made = discover.from_servers([("0", 8)] * 3 + [("1", 8)] * 3)
    assert [(level.name, level.holds) for level in made.levels] == [("node", 8), ("supernode", 3), ("pod", 2)]
    flat = discover.from_servers([("", 8)] * 2)
    assert [(level.name, level.holds) for level in flat.levels] == [("node", 8), ("pod", 2)]
    with pytest.raises(ConfigError, match="differ in size"):
        discover.from_servers([("0", 8), ("0", 4)])


def make_sys(folder: Path) -> Path:
    for number, cores in enumerate(("0-1,4", "2-3,5")):
        node = folder / "devices/system/node" / f"node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{cores}\n")
    card = folder / "bus/pci/devices/0000:3b:00.0"
    card.mkdir(parents=True)
    (card / "numa_node").write_text("1\n")
    return folder


def test_this_machines_sockets_cores_and_cards_are_read_from_the_system(tmp_path: Path) -> None:
    sys = make_sys(tmp_path)
    assert discover.numa_cores(sys) == {0: [0, 1, 4], 1: [2, 3, 5]}
    assert discover.numa_of("00000000:3B:00.0", sys) == 1 and discover.numa_of("0000:99:00.0", sys) is None
    made = discover.this_machine(8, "H200", KINDS["nvlink4"], sys)
    assert [(level.name, level.holds) for level in made.levels] == [("socket", 4), ("node", 2)]
    odd = discover.this_machine(7, "H200", KINDS["nvlink4"], sys)
    assert odd == Topology("this machine", "H200", (Level("node", 7, Link("nvlink4", 450, 1)),))


def test_a_machine_without_devices_has_one_place_for_its_processor(tmp_path: Path) -> None:
    assert discover.this_machine(0, "cpu", KINDS["memory"], tmp_path).devices == 1

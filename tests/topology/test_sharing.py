"""Handing NICs out: nobody goes without, nobody gets more than its neighbours."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from pdd.topology import report, sysfs
from pdd.topology.sharing import share_out
from tests.topology.build import SysTree, port

WANTED = st.lists(st.sets(st.integers(0, 7), max_size=6).map(sorted), max_size=8).map(lambda rows: dict(enumerate(rows)))


def test_examples() -> None:
    assert share_out({0: "ab", 1: "ab"}) == {0: ("a",), 1: ("b",)}
    assert share_out({0: "abcd", 1: "abcd"}) == {0: ("a", "c"), 1: ("b", "d")}
    assert share_out({0: "abc", 1: "abc"}) == {0: ("a",), 1: ("b",)}  # c is spare
    assert share_out({0: "ab", 1: "a"}) == {0: ("b",), 1: ("a",)}  # 1 has no choice
    assert share_out({0: "a", 1: "a", 2: "b"}) == {0: ("a",), 1: ("a",), 2: ("b",)}
    assert share_out({0: "ab", 1: "ab", 2: "ab", 3: "ab"}) == {0: ("a",), 1: ("b",), 2: ("a",), 3: ("b",)}
    assert share_out({0: "", 1: "a"}) == {0: (), 1: ("a",)}


@given(WANTED)
def test_everyone_gets_some_of_what_is_good_for_it(wanted: dict[int, list[int]]) -> None:
    made = share_out(wanted)
    assert made.keys() == wanted.keys()
    for gpu, nics in made.items():
        assert set(nics) <= set(wanted[gpu])
        assert bool(nics) == bool(wanted[gpu])
        assert len(set(nics)) == len(nics)


@given(WANTED)
def test_a_nic_is_shared_only_where_they_are_scarce(wanted: dict[int, list[int]]) -> None:
    made = share_out(wanted)
    load = Counter(nic for nics in made.values() for nic in nics)
    for nics in made.values():
        if any(load[nic] > 1 for nic in nics):
            assert len(nics) == 1


@given(st.integers(1, 8), st.integers(1, 16))
def test_equal_gpus_get_equal_shares(gpus: int, nics: int) -> None:
    made = share_out({gpu: range(nics) for gpu in range(gpus)})
    assert {len(mine) for mine in made.values()} == {max(1, nics // gpus)}
    load = Counter(nic for mine in made.values() for nic in mine)
    assert max(load.values()) - min(load.values()) <= 1


# -- which of equally near NICs are worth sharing ----------------------------------------------------------------------
def test_the_main_family_wins_over_a_lone_card_as_near(tmp_path: Path) -> None:
    tree = SysTree(tmp_path)
    tree.node(0, "0-3")
    for number, bus in enumerate(("10", "20")):
        tree.gpu(f"{port(bus, 0)}/0000:{int(bus, 16) + 3:02x}:00.0")
        tree.nic(f"{port(bus, 1)}/0000:{int(bus, 16) + 4:02x}:00.0", f"mlx5_{number + 1}", "")
    tree.nic(f"{port('10', 2)}/0000:15:00.0", "mlx5_0", "", device="0xa2dc")  # a DPU for management
    pairs = {(pair["gpu"], pair["nic"]): pair for pair in report.document(sysfs.read(tmp_path))["pairs"]}
    assert pairs[0, "mlx5_1"]["chosen"]
    assert pairs[0, "mlx5_0"]["path"] == "PIX"
    assert pairs[0, "mlx5_0"]["why"] == "as near, but not of the machine's main kind of NIC (mlx5_1)"


def test_virtual_functions_do_not_stand_beside_their_card(tmp_path: Path) -> None:
    tree = SysTree(tmp_path)
    tree.node(0, "0-3")
    tree.gpu(f"{port('10', 0)}/0000:13:00.0")
    card = tree.nic(f"{port('10', 1)}/0000:14:00.0", "mlx5_0", "")
    for number in (1, 2, 3):
        path = f"{port('10', 1)}/0000:14:00.{number}"
        tree.nic(path, f"mlx5_{number}", "", device="0x101e")
        tree.link(f"devices/{path}/physfn", tree.root / f"sys/devices/{port('10', 1)}" / card)
    (rail,) = report.document(sysfs.read(tmp_path))["rails"]
    assert rail["nics"] == ["mlx5_0"]

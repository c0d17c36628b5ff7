"""What a node's parts use on well-known machines: one function of the machine, the config and libfabric's offers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from pdd.topology import report, sysfs
from pdd.topology.domains import Offer, nic_of
from pdd.topology.placement import Placement, RankGroup, RankPlace, Wanted, plan_placement
from pdd.topology.types import Topology
from tests.topology import machines
from tests.topology.build import SysTree, port

Machine = Callable[[Path], SysTree]


def read(machine: Machine, root: Path) -> Topology:
    machine(root)
    return sysfs.read(root)


def tcp(**interfaces: str) -> list[Offer]:
    return [Offer("tcp", name, address) for name, address in interfaces.items()]


def verbs(topology: Topology) -> list[Offer]:
    return [Offer("verbs", nic.name, "") for nic in topology.rdma_nics]


def efa(topology: Topology) -> list[Offer]:
    return [Offer("efa", f"{nic.name}-rdm", "fe80::1") for nic in topology.rdma_nics]


def of(placement: Placement) -> RankGroup:
    [group] = placement.groups
    return group


def test_every_gpu_of_a_dgx_h100_gets_its_nic_by_the_name_that_libfabric_gives_it(tmp_path: Path) -> None:
    topology = read(machines.dgx_h100, tmp_path)
    placement = plan_placement(topology, Wanted(devices=tuple(range(8))), [*verbs(topology), *tcp(enp3s0="10.0.0.7")])
    assert placement.provider == "verbs"
    assert [group.bind for group in placement.groups] == [(f"mlx5_{n if n < 4 else n + 2}",) for n in range(8)]
    assert [group.numa for group in placement.groups] == [0] * 4 + [1] * 4
    assert {group.rate_bits_per_second for group in placement.groups} == {400_000_000_000}
    assert placement.groups[7].worker_cpus == (*range(98, 112), *range(210, 224))
    assert placement.groups[7].why == ("mlx5_9: the nearest", "NUMA node 1 of mlx5_9")


def test_cpu_ranks_of_a_dgx_h100_sit_by_the_fabric_that_has_most_nics(tmp_path: Path) -> None:
    topology = read(machines.dgx_h100, tmp_path)
    group = of(plan_placement(topology, Wanted(), verbs(topology)))
    assert group.bind == ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3")  # not the storage cards 4 and 5
    [place] = group.places
    assert (group.numa, place.numa, place.threads, len(place.cpus)) == (0, 0, 56, 112)
    assert group.rate_bits_per_second == 1_600_000_000_000


def test_a_card_of_another_family_is_not_of_the_host_s_rail_group(tmp_path: Path) -> None:
    tree = SysTree(tmp_path)
    tree.node(0, "0-3")
    tree.node(1, "4-7")
    for number, device in enumerate(("0x1017", "0x1021", "0x1021")):  # the first is for storage
        tree.nic(f"{port('80', number + 1)}/0000:8{4 + number}:00.0", f"mlx5_{number}", "", numa=1, device=device)
    topology = sysfs.read(tmp_path)
    assert of(plan_placement(topology, Wanted(), verbs(topology))).bind == ("mlx5_1", "mlx5_2")


def test_p5_48xlarge(tmp_path: Path) -> None:
    topology = read(machines.p5_48xlarge, tmp_path)
    placement = plan_placement(topology, Wanted(devices=tuple(range(8))), efa(topology))
    assert placement.groups[0].bind == tuple(f"rdmap{n}s0-rdm" for n in (79, 80, 81, 82))
    assert {len(group.bind) for group in placement.groups} == {4}
    assert len({name for group in placement.groups for name in group.bind}) == 32
    assert placement.groups[0].rate_bits_per_second == 400_000_000_000


def test_two_gpus_of_a_p4d_share_a_nic(tmp_path: Path) -> None:
    topology = read(machines.p4d_24xlarge, tmp_path)
    placement = plan_placement(topology, Wanted(devices=(0, 1)), efa(topology))
    assert [group.bind for group in placement.groups] == [("rdmap16s27-rdm",)] * 2
    assert placement.groups[0].why[0] == "rdmap16s27: the nearest; shared with GPU1"


def test_the_far_gpu_s_worker_and_memory_go_to_the_only_nic(tmp_path: Path) -> None:
    topology = read(machines.two_gpus_one_nic, tmp_path)
    placement = plan_placement(topology, Wanted(devices=(0, 1)), verbs(topology))
    assert [(group.bind, group.numa) for group in placement.groups] == [(("mlx5_0",), 0), (("mlx5_0",), 0)]


def test_a_container_stays_within_its_cpus(tmp_path: Path) -> None:
    topology = read(machines.container, tmp_path)
    placement = plan_placement(topology, Wanted(devices=(0, 1)), verbs(topology))
    assert [group.bind for group in placement.groups] == [("mlx5_7",), ("mlx5_8",)]
    assert [group.worker_cpus for group in placement.groups] == [(*range(56, 60), *range(168, 172)),
                                                                  (*range(60, 64), *range(172, 176))]


def test_on_a_laptop_nothing_is_pinned_and_libfabric_chooses(tmp_path: Path) -> None:
    topology = read(machines.laptop, tmp_path)
    group = of(plan_placement(topology, Wanted()))
    assert (group.nics, group.bind, group.numa, group.worker_cpus) == ((), (), None, ())
    assert group.places == (RankPlace(None, (), 16),)
    assert group.rate_bits_per_second is None
    assert group.why[-1] == "one NUMA node: nothing is pinned"


def test_a_nic_that_is_down_leaves_its_gpu_to_the_nearest_usable_one(tmp_path: Path) -> None:
    machines.dgx_h100(tmp_path)
    next(tmp_path.glob("sys/devices/**/mlx5_2/ports/1/state")).write_text("1: DOWN\n")
    topology = sysfs.read(tmp_path)
    group = plan_placement(topology, Wanted(devices=(2,)), verbs(topology)).groups[0]
    assert group.bind == ("mlx5_3",)
    assert group.why[0] == "mlx5_3: the nearest usable; one of 3 as near, shared out evenly; shared with GPU3"


def test_a_nic_that_libfabric_does_not_offer_is_a_finding_and_the_nearest_other_is_taken(tmp_path: Path) -> None:
    topology = read(machines.dgx_h100, tmp_path)
    offers = [offer for offer in verbs(topology) if offer.domain != "mlx5_2"]
    placement = plan_placement(topology, Wanted(devices=(2, 3)), offers)
    assert [group.bind for group in placement.groups] == [("mlx5_3",), ("mlx5_3",)]
    document = report.document(topology, placement)
    told = {each["id"]: each["message"] for each in document["findings"]}
    assert told["T017"].startswith("libfabric offers no mlx5_2")
    assert told["T013"] == "GPU2 falls back to mlx5_3 over NODE: mlx5_2 would be nearer"
    why = [pair["why"] for pair in document["pairs"] if (pair["gpu"], pair["nic"]) == (2, "mlx5_2")]
    assert why == ["not offered by libfabric"]


def test_the_config_s_nics_override_the_pairing_and_move_the_worker_to_them(tmp_path: Path) -> None:
    topology = read(machines.dgx_h100, tmp_path)
    group = of(plan_placement(topology, Wanted(bind=("mlx5_9", "mlx5_8")), verbs(topology)))
    assert (group.nics, group.bind, group.numa) == (("mlx5_9", "mlx5_8"), ("mlx5_9", "mlx5_8"), 1)
    assert group.why == ("fabric.bind names the NICs", "NUMA node 1 of mlx5_9")
    by_address = of(plan_placement(topology, Wanted(bind=("10.0.0.7",)), tcp(lo="127.0.0.1", enp3s0="10.0.0.7")))
    assert (by_address.nics, by_address.rate_bits_per_second) == (("enp3s0",), 10_000_000_000)


@pytest.mark.parametrize(
    ("bind", "groups", "shares"),
    [
        (("a",), 2, [("a",), ("a",)]),
        (("a", "b"), 2, [("a",), ("b",)]),
        (("a", "b", "c", "d"), 2, [("a", "b"), ("c", "d")]),
        (("a", "b", "c"), 2, [("a",), ("b", "c")]),
    ],
)
def test_bound_nics_are_dealt_to_groups_in_order(
    tmp_path: Path, bind: tuple[str, ...], groups: int, shares: list[tuple[str, ...]]
) -> None:
    topology = read(machines.dgx_h100, tmp_path)
    placement = plan_placement(topology, Wanted(devices=tuple(range(groups)), bind=bind), [])
    assert [group.bind for group in placement.groups] == shares


def roce(root: Path) -> SysTree:
    """2 sockets; an RDMA NIC with an interface on the second, plain Ethernet on the first."""
    tree = SysTree(root)
    tree.node(0, "0-3")
    tree.node(1, "4-7")
    tree.nic(f"{port('80', 1)}/0000:84:00.0", "mlx5_0", "ens1", numa=1)
    tree.netdev("pci0000:02/0000:02:01.0/0000:03:00.0", "enp3s0", 0, speed=10000)
    return tree


@pytest.mark.parametrize(
    ("source", "bind", "nics", "numa"),
    [
        ("", ("10.1.0.7",), ("mlx5_0",), 1),  # listens on any address: the one of the RDMA NIC
        ("10.1.0.7", ("10.1.0.7",), ("mlx5_0",), 1),
        ("10.0.0.7", (), ("enp3s0",), 0),  # reached by another one: nobody knows whether 10.1.0.7 is reached too
        ("127.0.0.1", (), (), 1),  # peers on this host
        ("fd00::7", (), (), 1),
    ],
)
def test_over_tcp_a_nic_is_an_address_that_peers_reach(
    tmp_path: Path, source: str, bind: tuple[str, ...], nics: tuple[str, ...], numa: int
) -> None:
    topology = read(roce, tmp_path)
    offers = [Offer("tcp", "ens1", "fe80::1"), *tcp(ens1="10.1.0.7", enp3s0="10.0.0.7", lo="127.0.0.1")]
    group = of(plan_placement(topology, Wanted(source=source), offers))
    assert (group.bind, group.nics, group.numa) == (bind, nics, numa)


def test_more_threads_than_the_node_has_cores_leave_the_ranks_free(tmp_path: Path) -> None:
    topology = read(roce, tmp_path)
    assert of(plan_placement(topology, Wanted(threads=4))).places == (RankPlace(1, (4, 5, 6, 7), 4),)
    wide = of(plan_placement(topology, Wanted(threads=8)))
    assert (wide.places, wide.worker_cpus) == ((RankPlace(1, (), 8),), (4, 5, 6, 7))
    assert "engine.threads = 8 is more than the 4 cores" in wide.why[-1]


@pytest.mark.parametrize(
    ("ranks", "threads", "places"),
    [  # on two sockets of four cores, the NIC by the second
        (2, 0, [(1, 4), (0, 4)]),
        (3, 0, [(1, 2), (1, 2), (0, 4)]),
        (4, 0, [(1, 2), (1, 2), (0, 2), (0, 2)]),
        (4, 1, [(1, 1), (1, 1), (0, 1), (0, 1)]),
        (16, 0, [(1, 1)] * 8 + [(0, 1)] * 8),
    ],
)
def test_ranks_on_cpus_are_spread_over_numa_nodes_and_divide_their_cores(
    tmp_path: Path, ranks: int, threads: int, places: list[tuple[int, int]]
) -> None:
    topology = read(roce, tmp_path)
    placement = plan_placement(topology, Wanted(devices=(None,) * ranks, threads=threads))
    group = of(placement)
    assert (group.numa, group.worker_cpus, group.ranks) == (1, (4, 5, 6, 7), tuple(range(ranks)))
    assert [(place.numa, place.threads) for place in group.places] == places
    for rank, place in enumerate(group.places):
        assert place.cpus == ((4, 5, 6, 7) if place.numa == 1 else (0, 1, 2, 3))
        assert placement.place(rank) is place
    [row] = report.placement_rows(placement)
    assert (row["memory"], row["rank_cpus"]) == ("each rank's on its own of NUMA nodes 0-1", "0-7")
    assert group.why[-1] == f"{ranks} ranks over NUMA nodes 1, 0"


@pytest.mark.parametrize(("ranks", "together", "nodes"), [
    (2, 2, [1, 1]), (4, 4, [1] * 4), (4, 2, [1, 1, 0, 0]), (6, 2, [1] * 4 + [0] * 2), (6, 3, [1] * 3 + [0] * 3),
])
def test_ranks_that_compute_together_stay_on_one_numa_node(tmp_path: Path, ranks: int, together: int, nodes: list[int]) -> None:
    group = of(plan_placement(read(roce, tmp_path), Wanted(devices=(None,) * ranks, together=together)))
    assert [place.numa for place in group.places] == nodes


def test_ranks_that_together_want_more_threads_than_a_node_has_cores_run_anywhere(tmp_path: Path) -> None:
    group = of(plan_placement(read(roce, tmp_path), Wanted(devices=(None,) * 4, threads=3)))
    assert [place.cpus for place in group.places] == [()] * 4
    assert "engine.threads = 3 for each of 2 ranks is more than the 4 cores of the node: ranks may run anywhere" in group.why


def test_ranks_of_one_numa_node_divide_its_cores_and_are_not_pinned(tmp_path: Path) -> None:
    group = of(plan_placement(read(machines.laptop, tmp_path), Wanted(devices=(None,) * 3)))
    assert group.places == (RankPlace(None, (), 5),) * 3


def test_a_node_whose_cpus_this_process_may_not_use_gets_no_rank(tmp_path: Path) -> None:
    topology = dataclasses.replace(read(roce, tmp_path), cpus=(4, 5))
    group = of(plan_placement(topology, Wanted(devices=(None, None))))
    assert group.places == (RankPlace(1, (4, 5), 1),) * 2


@pytest.mark.parametrize(("domain", "name"), [("mlx5_1", "mlx5_1"), ("mlx5_1-xrc", "mlx5_1"), ("ens6f0", "mlx5_4"),
                                              ("mlx5_10", None), ("lo", None), ("mlx5_", None)])
def test_whose_domain_it_is(tmp_path: Path, domain: str, name: str | None) -> None:
    nic = nic_of(read(machines.dgx_h100, tmp_path), domain)
    assert (nic.name if nic else None) == name

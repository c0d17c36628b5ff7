"""Each judgement over facts that are written down: what is fine, what is not, and what cannot be known."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest

from pdd.config_sources import Problem
from pdd.doctor.checks import CHECKS
from pdd.doctor.facts import (
    Candidate,
    Clock,
    Credential,
    Disk,
    Driver,
    Facts,
    HugePages,
    Library,
    Limit,
    Memory,
    Port,
    Process,
    RunDir,
)
from pdd.doctor.report import NEED_LIBRARY, chosen, judge
from pdd.errors import UsageError
from pdd.topology import sysfs
from pdd.topology.placement import Wanted, plan_placement
from tests.topology import machines

GIB = 1 << 30
GOOD = {
    "clock": Clock(2e9, 1e9, True), "problems": (), "settings": "f", "memlock": Limit(-1, -1), "open_files": Limit(20000, 20000),
    "huge": HugePages("madvise", "never"), "library": Library("/l", "2.5", offers=(("verbs", "mlx5_0", ""),)),
    "driver": Driver("595.71", frozenset({"nvidia", "ib_uverbs"}), frozenset({"nvidiactl", "nvidia-uvm", "infiniband/uverbs0"})),
    "ports": (Port("api.listen", "127.0.0.1:8000"),), "run_dir": RunDir("/run/pdd/n"), "model": "/m",
    "memory": Memory(100 * GIB, 10 * GIB, 20 * GIB), "credentials": (Credential("peers.token_credential", "/t", 0o600),),
    "disks": (Disk("logs", "/var/log/pdd", 9 * GIB, 1000, True),),
}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Facts]:
    @functools.cache
    def of(machine: Any) -> Any:
        root = tmp_path_factory.mktemp(machine.__name__) / "root"
        machine(root)
        topology = sysfs.read(root)
        return topology, plan_placement(topology, Wanted()).findings

    def make(machine: Any = machines.dgx_h100, **changed: Any) -> Facts:
        topology, found = of(machine)
        return Facts(topology=topology, findings=found, role="both", **{**GOOD, **changed})

    return make


def outcome(facts: Facts, id: str) -> tuple[str, str]:
    [result] = judge(facts, frozenset({id}))
    assert result.id == id
    assert result.level in ("pass", "skip") or result.fix, "it says what is wrong and not what to do"
    return result.level, result.message


def test_a_good_machine_passes_all(facts: Callable[..., Facts]) -> None:
    levels = {each.id: each.level for each in judge(facts(), chosen(()))}
    assert {id for id, level in levels.items() if level not in ("pass", "skip")} == {"D032"}  # no GID in the copy
    assert {id for id, level in levels.items() if level == "skip"} == {"D013", "D033"}  # of a GPU; the driver is not in the copy


@pytest.mark.parametrize(("id", "changed", "level", "words"), [
    ("D001", {"driver": Driver()}, "fail", "no driver is loaded"),
    ("D001", {"driver": Driver("595.71")}, "fail", "/dev/nvidia-uvm, /dev/nvidiactl is not there"),
    ("D002", {"driver": Driver("595.71")}, "fail", "ib_uverbs is not loaded"),
    ("D002", {"driver": Driver("1", frozenset({"ib_uverbs"}))}, "fail", "no /dev/infiniband/uverbs"),
    ("D010", {"problems": (Problem("f:1:1", "kv.page_size", "0 is wrong"),)}, "fail", "kv.page_size: 0 is wrong"),
    ("D010", {"problems": (Problem("f:1:1", "x.y", "m", level="warning"),)}, "warn", "1 problem"),
    ("D010", {"problems": None}, "skip", "-c FILE"),
    ("D011", {"credentials": (Credential("api.api_keys_credential", "/k", 0o644),)}, "warn", "/k is open to others (mode 0644)"),
    ("D011", {"credentials": (Credential("k", "/k", None, "No such file"),)}, "fail", "No such file"),
    ("D011", {"credentials": (Credential("k", "t", None, "a credential of systemd"),)}, "skip", "systemd"),
    ("D012", {"memory": Memory(error="no config.json")}, "fail", "no config.json"),
    ("D020", {"memlock": Limit(8 << 20, -1)}, "fail", "limit is 8.39 MB, the KV pool needs 21.5 GB"),
    ("D020", {"memlock": Limit(30 * GIB, -1)}, "pass", "needs 21.5 GB"),
    ("D020", {"memlock": Limit(8 << 20, -1), "provider": "tcp"}, "pass", "tcp needs none"),
    ("D020", {"memlock": Limit(8 << 20, -1), "memory": Memory()}, "warn", "needs all KV memory locked"),
    ("D020", {"memlock": None}, "skip", "cannot be read"),
    ("D021", {"open_files": Limit(1024, 4096), "files_needed": 200}, "pass", "4096 files"),
    ("D021", {"open_files": Limit(256, 1024), "files_needed": 200}, "warn", "1024 files"),
    ("D021", {"open_files": Limit(64, 128), "files_needed": 200}, "fail", "128 files may be open, these settings need 200"),
    ("D021", {"open_files": Limit(64, -1)}, "pass", "any number"),
    ("D022", {"huge": HugePages("never")}, "warn", "are off"),
    ("D022", {"huge": HugePages("always", "", 8, 5)}, "pass", "5 of 8 reserved"),
    ("D034", {"library": Library(error="nowhere")}, "fail", "nowhere"),
    ("D034", {"library": Library("/l", "2.5", candidates=(Candidate("/o", "1.17", "not newer"),))}, "pass", "/o (1.17): not newer"),
    ("D035", {"library": Library("/l", "2.5", offers=(("tcp", "eth0", "10.0.0.1"),))}, "warn", "only tcp, though there is"),
    ("D035", {"library": Library("/l", "2.5", offers=(), why_nothing="ENODATA")}, "fail", "ENODATA"),
    ("D035", {"required": "efa"}, "fail", "fabric.require is efa, and libfabric offers verbs"),
    ("D050", {"ports": (Port("api.listen", "h:1", "in use", True, Process(7, "vllm")),)}, "fail", "h:1 is in use by pid 7 (vllm)"),
    ("D050", {"ports": (Port("api.listen", "h:1", "in use", True),)}, "fail", "may not see"),
    ("D050", {"ports": (Port("api.listen", "h:1", "Permission denied"),)}, "fail", "cannot be used: Permission denied"),
    ("D050", {"ports": (Port("api.listen", "h:1", "in use", True, Process(7, "pdd")),),
              "run_dir": RunDir("/r", running=Process(7, "pdd"))}, "pass", "of the running node"),
    ("D050", {"ports": (Port("api.listen", "h:1", "in use", True, Process(8, "x")),),
              "run_dir": RunDir("/r", running=Process(7, "pdd"))}, "fail", "pid 8"),
    ("D051", {"run_dir": RunDir("/r", "/run cannot be written")}, "fail", "cannot be written"),
    ("D051", {"run_dir": RunDir("/r", stale=True)}, "pass", "replaces them"),
    ("D060", {"clock": Clock(1.0, 1e9)}, "fail", "days before pdd was installed"),
    ("D061", {"clock": Clock(2e9, 1e9, False)}, "warn", "not synchronised"),
    ("D061", {"clock": Clock(2e9, 1e9, None, "not permitted")}, "skip", "not permitted"),
    ("D062", {"disks": (Disk("a", "/a", 9 * GIB, -1, True), Disk("b", "/b", 500 << 20, -1, True))}, "warn", "free in /b"),
    ("D062", {"disks": (Disk("a", "/a", 1 << 20, 9, True),)}, "fail", "free in /a"),
    ("D062", {"disks": (Disk("a", "/a", 9 * GIB, 0, True),)}, "fail", "no inode is free"),
])  # fmt: skip
def test_an_outcome(facts: Callable[..., Facts], id: str, changed: dict[str, Any], level: str, words: str) -> None:
    found = outcome(facts(**changed), id)
    assert found[0] == level, found
    assert words in found[1]


def test_memory_of_ranks_on_cpus(facts: Callable[..., Facts]) -> None:
    assert outcome(facts(machines.laptop), "D013")[0] == "pass"
    small = facts(machines.laptop, memory=Memory(20 * GIB, 10 * GIB, 20 * GIB))
    assert outcome(small, "D013") == ("fail", "weights 10.7 GB and KV 21.5 GB, 21.5 GB of memory are free")
    assert outcome(dataclasses.replace(small, run_dir=RunDir("/r", running=Process(1, "pdd"))), "D013")[0] == "skip"


def test_nics(facts: Callable[..., Facts]) -> None:
    good = facts()
    down = tuple(dataclasses.replace(nic, state="down") for nic in good.topology.nics)

    def of(nics: Any) -> Facts:
        topology = dataclasses.replace(good.topology, nics=nics)
        return dataclasses.replace(good, topology=topology, findings=plan_placement(topology, Wanted()).findings)

    first = next(i for i, nic in enumerate(good.topology.nics) if nic.is_rdma)
    one_down = (*good.topology.nics[:first], down[first], *good.topology.nics[first + 1 :])
    assert outcome(good, "D030")[0] == "pass"
    assert outcome(of(one_down), "D030")[0] == "warn"
    assert outcome(of(down), "D030")[0] == "fail"
    assert outcome(facts(machines.laptop), "D030")[0] == "skip"
    roce = tuple(dataclasses.replace(nic, kind="roce", gid="fe80::1", gid_index=0) for nic in good.topology.nics)
    assert outcome(of(roce), "D032")[0] == "warn"
    assert outcome(of(tuple(dataclasses.replace(nic, gid="2001:db8::1") for nic in roce)), "D032")[0] == "pass"


def test_ways_between_gpus_and_nics(facts: Callable[..., Facts]) -> None:
    good = facts()
    for way, level in (("dma-buf", "pass"), ("none", "warn"), (None, "skip")):
        limits = dataclasses.replace(good.topology.limits, gpu_direct=way)
        assert outcome(dataclasses.replace(good, topology=dataclasses.replace(good.topology, limits=limits)), "D033")[0] == level
    bridges = frozenset(bridge for gpu in good.topology.gpus for bridge in gpu.pci.bridges)
    topology = dataclasses.replace(good.topology, acs_redirects=bridges)
    acs = dataclasses.replace(good, topology=topology, findings=plan_placement(topology, Wanted()).findings)
    assert outcome(acs, "D031")[0] == "warn"
    assert outcome(good, "D031")[0] == "pass"
    narrow = dataclasses.replace(good.topology, cpus=(0,))
    found = plan_placement(narrow, Wanted()).findings
    assert outcome(dataclasses.replace(good, topology=narrow, findings=found), "D040")[0] == "warn"


def test_only_some() -> None:
    assert chosen(["d020", "gpu"]) == {"D020", "D001", "D031", "D033"}
    assert chosen(()) >= {check.id for check in CHECKS}
    with pytest.raises(UsageError, match='"gpus" is no check'):
        chosen(["gpus"])


def test_the_checks_that_need_libfabric_are_those_that_look_at_it(facts: Callable[..., Facts]) -> None:
    """What is chosen without one of them is judged without asking it, which takes a second."""
    small = facts(memlock=Limit(1, 1))
    libraries = (Library(error="none"), Library("/m", "1", offers=(("tcp", "eth0", "a"),)), Library())
    for check in CHECKS:
        outcomes = {str(check.judge(dataclasses.replace(small, library=each))) for each in libraries}
        assert len(outcomes) == 1 or check.id in NEED_LIBRARY, check.id

"""`pdd topology` as a user runs it: findings and exit code, the running node's choice, pictures without identities."""

from __future__ import annotations

import json
from pathlib import Path

from tests.control.test_cli import Daemon, Pdd, clean
from tests.topology import machines


def test_topology_check_says_what_was_found_and_exits_by_it(pdd: Pdd, tmp_path: Path) -> None:
    tree = machines.two_gpus_one_nic(tmp_path / "far")
    machines.laptop(tmp_path / "laptop")
    far, laptop = ("--input", str(tmp_path / "far")), ("--input", str(tmp_path / "laptop"))
    out = clean(pdd("topology", "check", *far), 7).stdout
    assert out == "WARN T014 GPU1 has no NIC on its NUMA node: mlx5_0 is far, over SYS\n"
    assert clean(pdd("topology", "check", *laptop), 0).stdout.startswith("INFO T010 no RDMA NIC")
    document = json.loads(clean(pdd("topology", "check", "--json", *far), 7).stdout)
    assert [(each["id"], each["level"], each["gpu"]) for each in document["findings"]] == [("T014", "warn", 1)]
    assert "takes --input alone" in clean(pdd("topology", "check", "--format", "dot"), 2).stderr
    assert "none of show, check" in clean(pdd("topology", "chekc"), 2).stderr
    tree.process(cpus="0-31", memlock="8388608")
    assert "T030" in clean(pdd("topology", "check", *far), 7).stdout


def test_topology_shows_what_the_node_that_runs_here_chose(pdd: Pdd, daemon: Daemon) -> None:
    document = json.loads(clean(pdd("topology", "--json"), 0).stdout)
    assert [row["nics"] for row in document["placement"]] == [["mlx5_gone"]]
    assert document["host"] != "fake"  # the machine is read now, the choice is the node's
    told = {each["id"]: each["message"] for each in document["findings"]}
    assert told["T024"].startswith("the running node uses mlx5_gone, which is gone now")
    assert "node: CPU ranks use mlx5_gone" in clean(pdd("topology"), 0).stdout
    alone = json.loads(clean(pdd("-i", "nobody", "topology", "--json"), 0).stdout)
    assert [row["why"][-1] for row in alone["placement"]] != ["fake"]


def test_topology_without_identities(pdd: Pdd, tmp_path: Path) -> None:
    tree = machines.container(tmp_path / "node")
    tree.file("proc/sys/kernel/hostname", "rack7\n")
    for words in (["--json"], ["--format", "nccl-xml"], []):
        out = clean(pdd("topology", "--anonymize", "--input", str(tmp_path / "node"), *words), 0).stdout
        assert "rack7" not in out
        assert "GPU-00000005-0000" not in out
    export = tmp_path / "export.tar.gz"
    clean(pdd("topology", "--anonymize", "--input", str(tmp_path / "node"), "--export", str(export)), 0)
    document = json.loads(clean(pdd("topology", "--json", "--input", str(export)), 0).stdout)
    assert (document["host"], len(document["gpus"])) == ("host-1", 2)

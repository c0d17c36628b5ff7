"""What is read from a machine: of a fake root, and of this one where a root cannot be faked."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from pdd.config import Config
from pdd.config_load import load
from pdd.doctor import gather, holders
from pdd.doctor.facts import HugePages, Limit, Process
from pdd.topology.files import Directory, Tree
from tests.topology import machines


def config(*assignments: str) -> Config:
    return load(assignments=["node.role=both", *assignments], demo=True, search=False, env={})[0]


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max open files            1024                 524288               files
Max locked memory         8388608              unlimited            bytes
"""
TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1
   1: 0100007F:1F41 0100007F:0001 01 00000000:00000000 00:00000000 00000000     0        0 4712 1
"""


def test_a_fake_root(tmp_path: Path) -> None:
    machines.dgx_h100(tmp_path)
    write(tmp_path, "proc/self/limits", LIMITS)
    write(tmp_path, "proc/meminfo", "MemTotal: 100 kB\nMemAvailable: 50 kB\nHugePages_Total: 8\nHugePages_Free: 3\n")
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    write(tmp_path, "sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size advise [never] deny force\n")
    write(tmp_path, "sys/module/ib_uverbs/x", "")
    write(tmp_path, "dev/infiniband/uverbs0", "")
    write(tmp_path, "proc/driver/nvidia/version",
          "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.71.05  Release Build\n")
    facts = gather.gather(config(), (), "f", root=tmp_path)
    assert (facts.memlock, facts.open_files) == (Limit(8388608, -1), Limit(1024, 524288))
    assert facts.huge == HugePages("madvise", "never", 8, 3)
    assert facts.driver.nvidia == "595.71.05"
    assert "ib_uverbs" in facts.driver.modules
    assert "infiniband/uverbs0" in facts.driver.nodes
    assert facts.memory.free == 50 * 1024
    assert len(facts.topology.gpus) == 8
    assert facts.clock.synchronised is None


def test_an_empty_root_is_nothing_known(tmp_path: Path) -> None:
    facts = gather.gather(config(), None, "", root=tmp_path)
    assert (facts.memlock, facts.memory.free, facts.driver.nvidia) == (None, None, "")
    assert (facts.ports, facts.run_dir) == ((), None)


def test_who_holds_a_port(tmp_path: Path) -> None:
    write(tmp_path, "proc/net/tcp", TCP)
    write(tmp_path, "proc/12/comm", "other\n")
    write(tmp_path, "proc/4121/comm", "vllm\n")
    (tmp_path / "proc/4121/fd").mkdir()
    os.symlink("socket:[4711]", tmp_path / "proc/4121/fd/5")
    os.symlink("socket:[4712]", tmp_path / "proc/4121/fd/6")
    assert holders.of_port(8000, tmp_path) == Process(4121, "vllm")
    assert holders.of_port(8001, tmp_path) is None  # a connection, and no listener


def test_a_taken_port_of_this_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        [found] = gather._ports(config(f"api.listen=127.0.0.1:{port}"), Path("/"))
        assert found.in_use
        assert found.holder is not None
        assert found.holder.pid == os.getpid()
    [free] = gather._ports(config(f"api.listen=127.0.0.1:{port}"), Path("/"))
    assert not free.error
    [foreign] = gather._ports(config("api.listen=192.0.2.77:8000", "api.api_keys_credential=k"), Path("/"))
    assert "assign" in foreign.error
    assert not foreign.in_use


def test_the_memory_that_a_model_takes(tiny_model: Path) -> None:
    found = gather._memory(config(f"model.path={tiny_model}", "kv.num_pages=64", "model.dtype=float32"), Path("/"))
    assert found.weights is not None
    assert found.weights > 0
    twice = gather._memory(config(f"model.path={tiny_model}", "kv.num_pages=128", "model.dtype=float32"), Path("/"))
    assert found.kv is not None
    assert twice.kv == 2 * found.kv
    replicas = gather._memory(
        config(f"model.path={tiny_model}", "kv.num_pages=64", "model.dtype=float32", "engine.dp=2"), Path("/"))
    assert (replicas.weights, replicas.kv) == (2 * found.weights, 2 * found.kv)
    assert gather._memory(config("model.path=/nowhere"), Path("/")).error


def test_a_directory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = gather._run_dir(config(f"control.dir={tmp_path}/run", "node.name=n"), Path("/"))
    assert found.error == f"{tmp_path} cannot be written by this user"


def test_devices_of_a_tree(tmp_path: Path) -> None:
    machines.laptop(tmp_path)
    assert Tree(Directory(tmp_path)).names("dev/infiniband") == []

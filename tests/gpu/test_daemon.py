"""A rank's GPU memory at the daemon: the kind in its hello decides how it is mapped."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

from tests.gpu.conftest import REPOSITORY, Gpu
from tests.gpu.gpu_rank import PATTERN


def daemon(gpu: Gpu, page_size: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.gpu_daemon", str(page_size)], stdout=subprocess.PIPE, text=True, check=True,
        cwd=REPOSITORY, timeout=100,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part), **gpu.environment},
    )
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_the_daemon_maps_and_registers_what_the_rank_has_in_its_gpu(gpu: Gpu) -> None:
    found = daemon(gpu, 16)
    assert found["bytes"] == PATTERN.decode()
    assert (found["kind"], found["regions"]) == ("cuda", [0])
    assert pathlib.PurePath(found["device"]).suffix == ".0"
    [path] = [line for line in found["log"] if line.startswith("GPU ")]
    assert "KV is copied through host memory: fi_getinfo (tcp, libfabric" in path


def test_a_page_that_no_slot_holds_is_told_at_start(fake_gpu: Gpu) -> None:
    found = daemon(fake_gpu, 16384)
    assert "a page of KV takes 2097152 bytes of a layer; tcp takes at most 1048576 as one write" in found["error"]
    assert "kv.page_size" in found["hint"]

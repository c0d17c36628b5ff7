"""A throw-away machine with systemd as PID 1: a copy of this one in namespaces, where packages are installed for real.

Needs root, unshare, overlayfs and cgroup2, as most CI machines of root have; `machine` skips the test elsewhere and says what
is missing. Nothing outlives it: its files are in memory, its processes die with PID 1.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator

import pytest

from tests.cluster import die_with_parent

_SCRIPT = pathlib.Path(__file__).with_name("machine.sh")
_NAMESPACES = ["--mount", "--pid", "--net", "--uts", "--ipc", "--cgroup"]


class Machine:
    def __init__(self, pid: int, shared: pathlib.Path) -> None:
        self._pid = pid
        self.shared = shared  # /shared in there

    def run(self, command: str, *, check: bool = True, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """One shell command in there, as root."""
        enter = ["nsenter", "-t", str(self._pid), *_NAMESPACES, "--root", "--wd=/"]
        clean = ["env", "-i", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/tmp", "LC_ALL=C.UTF-8",
                 "DEBIAN_FRONTEND=noninteractive"]  # fmt: skip
        done = subprocess.run([*enter, *clean, "sh", "-c", command], capture_output=True, text=True, check=False, timeout=timeout)
        assert not check or done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done

    def out(self, command: str) -> str:
        return self.run(command).stdout.strip()

    def show(self, unit: str, name: str) -> str:
        """One property of a unit."""
        return self.out(f"systemctl show --value -p {name} {unit}")

    def exists(self, path: str) -> bool:
        return self.run(f"test -e {path}", check=False).returncode == 0


def _why_not() -> str:
    if os.geteuid() != 0:
        return "it needs root"
    missing = [name for name in ("unshare", "nsenter", "ip", "/lib/systemd/systemd") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    probe = subprocess.run(["unshare", *_NAMESPACES, "--fork", "sh", "-c", "mount -t cgroup2 none /mnt"], capture_output=True,
                           text=True, check=False)  # fmt: skip
    return "" if probe.returncode == 0 else f"no namespaces with cgroup2 here: {probe.stderr.strip()}"


@contextlib.contextmanager
def machine(directory: pathlib.Path) -> Iterator[Machine]:
    if why := _why_not():
        pytest.skip(f"no systemd of our own can run here: {why}")
    shared = directory / "shared"
    shared.mkdir()
    with tempfile.TemporaryDirectory(prefix="pdd-machine-") as place, (directory / "machine.log").open("wb") as log:
        starter = subprocess.Popen(
            ["unshare", *_NAMESPACES, "--fork", "--kill-child", "bash", str(_SCRIPT), place, str(shared)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die_with_parent,
        )  # fmt: skip
        try:
            yield _booted(starter, shared, directory / "machine.log")
        finally:
            starter.kill()  # PID 1 goes with it, and all of the machine with PID 1
            starter.wait(10)


def _booted(starter: subprocess.Popen[bytes], shared: pathlib.Path, log: pathlib.Path) -> Machine:
    children = pathlib.Path(f"/proc/{starter.pid}/task/{starter.pid}/children")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and starter.poll() is None:
        pids = children.read_text().split()
        if pids and pathlib.Path(f"/proc/{pids[0]}/comm").read_text().strip() == "systemd":
            found = Machine(int(pids[0]), shared)
            if found.run("systemctl is-active pdd-machine.target", check=False).returncode == 0:
                return found
        time.sleep(0.1)
    raise AssertionError(f"the machine did not boot: {log.read_text(errors='replace')[-2000:]}")

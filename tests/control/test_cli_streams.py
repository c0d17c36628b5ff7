"""The command with disks that are full, and standard streams that are full or closed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdd import cli
from tests.control import fake_daemon


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-", "<&- >&- 2>&-"])
def test_a_failure_has_its_code_wherever_its_message_goes(tmp_path: Path, redirection: str) -> None:
    for words in ("status", "--json status"):
        command = f"{sys.executable} -m pdd.cli --run-dir {tmp_path} {words} {redirection}"
        assert subprocess.run(["sh", "-c", command], check=False).returncode == 3


def test_what_is_opened_takes_the_place_of_no_standard_stream() -> None:
    """`pdd serve 2>&-` began with a bug; and a log line must not end up in a socket."""
    code = (
        "import os, sys; from pdd import cli; sys.argv[1:] = ['version']\n"
        "try: cli.main()\n"
        "except SystemExit as end: sys.exit(40 + (end.code, sys.stderr.fileno(), os.readlink('/proc/self/fd/2'))"
        ".count('/dev/null'))"
    )
    command = f"exec {sys.executable} -c \"{code}\" 2>&-"
    assert subprocess.run(["sh", "-c", command], check=False, stdout=subprocess.DEVNULL).returncode == 41


@pytest.mark.parametrize(("number", "words"), [(errno.ENOSPC, "no space is left"), (errno.EDQUOT, "quota of this user")])
def test_a_full_disk_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, words: str
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(number, os.strerror(number), "/var/lib/x")

    monkeypatch.setattr("pdd.commands.look.topology", fail)
    assert cli.run(["topology"]) == 77
    error = capsys.readouterr().err
    assert words in error
    assert "/var/lib/x" in error
    assert "[E771]" in error


def test_a_full_disk_under_stdout_is_told(daemon: fake_daemon.Running) -> None:
    command = [sys.executable, "-m", "pdd.cli", "--run-dir", str(daemon.run_dir), "status"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 77
    assert result.stderr.startswith("pdd: no space is left on the file system [E771].")
    assert len(result.stderr.splitlines()) == 1

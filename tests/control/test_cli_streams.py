"""The command with standard streams that are closed or full."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


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

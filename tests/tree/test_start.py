"""What starts fast imports little:

the budget of `pdd --help` and `pdd status` is a list of modules, not a stopwatch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

_HEAVY = {
    *("torch", "textual", "rich", "httpx", "starlette", "uvicorn", "numpy", "pydantic", "msgspec", "prometheus_client"),
    *("transformers", "asyncio", "pdd.fabric._native", "pdd.daemon"),
}


def imported(code: str) -> set[str]:
    """The modules that a fresh interpreter has after `code`."""
    script = f"import sys, json\n{code}\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    env = {name: value for name, value in os.environ.items() if not name.startswith("PDD_")}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env)
    return set(json.loads(result.stderr.splitlines()[-1]))


@pytest.mark.parametrize(
    "code",
    [
        "import pdd",
        "from pdd import cli; assert cli.run(['--help']) == 0",
        "from pdd import cli; assert cli.run(['-V']) == 0",
        "from pdd import cli; assert cli.run(['--run-dir', '/nonexistent', '-i', 'x', 'status']) == 3",
        "from pdd import cli; assert cli.run(['topology', '--json']) == 0",
    ],
)
def test_light(code: str) -> None:
    assert imported(code) & _HEAVY == set()


def test_a_picture_of_top_needs_no_textual() -> None:
    code = "from pdd import cli; assert cli.run(['--run-dir', '/nonexistent', '-i', 'x', 'top', '--once']) == 3"
    found = imported(code)
    assert "pdd.tui.frame" in found
    assert "textual" not in found


def test_the_list_can_fail() -> None:
    assert imported("import asyncio") & _HEAVY == {"asyncio"}

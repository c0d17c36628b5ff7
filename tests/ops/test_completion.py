"""`pdd completion SHELL`: the scripts know every word, and a TAB in the real shell finds it without starting pdd."""

from __future__ import annotations

import os
import pathlib
import pty
import re
import select
import subprocess
import time

import pytest

from pdd.commands import completion
from tests.ops.conftest import program

SHELLS = ("bash", "zsh", "fish")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    directory = tmp_path_factory.mktemp("completion")
    found = {}
    for shell in SHELLS:
        found[shell] = directory / ("_pdd" if shell == "zsh" else f"pdd.{shell}")
        found[shell].write_text(completion.script(shell))
    return found


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_has_every_command_and_option(shell: str, scripts: dict[str, pathlib.Path]) -> None:
    text = scripts[shell].read_text()
    for command in completion.commands():
        for name, _ in command.children:
            assert re.search(rf"\b{name}\b", text), name
        for option in command.options:
            for name in option.names:
                wanted = name if shell != "fish" else f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                assert wanted in text, (command.path, name)


def test_the_words_of_options_are_those_of_their_help() -> None:
    known = {}
    for command in completion.commands():
        for option in command.options:
            known.update({(command.path, name): option.help for name in option.names})
        if command.arguments:
            known.update({(command.path, metavar): "" for metavar in ("ACTION", "SHELL")})
    from pdd.commands.tree import program

    source = "".join(each.read_text() for each in pathlib.Path(program.__file__).parent.glob("*.py"))
    for (path, name), words in completion.WORDS.items():
        assert (path, name) in known, f"{path} {name} is no option or argument"
        text = known[path, name] or source
        if name != "--tab":  # its names are the screens'
            assert [word for word in words.split() if word not in text and name != "--level"] == [], (path, name)


def test_the_tabs_of_top_are_its_screens() -> None:
    from pdd.tui.scene import TABS

    assert completion.WORDS["top", "--tab"].split() == list(TABS)


def typed(argv: list[str], setup: str, keys: str, env: dict[str, str]) -> str:
    """What a shell on a terminal has on its screen after `keys`."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(argv[0], argv, {**os.environ, "TERM": "dumb", "PS1": "", **env})
    try:
        os.write(terminal, f"{setup}; PS1='rea''dy> '\n".encode())
        _read(terminal, "ready> ")
        os.write(terminal, keys.encode())
        return _read(terminal, None)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(terminal)


def _read(terminal: int, until: str | None) -> str:
    """What comes, up to a text; without one, until nothing came for half a second."""
    seen, deadline = "", time.monotonic() + 20
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.5 if until is None and seen else 5)[0]:
            seen += os.read(terminal, 65536).decode(errors="replace")
            if until is not None and until in seen:
                return seen
        elif until is None:
            return seen
    raise AssertionError(f"no {until!r} in {seen!r}")


@pytest.fixture
def node_dir(tmp_path: pathlib.Path) -> pathlib.Path:
    """A runtime directory with one node in it."""
    (tmp_path / "pdd" / "d7x").mkdir(parents=True)
    (tmp_path / "pdd" / "d7x" / "status.sock").touch()
    return tmp_path


CASES = [
    ("pdd stat", "pdd status"),
    ("pdd serve --rol", "--role "),
    ("pdd serve --role dec", "--role decode"),
    ("pdd --json config che", "config check"),
    ("pdd -i d7", "-i d7x"),
    ("pdd bench k", "bench kv"),
]


@pytest.mark.parametrize(("keys", "wanted"), [*CASES, ("pdd serve --role=pre", "--role=prefill")])
def test_a_tab_in_bash(keys: str, wanted: str, scripts: dict[str, pathlib.Path], node_dir: pathlib.Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(node_dir)}
    seen = typed(["bash", "--norc", "--noprofile", "-i"], f"source {scripts['bash']}", f"{keys}\t", env)
    assert wanted in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen), seen


@pytest.mark.parametrize(("keys", "wanted"), [CASES[2], ("pdd serve --role=pre", "--role=prefill")])
def test_a_tab_in_zsh(keys: str, wanted: str, scripts: dict[str, pathlib.Path], node_dir: pathlib.Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(node_dir), "HOME": str(node_dir)}
    setup = f"fpath=({scripts['zsh'].parent} $fpath); autoload -U compinit; compinit -u -D"
    seen = typed([program("zsh"), "-f", "-i"], setup, f"{keys}\t", env)
    assert wanted in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\x08", "", seen), seen


@pytest.mark.parametrize(("keys", "wanted"), CASES)
def test_a_tab_in_fish(keys: str, wanted: str, scripts: dict[str, pathlib.Path], node_dir: pathlib.Path) -> None:
    found = subprocess.run(
        [program("fish"), "--no-config", "-c", f"source {scripts['fish']}; complete -C '{keys}'"],
        capture_output=True, text=True, check=True, env={**os.environ, "XDG_RUNTIME_DIR": str(node_dir)},
    ).stdout  # fmt: skip
    assert wanted.split()[-1] in [line.split("\t")[0] for line in found.splitlines()], found

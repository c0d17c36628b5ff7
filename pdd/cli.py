"""The command `pdd`: global options, the way to a command, and the one place where an error becomes a line and an
exit code.

Global options may stand before or after the command: `split` takes them out. A command without options of its own
runs at once; everything else, and all help, goes through Typer (commands/tree/), which takes longer to import than
`pdd status` may take.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from pdd.commands.common import Globals, duration, print_error
from pdd.errors import EXIT_OK, PddError, UsageError, no_space

EXIT_INTERRUPTED = 130
EXIT_UNREAD = 141  # as if SIGPIPE had ended it, which it must not: a daemon that leaves is a closed pipe too

_LONG = {"-c": "--config", "-i": "--instance", "-q": "--quiet", "-v": "--verbose", "-V": "--version"}
_WITH_VALUE = ("--config", "--instance", "--run-dir", "--socket", "--color", "--timeout")
_WITHOUT_VALUE = ("--json", "--quiet", "--verbose", "--version")

# Commands that mean something without a word of their own; each is a function of commands/look.py.
_PLAIN = ("status", "requests", "peers", "transfers", "topology", "version")


_REPEATED = ("--instance", "--socket")


def split(words: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The global options of a command line (long name → values, "" for a switch), and the other words in their order.

    What follows `--` is left alone. Raises UsageError for a missing value.
    """
    found: dict[str, list[str]] = {}
    rest: list[str] = []
    waiting = iter(words)
    for word in waiting:
        if word == "--":
            rest += [word, *waiting]
            break
        option, equals, value = word.partition("=")
        option = _LONG.get(option, option)
        if option in _WITHOUT_VALUE and not equals:
            found[option] = [""]
        elif option in _WITH_VALUE:
            given = value if equals else next(waiting, None)
            if given is None:
                raise UsageError(f"option {word} needs a value", hint="See `pdd --help`.")
            found[option] = [*found.get(option, ()), given] if option in _REPEATED else [given]
        else:
            rest.append(word)
    return found, rest


def read_globals(found: dict[str, list[str]]) -> Globals:
    def one(option: str) -> str | None:
        return found[option][0] if option in found else None

    color = "auto" if one("--color") is None else one("--color")
    if color not in ("auto", "always", "never"):
        raise UsageError(f'--color: "{color}" is none of auto, always, never')
    config, run_dir = one("--config"), one("--run-dir")
    return Globals(
        config=None if config is None else Path(config),
        instances=tuple(found.get("--instance", ())),
        run_dir=None if run_dir is None else Path(run_dir),
        sockets=tuple(Path(path) for path in found.get("--socket", ())),
        json="--json" in found,
        color=color,
        quiet="--quiet" in found,
        verbose="--verbose" in found,
        timeout=duration(one("--timeout"), "--timeout"),
    )


def _plain(options: Globals, command: str) -> None:
    """Runs one of _PLAIN without Typer."""
    from pdd.commands import look

    action: Callable[[Globals], object] = getattr(look, command)
    action(options)


def dispatch(words: list[str]) -> int:
    """Runs one command line; the exit code. Errors are raised."""
    found, rest = split(words)
    if "--version" in found:
        from pdd.version import VERSION

        print(f"pdd {VERSION}")
        return EXIT_OK
    options = read_globals(found)
    if len(rest) == 1 and rest[0] in _PLAIN:
        _plain(options, rest[0])
        return EXIT_OK
    from pdd.commands.tree.program import app

    try:
        result = app(rest, obj=options, prog_name="pdd", standalone_mode=False)
    except SystemExit as error:  # Typer's answer to a closed pipe, and to nothing else in this mode
        if isinstance(error.__context__, BrokenPipeError):
            raise error.__context__ from None
        raise
    return result if isinstance(result, int) else EXIT_OK


def run(words: list[str]) -> int:
    """Runs one command line; the exit code. Prints the error, if there is one, and never a traceback."""
    try:
        code = dispatch(words)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except PddError as error:
        return _report(error, words)
    except BrokenPipeError:
        _forget(sys.stdout)
        return EXIT_UNREAD
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        if type(error).__name__ == "Abort":  # Typer's word for an interrupt
            return EXIT_INTERRUPTED
        return _report(_usage_error(error) or _no_space(error) or _bug(error), words)


def _report(error: PddError, words: list[str]) -> int:
    with _whoever_reads(sys.stderr):
        print_error(error, as_json="--json" in words)
    return error.exit_code


@contextlib.contextmanager
def _whoever_reads(stream: TextIO) -> Iterator[None]:
    """A reader that has left, and a file system that has no room for a message, change nothing."""
    try:
        yield
    except OSError:
        _forget(stream)


def _forget(stream: TextIO) -> None:
    """What is buffered, and whatever is yet to be written, has nowhere to go: the interpreter must not find that out."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _usage_error(error: Any) -> UsageError | None:
    """Typer's own complaint about the command line (its class is private in some versions)."""
    if not hasattr(error, "format_message"):
        return None
    path = error.ctx.command_path if getattr(error, "ctx", None) else "pdd"
    message = error.format_message()
    if "\n" in message:  # no_args_is_help: the message is the whole help
        with _whoever_reads(sys.stderr):
            print(message, file=sys.stderr)
        message = "a command is missing"
    message = message.rstrip(".")
    return UsageError(message[0].lower() + message[1:], hint=f"See `{path} --help`.")


def _no_space(error: Exception) -> PddError | None:
    found = no_space(error)
    if found is not None and sys.stdout is not None:
        try:
            sys.stdout.flush()
        except OSError:  # it was stdout that is full
            _forget(sys.stdout)
    return found


def _bug(error: Exception) -> PddError:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else ""
    return PddError(f"a bug in pdd: {type(error).__name__}: {error}{place}", hint="Please report it.")


def _open_standard_streams() -> None:
    """Whoever started this may have closed some: what is opened next must not become stdout, nor a stream be None."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != fd:
                os.dup2(nowhere, fd)
                os.close(nowhere)
            os.set_inheritable(fd, True)  # by ranks
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, mode, encoding="utf-8", closefd=False))  # noqa: SIM115  # for the life of it


def main() -> None:
    _open_standard_streams()
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()

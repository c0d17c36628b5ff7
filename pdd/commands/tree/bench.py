"""Measuring parts of a node."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdd.commands.tree.base import Command, also, bench_app


@bench_app.command("kv", cls=Command, epilog=also("-c FILE", "--json", "--timeout TIME", "-q"))
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

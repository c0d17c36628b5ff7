"""bench kv: how fast pages go between two nodes, or between two processes here. No daemon takes part."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdd.address import Address, parse_address
from pdd.commands.common import Globals, configured, duration, note, print_json, require_native, table
from pdd.errors import UsageError
from pdd.units import counted, format_size, show_bytes, show_duration

if TYPE_CHECKING:
    from pdd.bench.cells import Cell
    from pdd.bench.result import Report

_TIMEOUT = 10.0  # seconds, where --timeout does not say
_DEFAULTS: dict[str, Any] = {"--sizes": "4KiB,16KiB,64KiB,256KiB,1MiB", "--pages": "64",
                             "--layout": "scattered,adjacent", "--inflight": 16, "--seconds": "1s", "--repeats": 3}


@dataclasses.dataclass(frozen=True, slots=True)
class Where:
    """Where the two ends are: exactly one of these is given."""

    loopback: bool
    listen: str | None
    peer: str | None
    keep: bool = False  # go on listening


def kv(options: Globals, where: Where, wanted: Mapping[str, Any], nics: str, provider: str, token_file: Path | None) -> None:
    """`wanted`: the options of _DEFAULTS, None where one was not given."""
    if sum([where.loopback, where.listen is not None, where.peer is not None]) != 1:
        raise UsageError("give one of --loopback, --listen and --peer", hint="See `pdd bench kv --help`.")
    if where.listen is not None and (given := [name for name, value in wanted.items() if value is not None]):
        raise UsageError(f"{given[0]} belongs to the end that measures, which has --peer")
    if where.keep and where.listen is None:
        raise UsageError("--keep belongs to --listen")
    require_native()
    from pdd.bench import cells, run
    from pdd.bench.node import FabricOptions

    fabric = FabricOptions(provider=provider, library=configured(options.config, "fabric.library") or "",
                           nics=tuple(word.strip() for word in nics.split(",") if word.strip()))
    timeout = options.timeout or _TIMEOUT
    if where.listen is not None:
        address = _address(where.listen, "--listen")
        token = token_for(options, token_file, address)
        run.listen(address, token, fabric, options.timeout, timeout, lambda text: note(options, text), keep=where.keep)
        return
    chosen = {name: default if wanted[name] is None else wanted[name] for name, default in _DEFAULTS.items()}
    plan = cells.parse(chosen["--sizes"], chosen["--pages"], chosen["--layout"], chosen["--inflight"])
    seconds = duration(chosen["--seconds"], "--seconds")
    assert seconds is not None
    if where.peer is not None:
        address = _address(where.peer, "--peer")
        place = run.dial(address, token_for(options, token_file, address), fabric, plan, timeout)
    else:
        place = run.loopback(fabric, plan, timeout)
    progress = _Progress(options, plan, chosen["--repeats"])
    try:
        with place as reader:
            report = run.measure(reader, plan, seconds, chosen["--repeats"], progress)
    finally:
        progress.clear()
    if options.json:
        import msgspec

        print_json(msgspec.to_builtins(report))
    else:
        if where.loopback and provider == "auto":
            note(options, f"pdd: over {report.reader.provider}, as between machines; two nodes of one machine exchange KV "
                          "through its memory, which --provider local measures")
        print(text(report))


def _address(word: str, option: str) -> Address:
    try:
        return parse_address(word, listen=option == "--listen")
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


def token_for(options: Globals, file: Path | None, address: Address) -> bytes | None:
    """Of the file, else of the settings; none over loopback, unless one was named.

    Raises:
        UsageError: no token, and the address is not loopback. ConfigError: its file cannot be read.
    """
    from pdd.config_credentials import read_credential

    name = str(file.absolute()) if file else configured(options.config, "peers.token_credential") or ""
    tokens = read_credential(name, "--token-file" if file else "peers.token_credential")
    if tokens:
        return tokens[0].get_secret_value().encode()
    if not address.is_loopback:
        raise UsageError(f"{address} is not loopback: both ends must prove a shared token",
                         hint="Give --token-file FILE, or peers.token_credential in the settings.")
    return None


class _Progress:
    """What is being measured, on the terminal of whoever waits."""

    def __init__(self, options: Globals, cells: tuple[Cell, ...], repeats: int) -> None:
        self._shown = sys.stderr.isatty() and not options.quiet
        self._cells, self._repeats, self._done = cells, repeats, 0

    def __call__(self, cell: Cell, repeat: int) -> None:
        if self._shown:
            part = f"{cell.name}, repeat {repeat} of {self._repeats}" if repeat else f"{cell.name}, warming up"
            at = self._cells.index(cell) + 1
            print(f"\r[{at}/{len(self._cells)}] {part}\x1b[K", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def text(report: Report) -> str:
    """For people: the two ends, and a table."""
    lines = []
    for name, end in (("writer", report.writer), ("reader", report.reader)):
        rate = end.line_rate_bytes_per_second
        line = f", line rate {show_bytes(rate, 'B/s')}" if rate is not None else ", line rate not known"
        library = f" of libfabric {end.library_version}" if end.library_version else ""
        lines.append(f"{name}  {end.provider}{library}, {counted(len(end.nics), 'NIC')}: {', '.join(end.nics)}{line}")
    rows = [
        [
            format_size(row.page_bytes),
            row.pages,
            row.layout,
            f"{row.bytes_per_second / 1e9:.2f}",
            None if row.line_ratio is None else f"{row.line_ratio:.0%}",
            f"{row.pages_per_second:.0f}",
            f"{row.writes_per_second:.0f}",
            show_duration(row.p50_seconds),
            show_duration(row.p99_seconds),
            f"{row.writer_cores:.2f}",
            f"{row.reader_cores:.2f}",
            row.verified_pages,
        ]
        for row in report.rows
    ]
    header = ["PAGE", "PAGES", "LAYOUT", "GB/s", "%LINE", "PAGES/s", "WRITES/s", "P50", "P99", "CPU WR", "CPU RD", "VERIFIED"]
    return "\n".join([*lines, table(rows, header)])

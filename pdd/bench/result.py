"""What a benchmark of KV transfer found: the document that `pdd bench kv --json` prints, and how samples become a row of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:  # the schema is made without the native core
    from pdd.bench import wire
    from pdd.bench.cells import Cell
    from pdd.bench.node import BenchNode
    from pdd.bench.reader import Sample


class End(msgspec.Struct, frozen=True, kw_only=True):
    """One end's fabric."""

    provider: str
    library_version: str  # of libfabric; empty: none, as of local
    nics: tuple[str, ...]
    line_rate_bytes_per_second: float | None  # of its NICs together; null: not known, as of lo

    @classmethod
    def of_node(cls, node: BenchNode) -> End:
        return cls(provider=node.provider, library_version=node.library_version, nics=node.nics,
                   line_rate_bytes_per_second=node.line_rate)

    @classmethod
    def of_ready(cls, ready: wire.Ready) -> End:
        return cls(provider=ready.provider, library_version=ready.library_version, nics=ready.nics,
                   line_rate_bytes_per_second=ready.line_rate)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One combination; rates are medians over the repeats, percentiles over all requests."""

    page_bytes: int
    pages: int  # of one request
    layout: str
    inflight: int  # requests asked for at once
    repeats: int
    requests: int  # of all repeats
    seconds: float  # of all repeats
    bytes_per_second: float
    best_bytes_per_second: float
    line_ratio: float | None  # of the slower end's line rate; null where one of them is not known
    pages_per_second: float
    writes_per_second: float  # operations of the NICs
    p50_seconds: float  # from asking for a request to its last page counted
    p99_seconds: float
    reader_cores: float  # processor time of the process per second
    writer_cores: float
    verified_pages: int  # that were compared and are what was sent


class Report(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = "pdd.bench_kv/1"
    started: float  # seconds since 1970
    reader: End
    writer: End
    rows: tuple[Row, ...]


def row(cell: Cell, samples: Sequence[Sample], reader: End, writer: End) -> Row:
    rates = [sample.requests * cell.request_bytes / sample.seconds for sample in samples]
    rate = float(np.median(rates))
    latencies = np.concatenate([sample.latencies for sample in samples])
    line = None
    if reader.line_rate_bytes_per_second is not None and writer.line_rate_bytes_per_second is not None:
        line = min(reader.line_rate_bytes_per_second, writer.line_rate_bytes_per_second)
    return Row(
        page_bytes=cell.page_bytes, pages=cell.pages, layout=cell.layout, inflight=cell.depth, repeats=len(samples),
        requests=sum(sample.requests for sample in samples), seconds=sum(sample.seconds for sample in samples),
        bytes_per_second=rate, best_bytes_per_second=max(rates), line_ratio=rate / line if line else None,
        pages_per_second=rate / cell.page_bytes,
        writes_per_second=float(np.median([sample.writes / sample.seconds for sample in samples])),
        p50_seconds=float(np.quantile(latencies, 0.5)), p99_seconds=float(np.quantile(latencies, 0.99)),
        reader_cores=float(np.median([sample.reader_cores for sample in samples])),
        writer_cores=float(np.median([sample.writer_cores for sample in samples])),
        verified_pages=sum(sample.verified_pages for sample in samples),
    )

"""What a benchmark of KV transfer measures: cells of page size, pages per request and layout. Pure.

A cell has a pool of pages at each end. Entry i of the pool's order says which page of the writer goes to which page of
the reader; a request is a run of `pages` entries, and the requests take the runs in turn. Scattered: both orders are
shuffles, so nearly no neighbours stay neighbours. Adjacent: both are 0, 1, 2, ..., which the fabric may merge.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from pdd import units
from pdd.errors import UsageError

LAYOUTS = ("scattered", "adjacent")
POOL_BYTES = 256 << 20  # more than caches hold
MAX_POOL_BYTES = 1 << 30
MAX_POOL_PAGES = 1 << 18
MAX_CELLS = 256

Pages = np.ndarray[Any, np.dtype[np.int64]]


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    page_bytes: int
    pages: int  # of one request
    layout: str
    inflight: int = 16  # requests asked for and not yet whole; fewer where the pool does not hold so many

    @property
    def request_bytes(self) -> int:
        return self.pages * self.page_bytes

    @property
    def num_slots(self) -> int:
        """Requests that the pool holds side by side."""
        room = min(POOL_BYTES // self.page_bytes, MAX_POOL_PAGES)
        return max(1, room // self.pages)

    @property
    def num_pages(self) -> int:
        """Of the pool."""
        return self.num_slots * self.pages

    @property
    def pool_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def depth(self) -> int:
        """Requests in flight: no two of them share a page."""
        return min(self.inflight, self.num_slots)

    @property
    def name(self) -> str:
        return f"{units.format_size(self.page_bytes)} x {self.pages} {self.layout}"


def order(num_pages: int, layout: str, seed: int) -> Pages:
    """The pages of a pool in the order of their requests."""
    if layout == "adjacent":
        return np.arange(num_pages, dtype=np.int64)
    return np.random.default_rng(seed).permutation(num_pages).astype(np.int64)


def parse(sizes: str, pages: str, layouts: str, inflight: int) -> tuple[Cell, ...]:
    """Every combination of three lists with commas, in this order.

    Raises:
        UsageError: names the option and the word.
    """
    found = [Cell(size, count, layout, inflight) for size, count, layout in itertools.product(
        [_size(word) for word in _words(sizes)], [_count(word) for word in _words(pages)],
        [_layout(word) for word in _words(layouts)],
    )]
    if not 1 <= len(found) <= MAX_CELLS:
        raise UsageError(f"--sizes, --pages and --layout make {len(found)} combinations; 1 to {MAX_CELLS} are allowed")
    for cell in found:
        if cell.pool_bytes > MAX_POOL_BYTES:
            most, asked = units.format_size(MAX_POOL_BYTES), units.format_size(cell.request_bytes)
            raise UsageError(f"a request of {cell.pages} pages of {units.format_size(cell.page_bytes)} is {asked}; at "
                             f"most {most} are allowed", hint="Give fewer --pages or smaller --sizes.")
    return tuple(found)


def _words(text: str) -> Sequence[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _size(word: str) -> int:
    try:
        nbytes = units.parse_size(word)
    except ValueError as error:
        raise UsageError(f"--sizes: {error}") from None
    if not 64 <= nbytes <= MAX_POOL_BYTES:
        raise UsageError(f"--sizes: {word} is no size of a page; 64B to {units.format_size(MAX_POOL_BYTES)} are")
    return nbytes


def _count(word: str) -> int:
    if not (word.isascii() and word.isdigit() and 1 <= int(word) <= 65536):
        raise UsageError(f'--pages: "{word}" is not a number of pages, 1 to 65536')
    return int(word)


def _layout(word: str) -> str:
    if word not in LAYOUTS:
        raise UsageError(f'--layout: "{word}" is none of {", ".join(LAYOUTS)}')
    return word

"""The waterfall of a prefiller's latest transfer: layer by chunk, when each was computed, armed, posted and completed.

It is made when somebody looks: an event stream that asks gets what was made last, and has the next one made if a
transfer has ended since. A node that nobody watches does nothing for it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterable, Sequence

from pdd.control import schema
from pdd.fabric.types import FlightLayer, FlightPlan
from pdd.messenger.ports import FlightPort
from pdd.messenger.status import JobDone

_MOST_CELLS = 1024  # of a document: neighbouring layers are told as one beyond that
_log = logging.getLogger(__name__)


class Waterfalls:
    """Owner: the main loop."""

    def __init__(self) -> None:
        self._newest: JobDone | None = None
        self._made: JobDone | None = None
        self._document = schema.Waterfall(id="")
        self._making: asyncio.Task[None] | None = None

    def job_done(self, job: JobDone) -> None:
        if job.transfer is not None and job.units:
            self._newest = job

    def latest(self, flight: FlightPort | None) -> schema.Waterfall:
        """The one that was made last; its id is "" before any was."""
        job = self._newest
        if job is not None and job is not self._made and flight is not None and self._making is None:
            self._making = asyncio.get_running_loop().create_task(self._make(job, flight), name="waterfall")
        return self._document

    async def _make(self, job: JobDone, flight: FlightPort) -> None:
        try:
            assert job.transfer is not None
            self._document = document(job, await flight.plans(job.transfer))
            self._made = job
        except (RuntimeError, TimeoutError) as error:  # the next look tries again
            _log.debug("no waterfall of %s: %r", job.request_id, error)
        finally:
            self._making = None


@dataclasses.dataclass(slots=True)
class _Cell:
    """One layer of one chunk, over all ranks."""

    armed: float
    begin: float | None = None
    ready: float | None = None
    posted: float | None = None
    landed: float | None = None
    whole: bool = True


def document(job: JobDone, plans: Sequence[FlightPlan]) -> schema.Waterfall:
    """Of a transfer that has ended. Times count from the first arming. A layer's compute begins where the one before it
    ended; the first layer of a chunk, where the chunk was armed, which is just before its step."""
    cells = _cells(plans)
    origin = min((plan.armed for plan in plans), default=job.received)
    seconds = job.finished - origin
    hidden = 1.0 - job.exposed_seconds / job.busy_seconds if job.busy_seconds > 0 else None

    def at(time: float | None) -> float | None:
        return None if time is None else round(time - origin, 7)

    return schema.Waterfall(
        id=job.request_id, peer=job.peer, direction="out", tokens=job.num_tokens, bytes=job.bytes,
        seconds=round(seconds, 7), exposed_seconds=job.exposed_seconds,
        hidden_ratio=None if hidden is None else max(0.0, hidden),
        cells=tuple(
            schema.WaterfallCell(
                chunk=chunk, layer=layer, compute_begin_seconds=at(cell.begin), compute_end_seconds=at(cell.ready),
                armed_seconds=at(cell.armed), posted_seconds=at(cell.posted),
                landed_seconds=at(cell.landed) if cell.whole else None,
            )
            for (chunk, layer), cell in cells.items()
        ),
    )


def _cells(plans: Sequence[FlightPlan]) -> dict[tuple[int, int], _Cell]:
    values = sorted({plan.first_value for plan in plans})
    layers = max((plan.num_layers for plan in plans), default=1)
    together = max(1, -(-len(values) * layers // _MOST_CELLS))
    cells: dict[tuple[int, int], _Cell] = {}
    for chunk, value in enumerate(values):
        here = [plan for plan in plans if plan.first_value == value]
        armed = min(plan.armed for plan in here)
        before = armed
        for first in range(0, layers, together):
            mine = [(plan, layer) for plan in here for layer in plan.layers if first <= layer.layer < first + together]
            if not mine:
                continue
            cell = cells[chunk, first] = _Cell(armed, before)
            cell.ready = _latest(layer.ready for _, layer in mine)
            cell.posted = min((layer.first_post for _, layer in mine if layer.first_post is not None), default=None)
            cell.landed = _latest(layer.last_end for _, layer in mine)
            cell.whole = all(_is_whole(plan, layer) for plan, layer in mine)
            if cell.ready is None:
                cell.begin = None
            else:
                before = cell.ready
    return cells


def _is_whole(plan: FlightPlan, layer: FlightLayer) -> bool:
    return layer.ok == plan.units


def _latest(times: Iterable[float | None]) -> float | None:
    return max((time for time in times if time is not None), default=None)

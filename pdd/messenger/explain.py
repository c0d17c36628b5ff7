"""A prefiller's half of the story of one attempt: from its job and the fabric's memory of the writes. Pure, but for asking
the fabric.

A unit is in one of these states, layer by layer and chunk by chunk: its layer is not computed; computed and not posted;
in flight on a NIC; completed here; failed; of unknown fate. What is not completed is a `Lack`; neighbouring layers that
lack the same are one. A chunk is what one step made sendable; tokens that no step has taken yet have no chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from pdd.fabric.types import FlightLayer, FlightPlan
from pdd.messenger import wire
from pdd.messenger.ports import FlightPort
from pdd.messenger.status import JobDone, JobStatus

NOT_COMPUTED, NOT_POSTED, IN_FLIGHT, FAILED, UNKNOWN = "not computed", "not posted", "in flight", "failed", "unknown"
_WORST_FIRST = (FAILED, UNKNOWN, IN_FLIGHT, NOT_POSTED, NOT_COMPUTED)
_MOST_LACKS = 64  # as the wire allows
LOCAL_NIC = "memory of this host"


@dataclasses.dataclass(frozen=True, slots=True)
class Push:
    """What the prefiller knows of a job without the fabric. Times of the node's clock; None: not yet."""

    state: str
    since: float
    why: str
    received: float
    started: float | None
    computed: float | None
    finished: float | None
    exposed_seconds: float | None
    tokens: int
    computed_tokens: int
    units: int
    ok_units: int
    failed_units: int
    unknown_units: int
    transfer: int | None
    peer_tp: int  # ranks of an engine of the decoder: of its regions, one engine's after the other's


def push_of(job: JobStatus, now: float) -> Push:
    """Of a job in hand."""
    return Push(
        state=job.state, since=now - job.age_seconds, why=job.why, received=job.received, started=job.started,
        computed=job.computed, finished=None, exposed_seconds=None, tokens=job.num_tokens,
        computed_tokens=job.computed_tokens, units=job.units, ok_units=0, failed_units=0, unknown_units=0,
        transfer=job.transfer, peer_tp=job.peer_tp,
    )


def push_that_ended(done: JobDone) -> Push:
    return Push(
        state="done" if done.whole else done.reason, since=done.finished, why=done.error, received=done.received,
        started=done.started, computed=done.computed, finished=done.finished, exposed_seconds=done.exposed_seconds,
        tokens=done.num_tokens, computed_tokens=done.computed_tokens, units=done.expected_units, ok_units=done.units,
        failed_units=done.failed_units, unknown_units=done.unknown_units, transfer=done.transfer,
        peer_tp=done.peer_tp,
    )


async def explained(
    request: wire.ExplainRequest, push: Push | None, flight: FlightPort | None, regions: Sequence[int],
    clock: Callable[[], float],
) -> wire.ExplainAnswer:
    """The answer to a question. `regions`: of this node's ranks, in their order."""
    plans: Sequence[FlightPlan] = ()
    note = ""
    if push is not None and push.transfer is not None and flight is not None:
        try:
            plans = await flight.plans(push.transfer)
        except (RuntimeError, TimeoutError) as error:  # FabricError: the fabric is closed, or its worker hangs
            note = f"the fabric does not say what it wrote: {error}"
    names = flight.nic_names if flight is not None else ()
    return answer(request, push, plans, names, regions, clock(), note)


def answer(
    request: wire.ExplainRequest, push: Push | None, plans: Sequence[FlightPlan], nic_names: Sequence[str],
    regions: Sequence[int], now: float, note: str = "",
) -> wire.ExplainAnswer:
    if push is None:
        return wire.ExplainAnswer(ask=request.ask, attempt=request.attempt, known=False)
    found = sorted(lacks(plans, nic_names, regions, push.peer_tp, now), key=_badness)
    counted = [(layer.ok, layer.failed, layer.unknown) for plan in plans for layer in plan.layers]
    ok, failed, unknown = (sum(each) for each in zip(*counted, strict=True)) if counted else (0, 0, 0)
    over = push.finished is not None
    return wire.ExplainAnswer(
        ask=request.ask, attempt=request.attempt, known=True, state=push.state,
        state_seconds=max(0.0, now - push.since), why=(push.why + ("; " if push.why and note else "") + note)[:4000],
        queue_seconds=_span(push.received, push.started, push.finished, now),
        compute_seconds=_span(push.started, push.computed, push.finished, now),
        send_seconds=_span(push.computed, push.finished, push.finished, now),
        exposed_seconds=push.exposed_seconds, tokens=push.tokens, computed_tokens=push.computed_tokens,
        units=push.units, ok_units=push.ok_units if over else ok, failed_units=push.failed_units if over else failed,
        unknown_units=push.unknown_units if over else unknown, steps=len({plan.first_value for plan in plans}),
        lacks=tuple(found[:_MOST_LACKS]), more_lacks=max(0, len(found) - _MOST_LACKS),
    )


def lacks(
    plans: Sequence[FlightPlan], nic_names: Sequence[str], regions: Sequence[int], peer_tp: int, now: float
) -> list[wire.Lack]:
    """Everything that is not completed, neighbouring layers together."""
    chunk_of = {value: number for number, value in enumerate(sorted({plan.first_value for plan in plans}))}
    found: list[wire.Lack] = []
    for plan in plans:
        from_rank = regions.index(plan.src_region) if plan.src_region in regions else plan.src_region
        to_rank = plan.dst_region % peer_tp
        last: dict[tuple[str, str], int] = {}  # of this plan, the place of the lack that the next layer may join
        for layer in plan.layers:
            for what, nic, units, since in _of_layer(plan, layer, nic_names):
                place = last.get((what, nic))
                if place is not None and found[place].last_layer == layer.layer - 1:
                    before = found[place]
                    found[place] = wire.Lack(
                        what, before.chunk, before.first_layer, layer.layer, from_rank, to_rank, nic,
                        before.units + units, max(before.seconds, now - since),
                    )
                    continue
                last[what, nic] = len(found)
                found.append(wire.Lack(
                    what, chunk_of[plan.first_value], layer.layer, layer.layer, from_rank, to_rank, nic, units,
                    max(0.0, now - since),
                ))
    return found


def _of_layer(
    plan: FlightPlan, layer: FlightLayer, names: Sequence[str]
) -> Iterator[tuple[str, str, int, float]]:
    """(what, NIC, units, since when) of one layer."""
    ended = layer.last_end or plan.armed
    refused = _joined(layer.failed_nics, names)
    if layer.failed:
        yield FAILED, refused, layer.failed, ended
    if layer.unknown:
        yield UNKNOWN, refused, layer.unknown, ended
    by_nic: dict[int, int] = {}
    for nic, units in layer.in_flight:
        by_nic[nic] = by_nic.get(nic, 0) + units
    for nic, units in sorted(by_nic.items()):
        yield IN_FLIGHT, _joined((nic,), names), units, layer.first_post or plan.armed
    left = plan.units - layer.posted
    if left > 0 and layer.ready is None:
        yield NOT_COMPUTED, "", left, plan.armed
    elif left > 0:
        yield NOT_POSTED, "", left, layer.ready or plan.armed


def nic_name(nic: int, names: Sequence[str]) -> str:
    """As FlightLayer numbers it."""
    return LOCAL_NIC if nic < 0 else names[nic] if nic < len(names) else f"NIC {nic}"


def _joined(nics: Sequence[int], names: Sequence[str]) -> str:
    return "+".join(nic_name(nic, names) for nic in nics)[:200]


def _badness(lack: wire.Lack) -> tuple[int, int, int]:
    return _WORST_FIRST.index(lack.what), lack.chunk, lack.first_layer


def _span(begin: float | None, end: float | None, over: float | None, now: float) -> float | None:
    """From `begin` to `end`, to the end of all, or to now."""
    if begin is None:
        return None
    return max(0.0, (end if end is not None else over if over is not None else now) - begin)

"""What a node's flight recorder holds, for `explain`, the waterfall, dumps and bundles.

State changes come from `pdd.history`, writes from the fabric's workers. Those are asked on a thread of its own, with a
deadline: a worker that hangs in its provider holds up whoever wants to know, and nobody else.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from pdd.control import schema, stories
from pdd.daemon import stacks
from pdd.fabric.types import Caps, FlightLayer, FlightPlan
from pdd.history import History
from pdd.messenger.explain import nic_name
from pdd.states import Change

if TYPE_CHECKING:
    from pdd.fabric.engine import Fabric

PATIENCE = 1.0  # seconds for the workers' answer
MOST_PLANS = 256  # of each rail group, in a dump
_MOST_CHANGES = 4096


class FlightReader:
    """FlightPort of a fabric. Owner: the main loop."""

    def __init__(self, fabric: Fabric, caps: Caps) -> None:
        self._fabric = fabric
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="flight")
        self.nic_names: tuple[str, ...] = tuple(nic.address or nic.domain for nic in caps.nics)

    async def plans(self, transfer: int = 0, most: int = 4096) -> list[FlightPlan]:
        """Of one transfer, or, for 0, of all: the latest `most` of each rail group, the oldest first.

        Raises:
            FabricError: the fabric is closed.
            TimeoutError: a worker does not answer.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(PATIENCE):
            return await loop.run_in_executor(self._thread, self._fabric.read_flight, transfer, most)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Sources:
    """Whose flight, and where it is remembered."""

    name: str
    role: str
    boot_id: str
    version: str
    history: History
    requests: Callable[[], Sequence[schema.Request]]  # the live ones, without prompts
    plans: FlightReader | None  # None: it has no fabric
    with_stacks: bool


async def document(of: Sources, why: str) -> stories.Flight:
    """All of it, with where the threads are."""
    plans: Sequence[FlightPlan] = ()
    unknown = None
    if of.plans is None:
        unknown = "this node has no fabric"
    else:
        try:
            plans = await of.plans.plans(0, MOST_PLANS)
        except (RuntimeError, TimeoutError) as error:
            unknown = f"the fabric's workers do not answer: {error!r}"
    names = () if of.plans is None else of.plans.nic_names
    return stories.Flight(
        name=of.name, role=of.role, boot_id=of.boot_id, version=of.version, why=why, ts=time.time(),
        ts_mono=time.monotonic(), changes=tuple(map(_change, of.history.latest(_MOST_CHANGES))),
        plans=tuple(_plan(plan, names) for plan in plans), plans_unknown=unknown, requests=tuple(of.requests()),
        stacks=stacks.document() if of.with_stacks else None,
    )


def _change(change: Change) -> stories.FlightChange:
    facts = change.facts
    return stories.FlightChange(
        at=change.at, kind=change.kind, of=change.ident, before=change.before, state=change.after, why=change.why,
        peer=facts.peer, attempt=facts.attempt, key=facts.key, units=facts.units, step=facts.step,
    )


def _plan(plan: FlightPlan, names: Sequence[str]) -> stories.FlightPlan:
    return stories.FlightPlan(
        transfer=plan.transfer, key=plan.key, from_region=plan.src_region, to_region=plan.dst_region,
        first_value=plan.first_value, units=plan.units, armed=plan.armed,
        layers=tuple(_layer(layer, names) for layer in plan.layers),
    )


def _layer(layer: FlightLayer, names: Sequence[str]) -> stories.FlightLayer:
    return stories.FlightLayer(
        layer=layer.layer, ready=layer.ready, first_post=layer.first_post, last_post=layer.last_post,
        last_end=layer.last_end, posted=layer.posted, ok=layer.ok, failed=layer.failed, unknown=layer.unknown,
        nics=tuple(nic_name(nic, names) for nic in layer.nics),
        failed_nics=tuple(nic_name(nic, names) for nic in layer.failed_nics),
    )

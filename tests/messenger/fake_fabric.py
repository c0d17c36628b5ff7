"""An in-memory fabric with the semantics of `pdd/fabric/_native.pyi`, as unkind as the contract allows.

Writes of one transfer land in any order, local completion may come before or after landing, a closing endpoint lets
writes land until ENDPOINT_CLOSED is said, a write in flight lands although its source endpoint has closed, and keys
are reused as soon as they are free. Every page's content is modelled: a write carries what the source page holds when
it is read.

`violations` collects what must never happen: a key retired or a page given up while a write that names it can still
land.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import random
import struct
import threading
from collections.abc import Callable, Iterable
from typing import Any

from pdd.fabric.types import EndpointClosed, EndpointFailed, Event, ImmOverrun, ImmReached, TransferDone, TransferEnd

_DESCRIPTOR = struct.Struct(">4sIQ")


class FakeFabricError(RuntimeError):
    pass


class FakeCounter:
    """The layer counter."""

    def __init__(self) -> None:
        self.value = 0
        self.on_bump: list[Callable[[], None]] = []

    def bump(self) -> None:
        self.value += 1
        for call in list(self.on_bump):
            call()


@dataclasses.dataclass
class FakePlan:
    """WritePlan: entry i copies page src[i] to page dst[i], worth one unit, for each layer."""

    src: tuple[int, ...]
    dst: tuple[int, ...]
    num_layers: int


@dataclasses.dataclass(eq=False)
class Armed:
    first_value: int
    plan: FakePlan
    begin: int
    end: int
    next_layer: int = 0


@dataclasses.dataclass(eq=False)
class Transfer:
    ident: int
    endpoint: int
    key: int
    armed: list[Armed] = dataclasses.field(default_factory=list)
    open: bool = True  # admission
    outstanding: int = 0
    ok: int = 0
    failed: int = 0
    unknown: int = 0
    error: str = ""
    done: bool = False


@dataclasses.dataclass(eq=False)
class Write:
    source: FakeFabric
    transfer: Transfer
    target: FakeFabric
    target_endpoint: int
    layer: int
    src_page: int
    dst_page: int
    content: Any = None
    read: bool = False
    landed: bool = False
    completed: bool = False
    lost: bool = False
    held: bool = False

    @property
    def may_land(self) -> bool:
        return not self.landed and not self.lost and self.target.endpoint_lands(self.target_endpoint)


@dataclasses.dataclass
class Endpoint:
    peer: tuple[FakeFabric, int] | None = None
    closing: bool = False
    local: bool = False


@dataclasses.dataclass
class Slot:
    endpoint: int
    arrived: int = 0
    expected: int | None = None
    reached: bool = False
    overrun: bool = False


class FakeNetwork:
    """What connects fabrics. `delay` gives seconds for one write's landing or completion."""

    def __init__(self, seed: int = 0, most_delay: float = 0.004) -> None:
        self.rng = random.Random(seed)
        self.most_delay = most_delay
        self.least_landing = 0.0
        self.fabrics: dict[int, FakeFabric] = {}
        self.in_flight: set[Write] = set()
        self.violations: list[str] = []
        self.num_landed = 0

    def delay(self) -> float:
        return self.rng.random() * self.most_delay

    def can_land(self, target: FakeFabric, pages: Iterable[int]) -> str:
        """A write that names one of `pages` and may still land; "" when there is none."""
        wanted = set(pages)
        for write in self.in_flight:
            if write.target is target and write.may_land and write.dst_page in wanted:
                return f"layer {write.layer} of page {write.dst_page} is in flight"
        for fabric in self.fabrics.values():
            for transfer, plan_pages in fabric.armed_pages(target):
                if wanted & plan_pages:
                    return f"transfer {transfer.ident} is armed for page {min(wanted & plan_pages)}"
        return ""

    def key_is_live(self, target: FakeFabric, endpoint: int, key: int) -> bool:
        if not target.endpoint_lands(endpoint):
            return False
        if any(
            w.target is target and w.target_endpoint == endpoint and w.transfer.key == key and w.may_land
            for w in self.in_flight
        ):
            return True
        return any(t.key == key for fabric in self.fabrics.values() for t, _ in fabric.armed_pages(target))


class FakeFabric:
    def __init__(self, network: FakeNetwork, name: str, counter: FakeCounter | None = None) -> None:
        self.name = name
        self.network = network
        self.ident = len(network.fabrics) + 1
        network.fabrics[self.ident] = self
        self.memory: dict[tuple[int, int], Any] = {}  # (layer, page) -> content
        self.counter = counter
        if counter is not None:
            counter.on_bump.append(self._fire)
        self.close_delay = 0.0
        self.never_close = False  # ENDPOINT_CLOSED never comes
        self.fail_open_endpoint = False
        self.fail_open_local = ""  # how opening a local endpoint fails
        self.fail_connect_local = ""  # and connecting it
        self.num_opened = {False: 0, True: 0}  # endpoints, local ones under True
        self.fail_open_transfer = False
        self.fail_close = ""  # how close_endpoint fails: "at once", "later" or not
        self.may_open, self.may_describe, self.may_connect = threading.Event(), threading.Event(), threading.Event()
        for gate in (self.may_open, self.may_describe, self.may_connect):
            gate.set()
        self.faults: list[tuple[str, int]] = []  # (kind, the n-th write from now)
        self.stale_units = 0
        self.endpoints: dict[int, Endpoint] = {}
        self.slots: dict[int, Slot] = {}
        self.transfers: dict[int, Transfer] = {}
        self._ids = itertools.count(1)
        self._events: list[tuple[Any, ...]] = []
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.on_land: Callable[[Write], None] = lambda write: None

    # -- events ---------------------------------------------------------------------------------------------------
    def fileno(self) -> int:
        return self._fd

    def read_events(self, max_events: int = 1024) -> list[Event]:
        batch, self._events = self._events[:max_events], self._events[max_events:]
        if not self._events:
            try:
                os.eventfd_read(self._fd)
            except BlockingIOError:
                return batch
        return batch

    def close(self) -> None:
        os.close(self._fd)

    def _emit(self, event: Event) -> None:
        self._events.append(event)
        os.eventfd_write(self._fd, 1)

    # -- endpoints ------------------------------------------------------------------------------------------------
    def open_endpoint(self, local: bool = False) -> int:
        self._wait(self.may_open)
        if local and self.fail_open_local:
            raise FakeFabricError(self.fail_open_local)
        if self.fail_open_endpoint:
            raise FakeFabricError("fi_endpoint: no such device")
        ident = next(self._ids)
        self.endpoints[ident] = Endpoint(local=local)
        self.num_opened[local] += 1
        return ident

    def _wait(self, gate: threading.Event) -> None:
        """A provider that takes its time. Never on the main loop: nobody could open the gate there."""
        if threading.current_thread() is threading.main_thread():
            self.network.violations.append(f"{self.name}: the main loop waits for the fabric")
        else:
            assert gate.wait(20.0)

    def describe(self, endpoint: int, regions: list[int]) -> bytes:
        self._wait(self.may_describe)
        return _DESCRIPTOR.pack(b"fake", self.ident, endpoint)

    def connect(self, endpoint: int, descriptor: bytes) -> None:
        self._wait(self.may_connect)
        if len(descriptor) != _DESCRIPTOR.size or not descriptor.startswith(b"fake"):
            raise FakeFabricError("fi_av_insert: malformed descriptor")
        if self.endpoints[endpoint].local and self.fail_connect_local:
            raise FakeFabricError(self.fail_connect_local)
        _, ident, peer_endpoint = _DESCRIPTOR.unpack(descriptor)
        self.endpoints[endpoint].peer = (self.network.fabrics[ident], peer_endpoint)

    def close_endpoint(self, endpoint: int) -> None:
        state = self.endpoints.get(endpoint)
        if state is None or state.closing:
            raise FakeFabricError(f"no endpoint {endpoint}")
        if self.fail_close == "at once":
            raise FakeFabricError("fi_close: no thread to do it")
        state.closing = True
        if self.fail_close == "later":
            self._emit(EndpointFailed(endpoint, "fi_close: device or resource busy"))
            return
        for transfer in self._transfers_of(endpoint):
            transfer.open = False
            transfer.armed.clear()
        if not self.never_close:
            asyncio.get_running_loop().call_later(self.close_delay, self._closed, endpoint)

    def _closed(self, endpoint: int) -> None:
        for transfer in self._transfers_of(endpoint):
            for write in [w for w in self.network.in_flight if w.transfer is transfer and not w.completed]:
                self._complete(write, "unknown", "canceled")
            if not transfer.done:
                self._finish_if_over(transfer)
        del self.endpoints[endpoint]
        self._emit(EndpointClosed(endpoint))

    def fail_endpoint(self, endpoint: int, message: str) -> None:
        self._emit(EndpointFailed(endpoint, message))

    def endpoint_lands(self, endpoint: int) -> bool:
        return endpoint in self.endpoints

    def _transfers_of(self, endpoint: int) -> list[Transfer]:
        return [t for t in self.transfers.values() if t.endpoint == endpoint]

    # -- receiving ------------------------------------------------------------------------------------------------
    def imm_allocate(self, endpoint: int) -> int:
        if endpoint not in self.endpoints or self.endpoints[endpoint].closing:
            raise FakeFabricError(f"no endpoint {endpoint}")
        key = next(k for k in range(1, 1 << 24) if k not in self.slots)
        self.slots[key] = Slot(endpoint)
        return key

    def imm_arm(self, key: int, expected: int) -> None:
        self.slots[key].expected = expected
        self._judge(key)

    def imm_arrived(self, key: int) -> int:
        return self.slots[key].arrived

    def imm_retire(self, key: int) -> int:
        slot = self.slots.pop(key)
        if self.network.key_is_live(self, slot.endpoint, key):
            self.network.violations.append(f"{self.name}: key {key} is retired while a write with it can still land")
        return slot.arrived

    def _judge(self, key: int) -> None:
        slot = self.slots[key]
        if slot.expected is None:
            return
        if slot.arrived >= slot.expected and not slot.reached:
            slot.reached = True
            self._emit(ImmReached(key, slot.arrived))
        if slot.arrived > slot.expected and not slot.overrun:
            slot.overrun = True
            self._emit(ImmOverrun(key, slot.arrived))

    # -- sending --------------------------------------------------------------------------------------------------
    def open_transfer(self, endpoint: int, key: int) -> int:
        state = self.endpoints.get(endpoint)
        if self.fail_open_transfer or state is None or state.closing or state.peer is None:
            raise FakeFabricError(f"endpoint {endpoint} is not connected")
        ident = next(self._ids)
        self.transfers[ident] = Transfer(ident, endpoint, key)
        return ident

    def arm(self, transfer: int, watch: int, first_value: int, plan: FakePlan, begin: int, end: int) -> None:
        state = self.transfers.get(transfer)
        if state is None or not state.open:
            return  # it has ended: a write failed, its link is gone, or it was cancelled
        if not 0 <= begin < end <= len(plan.src):
            raise FakeFabricError(f"entries [{begin}, {end}) are not in the plan")
        state.armed.append(Armed(first_value, plan, begin, end))
        self._fire()

    def finish(self, transfer: int) -> None:
        self._end(transfer, drop=False)

    def cancel(self, transfer: int) -> None:
        self._end(transfer, drop=True)

    def _end(self, transfer: int, *, drop: bool) -> None:
        state = self.transfers.get(transfer)
        if state is None:
            return
        state.open = False
        if drop:
            state.armed.clear()
        self._finish_if_over(state)

    def armed_pages(self, target: FakeFabric) -> list[tuple[Transfer, set[int]]]:
        """Pages of `target` that transfers from here may still post writes to."""
        found = []
        for transfer in self.transfers.values():
            peer = self.endpoints[transfer.endpoint].peer if transfer.endpoint in self.endpoints else None
            if transfer.armed and peer is not None and peer[0] is target and target.endpoint_lands(peer[1]):
                pages = {page for armed in transfer.armed for page in armed.plan.dst[armed.begin : armed.end]}
                found.append((transfer, pages))
        return found

    def inject_fault(self, kind: str, after: int, count: int = 1) -> None:
        self.faults += [(kind, after + i) for i in range(count)]

    def _fault(self) -> str:
        """What befalls the write that is posted now."""
        self.faults = [(kind, n - 1) for kind, n in self.faults]
        hit = next((kind for kind, n in self.faults if n == 0), "")
        self.faults = [(kind, n) for kind, n in self.faults if n > 0]
        return hit

    def _fire(self) -> None:
        """Posts what the counter allows."""
        assert self.counter is not None
        for transfer in list(self.transfers.values()):
            for armed in list(transfer.armed):
                num_ready = min(armed.plan.num_layers, self.counter.value - armed.first_value + 1)
                while armed in transfer.armed and armed.next_layer < num_ready:
                    layer, armed.next_layer = armed.next_layer, armed.next_layer + 1
                    for entry in range(armed.begin, armed.end):
                        if armed not in transfer.armed:  # a write before has failed, and ended the transfer
                            break
                        self._post(transfer, layer, armed.plan.src[entry], armed.plan.dst[entry])
                if armed.next_layer >= armed.plan.num_layers and armed in transfer.armed:
                    transfer.armed.remove(armed)
            self._finish_if_over(transfer)

    def _post(self, transfer: Transfer, layer: int, src_page: int, dst_page: int) -> None:
        peer = self.endpoints[transfer.endpoint].peer
        assert peer is not None
        write = Write(self, transfer, *peer, layer, src_page, dst_page)
        transfer.outstanding += 1
        fault = self._fault()
        if fault == "error":
            write.lost = True
            self._complete(write, "failed", "injected error")
            return
        write.lost = fault == "lost"
        write.held = fault == "hold"
        self.network.in_flight.add(write)
        loop = asyncio.get_running_loop()
        if not write.lost:
            loop.call_later(self.network.least_landing + self.network.delay(), self._land, write)
        if not write.held:
            loop.call_later(self.network.delay(), self._complete, write, "ok", "")

    def _read(self, write: Write) -> None:
        if not write.read:
            write.read = True
            write.content = self.memory.get((write.layer, write.src_page))

    def _land(self, write: Write) -> None:
        target = write.target
        self._read(write)
        write.landed = True
        if not target.endpoint_lands(write.target_endpoint):
            if not write.completed:
                self._complete(write, "unknown", "connection reset")
        else:
            self.network.num_landed += 1
            target.memory[(write.layer, write.dst_page)] = write.content
            target.on_land(write)
            slot = target.slots.get(write.transfer.key)
            if slot is None or slot.endpoint != write.target_endpoint:
                target.stale_units += 1
            else:
                slot.arrived += 1
                target._judge(write.transfer.key)
        self._forget(write)

    def _complete(self, write: Write, how: str, error: str) -> None:
        if write.completed:
            return
        self._read(write)
        write.completed = True
        transfer = write.transfer
        transfer.outstanding -= 1
        setattr(transfer, how, getattr(transfer, how) + 1)
        transfer.error = transfer.error or error
        if how == "failed":  # a failed write ends its transfer
            transfer.open = False
            transfer.armed.clear()
        self._forget(write)
        self._finish_if_over(transfer)

    def _forget(self, write: Write) -> None:
        if write.completed and (write.landed or write.lost):
            self.network.in_flight.discard(write)

    def _finish_if_over(self, transfer: Transfer) -> None:
        if transfer.open or transfer.armed or transfer.outstanding or transfer.done:
            return
        transfer.done = True
        del self.transfers[transfer.ident]
        end = TransferEnd(transfer.ok, transfer.failed, transfer.unknown, transfer.error)
        self._emit(TransferDone(transfer.ident, end))

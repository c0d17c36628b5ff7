"""Native core: one-sided page writes counted by immediates, and the watcher that fires them layer by layer.

Nothing here holds the GIL while it waits, and no native thread ever calls Python. Commands go in through bounded rings;
events come out through a ring and one eventfd. Methods are safe from any thread. They raise FabricError only for misuse
and for synchronous work (registration, endpoints); what happens to a write is told by an event.
"""

from typing import Any, Final

import numpy as np

class FabricError(RuntimeError):
    """args: (message,). Names the operation, the provider and libfabric's own text."""

IMM_MAX_UNITS: Final[int]  # 255: units of one write
KEY_BITS: Final[int]  # 24

# Event kinds: the first element of each tuple that Fabric.drain returns.
#
# (IMM_REACHED, key, arrived)      arrived == expected
# (IMM_OVERRUN, key, arrived)      arrived > expected: protocol error of the peer
# (TRANSFER_DONE, transfer, ok, failed, unknown, error, writes, bytes, busy_seconds, exposed_seconds)
#     every write terminal; once per transfer; the first three are units
#     ok       completed here, which proves nothing about arrival: only the peer's count does
#     failed   never posted, or surely refused: did not land and will not
#     unknown  posted, and may have landed, or may yet land until the peer fences
#     error    "" or the first reason ("cancelled" after cancel)
#     busy     with writes queued or in flight; exposed: from the last layer's counter value to the end, which is what
#              compute did not hide
# (ENDPOINT_FAILED, endpoint, message)      reset, unknown write, queue overrun: nothing is posted through it again
# (ENDPOINT_CLOSED, endpoint)      the fence: nothing lands through it any more (where caps["fence"] is "endpoint")
IMM_REACHED: Final[int]
IMM_OVERRUN: Final[int]
TRANSFER_DONE: Final[int]
ENDPOINT_FAILED: Final[int]
ENDPOINT_CLOSED: Final[int]

def library(path: str = "") -> dict[str, Any]:
    """The libfabric that would be loaded: {"path", "version", "source", "candidates"}, a candidate being
    {"path", "version", "source", "why_not"}. A path (file or directory) is used or refused, never replaced.

    Raises FabricError naming every place that was tried when there is none."""

def probe(library: str = "", provider: str = "auto") -> list[dict[str, Any]]:
    """What each usable NIC really offers, best first: {"provider", "kind", "domain", "address", "library_version",
    "library_path", "fabric", "wire", "imm_bytes", "addressing": "offset"|"virtual", "app_keys", "local_mr", "progress",
    "tx_size", "inject", "iov_limit", "rma_iov_limit", "write_segments", "max_message", "wait_fd", "hmem", "dmabuf",
    "gpu_path": ""|"dmabuf"|"hmem"|"staged", "gpu_path_why", "fence": "endpoint"|"none"}. Each was opened once to be sure.

    provider: auto, efa, verbs, tcp (which libfabric before 1.18 calls net), shm. Refused with the reason: tcp;ofi_rxm,
    sockets, udp, lnx. Raises FabricError naming what was tried when there is none."""

class Counter:
    """A monotonic u64 in shared memory, one cache line. The rank bumps, the daemon's watcher reads."""

    def __init__(self, fd: int, offset: int = 0) -> None: ...
    @staticmethod
    def create() -> tuple[Counter, int]:
        """A new counter in a memfd of its own; returns it and the fd (the caller closes it)."""

    def bump(self) -> int:
        """Adds one with release order: what this thread wrote before is visible to whoever reads the new value."""

    @property
    def value(self) -> int: ...

class Barrier:
    """Processes that wait for each other: cache line r of `fd` is a Counter that rank r alone bumps, once per wait."""

    def __init__(self, fd: int, rank: int, world: int, *, spin: float = 0.0) -> None:
        """Maps the lines; the caller keeps and closes `fd`. spin: seconds that a wait looks before it sleeps."""

    def wait(self) -> None:
        """Returns once every rank has called it as often as this one; what they wrote before is visible after."""

class MappedMemory:
    """A mapping of a memfd that another process made. Unmapped when the object dies (regions of it must be gone)."""

    def __init__(self, fd: int, nbytes: int, *, populate: bool = False) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def view(self) -> np.ndarray[Any, np.dtype[np.uint8]]: ...

def gpu(device: str = "cuda") -> dict[str, Any]:
    """A GPU by PCI address or cuda:N: {"pci_address", "ordinal" (in this process), "model", "driver" (the CUDA version
    that it speaks), "dmabuf", "rdma", "rdma_of_shared_memory", "rdma_needs_flush"}.

    Raises FabricError when there is none, or no driver."""

class DeviceMemory:
    """Memory of a GPU that another process can map by a file descriptor. Unmapped when the object dies (regions of it must
    be gone); freed when no process maps it and no descriptor of it is open.

    Tensors over it come from __cuda_array_interface__ (flat bytes) and keep it alive."""

    @staticmethod
    def allocate(device: str, nbytes: int) -> DeviceMemory:
        """Zeroed."""

    @staticmethod
    def import_fd(device: str, fd: int, nbytes: int) -> DeviceMemory:
        """Maps what another process exported, and allocated with `nbytes`. The caller closes the fd."""

    def export_fd(self) -> int:
        """A descriptor for another process; the caller closes it."""

    @property
    def device(self) -> str:
        """PCI address, lower case."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

class LayerKernel:
    """A Counter's other writer: a GPU. Adds one in device memory, then stores with release order at system scope."""

    def __init__(self, device: str, fd: int) -> None:
        """fd: of Counter.create. Counts on from the counter's value; nobody else may bump it then."""

    def bump(self, stream: int) -> None:
        """Queued on the stream (its handle; 0 is the default one), or captured: then each replay counts."""

class WritePlan:
    """The writes of one layer, in token order, and how far the next layer is. Made once per request, for all layers.

    Entry i copies nbytes[i] bytes from src_offset[i] + l * src_layer_stride of the local region to dst_offset[i] +
    l * dst_layer_stride of the remote region, and is worth units[i] (1..255). src_region is a local region id;
    dst_region is the position in the list that the peer gave to describe. Neighbours that continue each other on both
    sides are merged when posted, and scattered ones share a write where the provider takes several pieces (at most 255
    units and 1 MiB each); the sum of units never changes. Arrays are int64 and contiguous; offsets are below 2**48. An
    entry takes 14 bytes, however many layers there are.
    """

    def __init__(
        self,
        *,
        src_region: int,
        dst_region: int,
        src_offset: np.ndarray,
        dst_offset: np.ndarray,
        nbytes: np.ndarray,
        units: np.ndarray,
        src_layer_stride: int,
        dst_layer_stride: int,
        num_layers: int,
    ) -> None: ...
    def __len__(self) -> int: ...

class Fabric:
    """All fi_* objects of a node's rail groups, a worker thread for each, one watcher thread, one immediate table.

    Several rail groups look like one: an endpoint has a part in each, and its close fences all of them; a region belongs to
    one group, whose worker carries what is written from it; what arrives through any of them counts for the same keys."""

    def __init__(
        self,
        *,
        provider: str = "auto",
        library: str = "",
        bind: list[str] = ...,
        source: str = "",
        require: str = "",
        window_ops: int = 64,
        window_bytes: int = 8388608,
        idle: str = "auto",
        groups: list[tuple[list[str], list[int]]] = ...,
        local: bool = False,
        flight_bytes: int = 16777216,
        device: str = "",
    ) -> None:
        """bind: one local address (or domain name) per NIC; [] takes the NIC that other hosts reach best,
        or, with tcp, the one that has the local address `source`. Whole writes are striped over the NICs; NIC i writes
        to the peer's NIC i, and where counts differ the shorter list is gone through again. A NIC that takes nothing
        leaves its share to the others. window_*: in flight per peer and NIC; all peers of a NIC: four times that. require: the only provider to use. idle: "auto"
        spins shortly, yields, then blocks; "spin" never blocks; "block" blocks at once.
        groups: the rail groups, each by its NICs (as bind) and the CPUs that its worker is kept on, [] for any; [] is one
        group of `bind`.
        local: endpoints to peers on this host may be opened, too. provider "local" opens nothing but such, and no
        library.
        flight_bytes: memory of the flight logs of all groups, handed out by the system as it fills.
        device: a GPU (PCI address or cuda:N) whose memory, and no other, is registered; caps["gpu_path"] says how it is
        reached."""

    @property
    def warnings(self) -> list[str]:
        """What the system refused when workers were pinned, in words."""

    @property
    def caps(self) -> dict[str, Any]:
        """As one entry of probe, of the first NIC; "nics" lists those of all, with their "group"."""

    def fileno(self) -> int:
        """An eventfd that is readable while events wait."""

    def drain(self, max_events: int = 1024) -> list[tuple[Any, ...]]: ...
    def close(self) -> None:
        """Closes endpoints, joins threads. Idempotent. Bounded (5 s). Events that wait can still be drained."""

    # memory
    def register(self, address: int, nbytes: int, fd: int = -1, group: int = 0) -> int:
        """Region id, on every NIC of a rail group; with one group ids count from 0. The caller keeps the memory until
        unregister returns.

        fd: the memfd whose first `nbytes` are mapped there, sealed against shrinking; the caller keeps it. Local peers
        are written to from such regions only."""

    def unregister(self, region: int) -> None:
        """Not a fence: close the endpoints that it was described on first."""

    # endpoints: one per peer, so that closing one fences exactly that peer
    def open_endpoint(self, local: bool = False) -> int:
        """local: to a peer on this host, by memory that the two share. The fabric must have been opened so."""

    def describe(self, endpoint: int, regions: list[int]) -> bytes:
        """What the peer needs to write here: addresses of this endpoint and keys, bases, lengths of the regions."""

    def connect(self, endpoint: int, descriptor: bytes) -> None:
        """Learns the peer's descriptor, once. Raises FabricError for a malformed or incompatible one, and for a local
        peer that cannot be reached: it is on another host, in another network namespace, or of another user."""

    def close_endpoint(self, endpoint: int) -> None:
        """Fails what is not posted, closes, and answers with TRANSFER_DONE for each open transfer, then with
        ENDPOINT_CLOSED (or ENDPOINT_FAILED if the provider would not close: no fence then). Idempotent."""

    # receiving
    def imm_allocate(self, endpoint: int) -> int:
        """A key that is in no use. Arrivals through any other endpoint do not count for it. Counting starts now."""

    def imm_arm(self, key: int, expected: int) -> None:
        """IMM_REACHED comes once, at once if the units are already there. Once per key."""

    def imm_arrived(self, key: int) -> int: ...
    def imm_retire(self, key: int) -> int:
        """Forgets the key and returns what had arrived. Call only when nothing with this key can arrive any more."""

    # sending
    def open_transfer(self, endpoint: int, key: int) -> int:
        """A set of writes that carry `key`, the peer's. Admission is open until finish or cancel.

        A write that fails, a plan outside its regions, or a failed endpoint ends the transfer: what is not posted is
        dropped, and TRANSFER_DONE comes once what was posted is terminal, without waiting for finish. Calls for a
        transfer that has ended do nothing. Opened on a closed or failed endpoint it ends at once, with no units."""

    def watch(self, counter: Counter) -> int: ...
    def unwatch(self, watch: int) -> None:
        """Forgets the id. Plans armed on it stay armed until they fire or their transfer ends."""

    def arm(self, transfer: int, watch: int, first_value: int, plan: WritePlan, begin: int, end: int) -> None:
        """Entries [begin, end) of layer l are posted once the counter reads at least first_value + l."""

    def write(
        self,
        transfer: int,
        src_region: int,
        src_offset: int,
        dst_region: int,
        dst_offset: int,
        nbytes: int,
        units: int,
    ) -> None:
        """One write, at once."""

    def finish(self, transfer: int) -> None:
        """Nothing more will be added. TRANSFER_DONE follows when all that was armed has fired and is terminal."""

    def cancel(self, transfer: int) -> None:
        """Drops what is not posted, armed plans included. TRANSFER_DONE follows when what was posted is terminal."""

    # diagnosis
    def stats(self) -> dict[str, Any]:
        """Monotonic: writes, bytes, units, units_received, completions, errors, stale_units, merged, again, wakeups,
        nic_writes (a list, one per NIC);
        now: active_transfers, inflight_writes, inflight_bytes, armed_plans, keys, endpoints, regions."""

    def flight(self, transfer: int, most: int) -> list[tuple[Any, ...]]:
        """What the workers remember of a transfer's armed plans, or, for 0, of all: the latest `most` of each group, the
        oldest first. `Fabric.read_flight` types it."""

    def imm_arrivals(self, key: int) -> tuple[int, int, float | None, float | None, list[float | None]]:
        """(expected, units a mark, first, last, marks), as `pdd.fabric.types.Arrivals`. Kept after imm_retire, until the
        key's slot is handed out again; raises FabricError then."""

    def inject_fault(self, kind: str, after: int, count: int = 1, nic: int = -1) -> None:
        """Tests only: the `after`-th write from now on, of NIC `nic` or of any, fails ("error": completes with an error
        without being posted, "lost": completes well without being posted, "hold": its completion is withheld until the
        endpoint closes, "again": the NIC seems to take nothing for now; each attempt counts as a write).
        One fault at a time: the next call replaces it, count=0 takes it back."""

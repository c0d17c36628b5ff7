"""What an operator should know though nothing failed: every kind of finding, in one table.

T: of the machine's topology, as `pdd topology` and /v1/topology tell; F: of a running node, as `pdd status` tells. An id is
stable; its level belongs to it. pdd-errors(7) says of each what to do.
"""

from __future__ import annotations

import dataclasses

LEVELS = ("info", "warn")  # in rising order
KINDS: dict[str, str] = {  # id → level
    "F010": "info",  # tcp, no RDMA NIC
    "F011": "warn",  # tcp, though there is an RDMA NIC
    "T010": "info",  # no RDMA NIC
    "T011": "warn",  # a GPU without a usable NIC
    "T012": "warn",  # a NIC is not usable
    "T013": "warn",  # a nearer NIC is not usable
    "T014": "warn",  # the nearest NIC is far
    "T015": "warn",  # places are not known
    "T016": "warn",  # fewer NICs than others
    "T017": "warn",  # libfabric does not offer a NIC
    "T018": "info",  # GPUs of others
    "T020": "info",  # CPUs hidden by the cpuset
    "T021": "warn",  # all near CPUs are hidden
    "T022": "warn",  # near memory is hidden
    "T023": "warn",  # the system refused a place
    "T024": "warn",  # what runs is not what would be chosen now
    "T030": "warn",  # too little memory may be locked
    "T031": "warn",  # no way from NIC to GPU memory
    "T032": "warn",  # peer-to-peer traffic leaves its switch
}


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """`id` is a key of KINDS, `level` its value there."""

    id: str
    level: str
    message: str  # what is so, and what to do
    gpu: int | None = None  # that it is about; a GPU's index
    nic: str | None = None  # that it is about


def finding(id: str, message: str, *, gpu: int | None = None, nic: str | None = None) -> Finding:
    return Finding(id, KINDS[id], message, gpu, nic)

"""This machine: what sysfs tells, and what a driver's library adds to it."""

from __future__ import annotations

from pdd.topology import nvml, sysfs
from pdd.topology.types import Topology


def read() -> Topology:
    return nvml.add(sysfs.read())

"""What NVIDIA's management library knows beyond sysfs: UUIDs, models and NVLink.

`pynvml` (of nvidia-ml-py) is imported here and nowhere else, when it is there: without it, without a driver, or when the
driver does not answer, the topology stays as sysfs told it. A question that one GPU does not answer costs that fact.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from pdd.topology import names
from pdd.topology.types import Gpu, GpuLink, Topology

_log = logging.getLogger("pdd.topology")
_MAX_LINKS = 64  # of a GPU; those of today have up to 18
_SWITCH, _GPU = "switch", "gpu"


def add(topology: Topology, nvml: Any = None) -> Topology:
    """`nvml`: the module to ask; None: pynvml, if it can be imported."""
    if nvml is None and any(gpu.vendor == "nvidia" for gpu in topology.gpus):
        nvml = _module()
    if nvml is None:
        return topology
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        _log.info("NVML does not answer: %s", error)
        return topology
    try:
        handles = _handles(nvml)
        gpus = tuple(_told(nvml, gpu, handles.get(gpu.pci.address)) for gpu in topology.gpus)
        links = tuple(link for address, handle in handles.items() for link in _links(nvml, address, handle))
    finally:
        nvml.nvmlShutdown()
    return dataclasses.replace(topology, gpus=gpus, links=links or topology.links, source=(*topology.source, "nvml"))


def _module() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def _ask(nvml: Any, question: Callable[..., Any], *about: Any) -> Any:
    """None when the driver, this GPU or this version of the library does not know."""
    try:
        return question(*about)
    except nvml.NVMLError:
        return None


def _text(value: Any) -> str:
    """Older versions of the module answer in bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


def _handles(nvml: Any) -> dict[str, Any]:
    """PCI address → handle. A GPU that is lost has none."""
    found = {}
    for index in range(_ask(nvml, nvml.nvmlDeviceGetCount) or 0):
        handle = _ask(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
        pci = None if handle is None else _ask(nvml, nvml.nvmlDeviceGetPciInfo, handle)
        address = None if pci is None else names.pci_address(_text(pci.busId))
        if address is not None:
            found[address] = handle
    return found


def _told(nvml: Any, gpu: Gpu, handle: Any) -> Gpu:
    if handle is None:
        return gpu
    uuid = names.clean(_text(_ask(nvml, nvml.nvmlDeviceGetUUID, handle)))
    model = names.clean(_text(_ask(nvml, nvml.nvmlDeviceGetName, handle)))
    return dataclasses.replace(gpu, uuid=uuid or gpu.uuid, model=model or gpu.model)


def _links(nvml: Any, address: str, handle: Any) -> list[GpuLink]:
    """Links that are up, one entry for each device at their other end."""
    counts: Counter[tuple[str, str]] = Counter()
    kinds = {nvml.NVML_NVLINK_DEVICE_TYPE_GPU: _GPU, nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH: _SWITCH,
             nvml.NVML_NVLINK_DEVICE_TYPE_IBMNPU: "cpu"}
    for link in range(_MAX_LINKS):
        try:
            up = nvml.nvmlDeviceGetNvLinkState(handle, link)
        except nvml.NVMLError:
            break  # this GPU has no more
        if not up:
            continue
        kind = kinds.get(_ask(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link), _SWITCH)
        far = _ask(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        target = "cpu" if kind == "cpu" else names.pci_address(_text(getattr(far, "busId", "")))
        if target is not None:
            counts[target, kind] += 1
    return [GpuLink(address, target, kind, count) for (target, kind), count in counts.items()]

"""What NVML adds to a topology, through a module that answers as pynvml does, and what happens without it."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from pdd.topology import nvml, report, show_tree, sysfs
from pdd.topology.types import GpuLink, Topology
from tests.topology import machines


class NVMLError(Exception):
    pass


class FakeNvml:
    """Two of the machine's GPUs; the second one answers little. Switch links as on a DGX, and one that is down."""

    NVMLError = NVMLError
    NVML_NVLINK_DEVICE_TYPE_GPU, NVML_NVLINK_DEVICE_TYPE_IBMNPU, NVML_NVLINK_DEVICE_TYPE_SWITCH = 0, 1, 2

    def __init__(self, *, driver: bool = True) -> None:
        self.driver = driver
        self.calls: list[str] = []

    def nvmlInit(self) -> None:
        if not self.driver:
            raise NVMLError("Driver Not Loaded")
        self.calls.append("init")

    def nvmlShutdown(self) -> None:
        self.calls.append("shutdown")

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index == 2:
            raise NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return types.SimpleNamespace(busId=(b"00000000:1B:00.0", "00000000:43:00.0")[handle])

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        if handle == 1:
            raise NVMLError("Not Supported")
        return "GPU-3f1c"

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if handle == 1 or link >= 6:
            raise NVMLError("Invalid Argument")
        return int(link != 5)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return 0 if link == 4 else 2

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        return types.SimpleNamespace(busId=f"00000000:{'43' if link == 4 else 'a4' if link < 2 else 'a5'}:00.0")


@pytest.fixture
def dgx(tmp_path: Path) -> Topology:
    machines.dgx_h100(tmp_path)
    return sysfs.read(tmp_path)


def test_uuids_models_and_links(dgx: Topology) -> None:
    fake = FakeNvml()
    told = nvml.add(dgx, fake)
    assert fake.calls == ["init", "shutdown"]
    assert told.source == ("sysfs", "nvml")
    assert [(gpu.uuid, gpu.model) for gpu in told.gpus[:3]] == [
        ("GPU-3f1c", "NVIDIA H100 80GB HBM3"), (None, "NVIDIA H100 80GB HBM3"), (None, None),
    ]
    assert told.links == (
        GpuLink("0000:1b:00.0", "0000:a4:00.0", "switch", 2), GpuLink("0000:1b:00.0", "0000:a5:00.0", "switch", 2),
        GpuLink("0000:1b:00.0", "0000:43:00.0", "gpu", 1),
    )
    assert "NVLink: GPU0: 5 links to other GPUs and GPU switches" in show_tree.tree(report.document(told))


def test_without_a_driver_sysfs_is_all(dgx: Topology) -> None:
    assert nvml.add(dgx, FakeNvml(driver=False)) == dgx


def test_the_module_is_imported_only_where_there_is_a_gpu_for_it(
    dgx: Topology, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines.laptop(tmp_path / "laptop")
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())  # type: ignore[arg-type]
    assert nvml.add(dgx).source == ("sysfs", "nvml")
    laptop = sysfs.read(tmp_path / "laptop")
    assert nvml.add(laptop) is laptop
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an ImportError
    assert nvml.add(dgx) is dgx

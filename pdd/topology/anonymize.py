"""A topology, or an export of one, without what tells whose machine it is. Pure.

Host name, UUIDs, serials, GIDs and names made of MAC addresses are replaced, the same one always by the same one; what a
reader asks for besides them is kept, and all else is dropped. Structure stays: PCI addresses, bridges, NUMA nodes, CPUs,
states, rates, models, and of a GID what kind of address it is.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Callable

from pdd.topology.sysfs_pci import acs_only
from pdd.topology.types import Gpu, Nic, Topology

_MAC_NAME = re.compile(r"enx[0-9a-f]{12}")
_BUILDER = re.compile(r"\S+@\S+")
_KEPT_OF_STATUS = ("Cpus_allowed_list:", "Mems_allowed_list:")  # of /proc/self/status


class Anonymizer:
    """Gives every identity that it meets a new one. One for all that shall stay consistent."""

    def __init__(self) -> None:
        self._given: dict[tuple[str, str], int] = {}

    def _number(self, kind: str, identity: str) -> int:
        return self._given.setdefault((kind, identity), sum(each == kind for each, _ in self._given) + 1)

    def topology(self, topology: Topology) -> Topology:
        return dataclasses.replace(
            topology, host=self._host(topology.host), gpus=tuple(map(self._gpu, topology.gpus)),
            nics=tuple(map(self._nic, topology.nics)), other_gpus=tuple(map(self._gpu, topology.other_gpus)),
        )

    def entries(self, entries: dict[str, bytes | str | None]) -> dict[str, bytes | str | None]:
        """Of an export: a file's bytes, a link's target, None for a directory, by path."""
        return {self._names(path): self._content(path, entries[path]) for path in sorted(entries)}

    # -- identities --------------------------------------------------------------------------------------------------
    def _host(self, name: str) -> str:
        return f"host-{self._number('host', name)}" if name else ""

    def _uuid(self, uuid: str) -> str:
        number = self._number("uuid", uuid)
        if uuid.removeprefix("GPU-").isalnum() and "-" not in uuid.removeprefix("GPU-"):
            return f"{'GPU-' * uuid.startswith('GPU-')}{number:016x}"
        return f"GPU-{number:08x}-0000-0000-0000-000000000000"

    def _gid(self, text: str) -> str:
        """Of the same kind, by which a program chooses one: empty, link-local, an IPv4 address, or another."""
        try:
            gid = ipaddress.ip_address(text)
        except ValueError:
            return ""
        mapped = gid if gid.version == 4 else gid.ipv4_mapped
        value = int(gid)
        if mapped is None and value & (1 << 64) - 1 == 0:
            return text  # an empty slot
        number = self._number("gid", str(mapped or gid))
        if mapped is not None:
            new = ipaddress.IPv4Address((198 << 24 | 18 << 16) + number)  # 198.18.0.0/15: of benchmarks, nobody's
            return str(new) if gid.version == 4 else f"::ffff:{new}"
        prefix = 0xFE80 << 112 if gid.is_link_local else 0x20010DB8 << 96
        new_gid = ipaddress.IPv6Address(prefix + number)
        return new_gid.exploded if text == gid.exploded else str(new_gid)

    def _names(self, text: str) -> str:
        """A path or name; USB NICs and such are called after their MAC address."""
        return _MAC_NAME.sub(lambda found: f"enx02{self._number('mac', found[0]):010x}", text)

    # -- of a topology -----------------------------------------------------------------------------------------------
    def _gpu(self, gpu: Gpu) -> Gpu:
        return dataclasses.replace(gpu, uuid=self._uuid(gpu.uuid) if gpu.uuid else None)

    def _nic(self, nic: Nic) -> Nic:
        return dataclasses.replace(
            nic, name=self._names(nic.name), rdma=nic.rdma and self._names(nic.rdma),
            netdev=nic.netdev and self._names(nic.netdev), gid=nic.gid and self._gid(nic.gid),
        )

    # -- of an export ------------------------------------------------------------------------------------------------
    def _content(self, path: str, content: bytes | str | None) -> bytes | str | None:
        if content is None:
            return None
        if isinstance(content, str):
            return self._names(content)
        if path.startswith("sys/") and path.endswith("/config"):
            return acs_only(content)
        text = content.decode(errors="replace").strip()
        return (self._rule(path)(text) + "\n").encode() if text else b""

    def _rule(self, path: str) -> Callable[[str], str]:
        if path == "proc/sys/kernel/hostname":
            return self._host
        if path == "proc/driver/nvidia/version":
            return lambda text: _BUILDER.sub("builder", text)
        if path == "proc/self/status":
            return lambda text: "\n".join(line for line in text.splitlines() if line.startswith(_KEPT_OF_STATUS))
        if path.startswith("proc/driver/nvidia/gpus/"):
            return self._information
        if path.endswith("/unique_id"):
            return self._uuid
        if "/gids/" in path:
            return self._gid
        return self._names

    def _information(self, text: str) -> str:
        lines = []
        for line in text.splitlines():
            name, _, value = (part.strip() for part in line.partition(":"))
            if name == "Model":
                lines.append(f"Model: {value}")
            elif name == "GPU UUID":
                lines.append(f"GPU UUID: {self._uuid(value)}")
        return "\n".join(lines)

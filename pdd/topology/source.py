"""Where a topology is read from: this machine, or a file or directory that describes one.

What a file is shows in its first bytes, never in its name: a tar of a sysfs tree (plain, gzip, bzip2 or xz), hwloc's
XML or NCCL's.
"""

from __future__ import annotations

import stat
from pathlib import Path

from pdd.errors import TopologyError
from pdd.topology import archive, hwloc, machine, names, nccl, sysfs, xml_tree
from pdd.topology.anonymize import Anonymizer
from pdd.topology.files import Directory, Memory, Recorder, Store, Tree
from pdd.topology.types import MAX_NODES, Topology

MAX_GPUS, MAX_NICS = 256, 2048  # each GPU is held against each NIC
_TAR_MAGIC = slice(257, 262)
_HOW = "Give a directory or tar made by `pdd topology --export`, hwloc's XML (lstopo --of xml) or NCCL's."
_MAX_DEPTH_OF_SYS = 2  # directories between the top of a copy and its sys/


def load(path: Path | None = None) -> Topology:
    """The topology of this machine, or the one that `path` describes. Raises TopologyError when it describes none."""
    if path is None:
        return machine.read()
    tree = _tree(path)
    topology = _xml(path) if tree is None else sysfs.read_tree(tree, _stem(path))
    counts = (len(topology.gpus) + len(topology.other_gpus), len(topology.nics), len(topology.numa))
    if any(count > most for count, most in zip(counts, (MAX_GPUS, MAX_NICS, MAX_NODES), strict=True)):
        what = f"{counts[0]} GPUs, {counts[1]} NICs and {counts[2]} NUMA nodes"
        raise TopologyError(f"{path}: {what} are more than one machine has", hint=_HOW)
    return topology


def export(target: Path, path: Path | None = None, *, anonymous: bool = False) -> int:
    """Writes all that was read for a topology as a .tar.gz, which reads as the same one, but for identities when
    `anonymous`. Returns the number of entries.

    Raises TopologyError: the source is XML or describes no machine, or `target` cannot be written.
    """
    tree = Tree(Directory(Path("/"))) if path is None else _tree(path)
    if tree is None:
        raise TopologyError(f"{path}: only a sysfs tree can be exported", hint="Copy the XML file itself.")
    recorder = Recorder(tree.store)
    sysfs.read_tree(Tree(recorder, tree.root), _stem(path) if path else "")
    prefix = f"{tree.root}/" if tree.root else ""
    entries = {name.removeprefix(prefix): content for name, content in recorder.entries.items()
               if name.startswith(prefix) and name != tree.root}
    archive.write_tar(target, Anonymizer().entries(entries) if anonymous else entries)
    return len(entries)


def _stem(path: Path) -> str:
    name = path.resolve().name
    for suffix in (".gz", ".tgz", ".bz2", ".xz", ".tar", ".xml"):
        name = name.removesuffix(suffix)
    return names.clean(name)


def _tree(path: Path) -> Tree | None:
    """The sysfs tree at `path`; None when it is an XML file."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return _rooted(path, Directory(path))
        if not stat.S_ISREG(mode):
            raise TopologyError(f"{path}: neither a file nor a directory", hint=_HOW)
        with archive.unpacked(path) as stream:
            start = stream.read(512)
    except OSError as error:
        raise TopologyError(f"{path}: cannot be read: {error.strerror or error}", hint=_HOW) from error
    except archive.BROKEN as error:
        raise TopologyError(f"{path}: cannot be unpacked: {error}", hint="Copy it again.") from error
    if _looks_like_xml(start):
        return None
    if start[_TAR_MAGIC] == b"ustar" or _is_old_tar(start):
        return _rooted(path, archive.read_tar(path))
    what = "is empty" if not start else "is neither a tar of a sysfs tree nor XML"
    raise TopologyError(f"{path}: {what}", hint=_HOW)


def _looks_like_xml(start: bytes) -> bool:
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    return text.startswith(b"<") or start.startswith((b"\xff\xfe<", b"\xfe\xff\0<"))


def _is_old_tar(start: bytes) -> bool:
    """A tar without a magic: the sum of its header is right."""
    digits = start[148:156].strip(b" \0")
    if len(start) < 512 or not digits.isdigit() or any(digit not in b"01234567" for digit in digits):
        return False
    return int(digits, 8) == sum(start[:148]) + 8 * ord(" ") + sum(start[156:])


def _rooted(path: Path, store: Directory | Memory) -> Tree:
    """The tree whose root has sys/: the top itself, a directory below it, or a top that is sys/ itself."""
    level: list[str] = [""]
    for _ in range(_MAX_DEPTH_OF_SYS + 1):
        for root in level:
            tree = Tree(store, root)
            if tree.is_dir("sys/devices") or tree.is_dir("sys/bus") or tree.is_dir("sys/class"):
                return tree
        level = [f"{root}/{name}".lstrip("/") for root in level for name in Tree(store, root).names("")[:100]]
    if Tree(store).is_dir("devices") and (Tree(store).is_dir("bus") or Tree(store).is_dir("class")):
        return Tree(_UnderSys(store))
    raise TopologyError(f"{path}: holds no sys/ directory of a Linux machine", hint=_HOW)


class _UnderSys:
    """A Store that puts another one, the inside of a sys/, below sys/."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @staticmethod
    def _below(path: str) -> str | None:
        return "" if path == "sys" else path.removeprefix("sys/") if path.startswith("sys/") else None

    def kind(self, path: str) -> str:
        below = self._below(path)
        return "" if below is None else self._store.kind(below)

    def target(self, path: str) -> str:
        return self._store.target(path.removeprefix("sys/"))

    def names(self, path: str) -> list[str]:
        return self._store.names(self._below(path) or "")

    def data(self, path: str) -> bytes:
        return self._store.data(path.removeprefix("sys/"))


def _xml(path: Path) -> Topology:
    try:
        with archive.unpacked(path) as stream:
            data = stream.read(xml_tree.MAX_BYTES + 1)
    except archive.BROKEN as error:
        raise TopologyError(f"{path}: cannot be read: {error}", hint="Copy it again.") from error
    if len(data) > xml_tree.MAX_BYTES:
        raise TopologyError(f"{path}: more than {xml_tree.MAX_BYTES >> 20} MiB of XML", hint="This describes no machine.")
    root = xml_tree.parse(data, str(path))
    if root.tag == "topology":
        topology = hwloc.read(root, _stem(path))
    elif root.tag == "system":
        topology = nccl.read(root, _stem(path))
    else:
        raise TopologyError(f"{path}: XML of another kind: <{names.clean(root.tag)}>", hint=_HOW)
    if not (topology.numa or topology.gpus or topology.nics):
        raise TopologyError(f"{path}: describes no CPU, GPU or NIC", hint=_HOW)
    return topology

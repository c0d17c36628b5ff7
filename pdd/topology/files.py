"""A tree of files that may be a live system, a copied directory or an archive in memory, read the same way.

Paths are text without a leading slash. Links are followed here, inside the tree: whatever a link says, it never leads
out of it. A missing, unreadable or odd file reads as empty: one broken entry costs a fact, never the whole picture.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Protocol

MAX_FILE_BYTES = 64 << 10
_MAX_LINKS = 40  # as the kernel
_MAX_PARTS = 512  # of a path with links in it: one that a link makes longer is not followed


class Store(Protocol):
    """Where entries come from. A path given here has no links in its parents and never leads up."""

    def kind(self, path: str) -> str:
        """d, f, l, n for another node such as a device, "" for nothing."""

    def target(self, path: str) -> str:
        """Of a link."""

    def names(self, path: str) -> list[str]:
        """Of a directory."""

    def data(self, path: str) -> bytes:
        """Of a file, at most MAX_FILE_BYTES of it."""


class Tree:
    """See the module's docstring. `root`: a path inside the store that counts as /."""

    def __init__(self, store: Store, root: str = "") -> None:
        self.store = store
        self.root = root

    def resolve(self, path: str) -> str:
        """The path without links. Parts that do not exist stay as they are written, so that a link to something that
        was not copied still says where it was."""
        waiting = [part for part in reversed(path.split("/")) if part]
        done: list[str] = []
        links = 0
        while waiting:
            part = waiting.pop()
            if part == ".":
                continue
            if part == "..":
                del done[-1:]
                continue
            here = "/".join([*done, part])
            if links < _MAX_LINKS and self.store.kind(self._at(here)) == "l":
                links += 1
                target = self.store.target(self._at(here))
                steps = [each for each in reversed(target.split("/")) if each]
                if len(done) + len(waiting) + len(steps) > _MAX_PARTS:
                    return here
                if target.startswith("/"):
                    done = []
                waiting += steps
            else:
                done.append(part)
        return "/".join(done)

    def is_dir(self, path: str) -> bool:
        return self.store.kind(self._at(self.resolve(path))) == "d"

    def exists(self, path: str) -> bool:
        return self.store.kind(self._at(self.resolve(path))) in ("d", "f")

    def has_node(self, path: str) -> bool:
        """Whether there is anything at all, a device node too."""
        return self.store.kind(self._at(self.resolve(path))) != ""

    def names(self, path: str) -> list[str]:
        """Sorted; empty for what is no directory."""
        at = self._at(self.resolve(path))
        return sorted(self.store.names(at)) if self.store.kind(at) == "d" else []

    def data(self, path: str) -> bytes:
        at = self._at(self.resolve(path))
        return self.store.data(at) if self.store.kind(at) == "f" else b""

    def text(self, path: str) -> str:
        return self.data(path).decode(errors="replace").strip()

    def _at(self, path: str) -> str:
        return f"{self.root}/{path}" if self.root and path else self.root or path


class Directory:
    """A Store over a directory of this machine, / too. Only regular files are opened."""

    def __init__(self, top: Path) -> None:
        self._top = str(top)

    def _path(self, path: str) -> str:
        return os.path.join(self._top, path) if path else self._top

    def kind(self, path: str) -> str:
        try:
            mode = os.stat(self._path(path), follow_symlinks=not path).st_mode  # the top itself may be a link
        except (OSError, ValueError):
            return ""
        return {stat.S_IFDIR: "d", stat.S_IFREG: "f", stat.S_IFLNK: "l"}.get(stat.S_IFMT(mode), "n")

    def target(self, path: str) -> str:
        try:
            return os.readlink(self._path(path))
        except OSError:
            return ""

    def names(self, path: str) -> list[str]:
        try:
            return os.listdir(self._path(path))
        except OSError:
            return []

    def data(self, path: str) -> bytes:
        try:
            fd = os.open(self._path(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return b""
        try:
            return os.read(fd, MAX_FILE_BYTES)
        except OSError:  # some sysfs files refuse to be read, as an inactive port's rate
            return b""
        finally:
            os.close(fd)


class Memory:
    """A Store over entries that are all here: an unpacked archive."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}
        self._links: dict[str, str] = {}
        self._children: dict[str, set[str]] = {"": set()}

    def __len__(self) -> int:
        """Directories, files and links."""
        return len(self._children) + len(self._files) + len(self._links)

    def add_dir(self, path: str) -> None:
        child = ""
        while path not in self._children:
            self._children[path] = {child} if child else set()
            path, _, child = path.rpartition("/")
        if child:
            self._children[path].add(child)

    def add_file(self, path: str, data: bytes) -> None:
        self._enter(path)
        self._files[path] = data

    def add_link(self, path: str, target: str) -> None:
        self._enter(path)
        self._links[path] = target

    def _enter(self, path: str) -> None:
        parent, _, name = path.rpartition("/")
        self.add_dir(parent)
        self._children[parent].add(name)

    def kind(self, path: str) -> str:
        if path in self._links:
            return "l"
        return "d" if path in self._children else "f" if path in self._files else ""

    def target(self, path: str) -> str:
        return self._links[path]

    def names(self, path: str) -> list[str]:
        return list(self._children[path])

    def data(self, path: str) -> bytes:
        return self._files[path]


class Recorder:
    """A Store that remembers what was read through it, so that an export is exactly what the reader needs."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.entries: dict[str, bytes | str | None] = {}  # file's bytes, link's target, None for a directory

    def kind(self, path: str) -> str:
        kind = self._store.kind(path)
        if kind in ("d", "n"):  # that a device node is there is all that an export says of it
            self.entries.setdefault(path, None if kind == "d" else b"")
        return kind

    def target(self, path: str) -> str:
        target = self._store.target(path)
        self.entries[path] = target
        return target

    def names(self, path: str) -> list[str]:
        return self._store.names(path)

    def data(self, path: str) -> bytes:
        data = self._store.data(path)
        self.entries[path] = data
        return data

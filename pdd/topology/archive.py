"""Tar archives of a sysfs tree: read into memory, never unpacked to disk; and written by `pdd topology --export`.

An archive may come from anyone. What it may cost is bounded before it is spent: unpacked bytes, number of entries, what
is kept of each file. Names that lead out of the archive are refused.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import os
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Self, cast

from pdd.errors import TopologyError
from pdd.topology.files import MAX_FILE_BYTES, Memory

MAX_UNPACKED_BYTES = 256 << 20
MAX_ENTRIES = 300_000
MAX_KEPT_BYTES = 64 << 20
_MAX_NAME = 1024
_MAX_PARTS = 64  # of a name; devices behind many switches have about 20
_KEPT = ("sys", "proc", "etc", "dev")  # of a file system's root; all that a reader ever asks for


class Bounded:
    """A stream that refuses to give more than MAX_UNPACKED_BYTES."""

    def __init__(self, stream: IO[bytes], name: str) -> None:
        self._stream = stream
        self._left = MAX_UNPACKED_BYTES
        self._name = name

    def read(self, size: int) -> bytes:
        data = self._stream.read(min(size, self._left + 1))
        self._left -= len(data)
        if self._left < 0:
            raise TopologyError(f"{self._name}: unpacks to more than {MAX_UNPACKED_BYTES >> 20} MiB",
                                hint="An export of a machine's topology takes less than one.")
        return data


@contextlib.contextmanager
def unpacked(path: Path) -> Iterator[Bounded]:
    """The file's bytes, decompressed when they begin as gzip, bzip2 or xz do. Reading a damaged file raises one of
    BROKEN."""
    with path.open("rb") as raw:
        start = raw.read(6)
        raw.seek(0)
        with _opened(raw, start) as stream:
            yield Bounded(stream, str(path))


def _opened(raw: IO[bytes], start: bytes) -> IO[bytes]:
    if start.startswith(b"\x1f\x8b"):
        return cast(IO[bytes], gzip.open(raw))
    if start.startswith(b"BZh"):
        return cast(IO[bytes], bz2.open(raw))
    if start.startswith(b"\xfd7zXZ"):
        return cast(IO[bytes], lzma.open(raw))
    return raw


BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError)  # what reading a damaged file raises


class _Header(tarfile.TarInfo):
    """tarfile takes a broken header as the end, and what follows as not there; here only the end is the end. Numbers of
    an extended header that are none, and extended headers of extended headers without end, are a broken header too."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(archive)
        except tarfile.HeaderError as error:
            if str(error) == "end of file header":
                raise
            raise tarfile.ReadError(f"{error} at byte {archive.offset}") from error
        except (ValueError, RecursionError) as error:
            raise tarfile.ReadError(f"bad extended header at byte {archive.offset}: {error}") from error


def read_tar(path: Path) -> Memory:
    """All entries of the archive that matter. Raises TopologyError when it is broken, hostile or too large."""
    memory = Memory()
    kept = 0
    try:
        with unpacked(path) as stream, _tar(stream) as archive:
            for count, member in enumerate(archive):
                if count >= MAX_ENTRIES:
                    raise TopologyError(f"{path}: more than {MAX_ENTRIES} entries", hint="Export it again.")
                name = _inside(path, member.name)
                if len(memory) > MAX_ENTRIES:  # directories that only the names of others tell of
                    raise TopologyError(f"{path}: more than {MAX_ENTRIES} entries, their directories included",
                                        hint="Export it again.")
                if not set(name.split("/")[:3]).intersection(_KEPT):
                    continue
                if member.isdir():
                    memory.add_dir(name)
                elif member.issym():
                    memory.add_link(name, member.linkname[:_MAX_NAME])
                elif member.islnk():
                    memory.add_link(name, "/" + _inside(path, member.linkname))
                elif member.isreg() and (content := archive.extractfile(member)) is not None:
                    data = content.read(MAX_FILE_BYTES)
                    kept += len(data)
                    if kept > MAX_KEPT_BYTES:
                        raise TopologyError(f"{path}: holds more than {MAX_KEPT_BYTES >> 20} MiB of small files",
                                            hint="Export it again.")
                    memory.add_file(name, data)
            while stream.read(1 << 16):  # to the end, where the checksum is
                continue
    except BROKEN as error:
        raise TopologyError(f"{path}: the archive is broken: {error or type(error).__name__}",
                            hint="Copy it again, or export it again.") from error
    return memory


def _tar(stream: Bounded) -> tarfile.TarFile:
    return tarfile.open(fileobj=cast(IO[bytes], stream), mode="r|", tarinfo=_Header)


def _inside(path: Path, name: str) -> str:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if len(parts) > _MAX_PARTS:
        raise TopologyError(f"{path}: has an entry {len(parts)} directories deep: {name[:80]!r}",
                            hint="This is no export of a topology.")
    if ".." in parts or len(name) > _MAX_NAME or "\0" in name:
        raise TopologyError(f"{path}: has an entry that leads out of it: {name[:80]!r}",
                            hint="This is no export of a topology; do not unpack it.")
    return "/".join(parts)


def write_tar(path: Path, entries: dict[str, bytes | str | None]) -> None:
    """Writes files (bytes), links (text) and directories (None), the same entries always as the same bytes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with (
            temporary.open("wb") as raw,
            gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for name in sorted(entries):
                _add(archive, name, entries[name])
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise TopologyError(f"{path}: cannot be written: {error.strerror}", hint="Choose another place.") from error


def _add(archive: tarfile.TarFile, name: str, content: bytes | str | None) -> None:
    member = tarfile.TarInfo(name)
    member.mode = 0o644
    if content is None:
        member.type, member.mode = tarfile.DIRTYPE, 0o755
    elif isinstance(content, str):
        member.type, member.linkname = tarfile.SYMTYPE, content
    else:
        member.size = len(content)
    archive.addfile(member, io.BytesIO(content) if isinstance(content, bytes) else None)

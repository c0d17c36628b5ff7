"""Where the Python environment keeps a libfabric of its own.

The `mpich` wheel (extra `fabric`) installs libfabric 2.x outside of site-packages, below the environment's data
directory. A PEX makes no such directory: its environment links the wheel's other files to where the wheel was unpacked,
and the data lies there. The native loader asks here for such places and adds the system's; this module loads nothing
and decides nothing.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path


def search_dirs() -> list[tuple[str, str]]:
    """Existing directories to look in after the system's, as (path, source)."""
    data = [Path(sysconfig.get_path("data"))]
    for metadata in Path(sysconfig.get_path("purelib")).glob("mpich-*.dist-info/METADATA"):
        data.append(metadata.resolve().parents[1] / ".prefix" / "data")
    wheels = [place / "lib" / "mpich" for place in data]
    return [(str(wheel), "mpich-wheel") for wheel in wheels if (wheel / "libfabric.so.1").exists()][:1]

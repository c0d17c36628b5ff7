"""Where the Python environment keeps a libfabric of its own.

The `mpich` wheel (extra `fabric`) installs libfabric 2.x outside of site-packages, below the environment's data
directory. The native loader asks here for such places and adds the system's; this module loads nothing and decides
nothing.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path


def search_dirs() -> list[tuple[str, str]]:
    """Existing directories to look in after the system's, as (path, source)."""
    wheel = Path(sysconfig.get_path("data"), "lib", "mpich")
    return [(str(wheel), "mpich-wheel")] if (wheel / "libfabric.so.1").exists() else []

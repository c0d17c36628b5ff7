"""Dumps are written beside what the node does, and it waits for them when it ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pdd.control import dump_files, stories
from pdd.daemon.dump import Dumps


async def test_a_dump_is_written_meanwhile_and_waited_for_at_the_end(tmp_path: Path) -> None:
    asked: list[str] = []

    async def picture(why: str) -> stories.Flight:
        asked.append(why)
        await asyncio.sleep(0.01)
        return stories.Flight(name="d0", role="decode", boot_id="b", version="0", why=why, ts=1796000000.5, ts_mono=1.0)

    dumps = Dumps(tmp_path, picture)
    dumps.late("no progress", "r1")
    dumps.late("nor here", "r2")  # within the pause
    dumps.write_soon("the node has failed")
    assert (asked, dump_files.kept(tmp_path, "d0")) == ([], [])
    await dumps.wait()
    assert asked == ["no progress", "the node has failed"]
    [written] = dump_files.kept(tmp_path, "d0")  # both of one moment: the clock of the picture stands
    assert dumps.about("r1") == str(written)
    assert dumps.about("r2") is None
    await dumps.wait()  # for nothing

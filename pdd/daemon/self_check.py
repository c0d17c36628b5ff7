"""What the running daemon sees of itself: the checks of `pdd check`, from inside its limits and its sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pdd.address import parse_address
from pdd.config import Config
from pdd.control import schema_check
from pdd.daemon.kv_fabric import KvFabric
from pdd.doctor import gather
from pdd.doctor.facts import Library
from pdd.doctor.peer import result
from pdd.doctor.report import chosen, judge
from pdd.doctor.verdict import FAIL, PASS, WARN
from pdd.messenger.status import PeerStatus
from pdd.topology.placement import Placement
from pdd.units import show_duration


async def report(
    config: Config, placement: Placement | None, fabric: KvFabric | None, dialled: Sequence[PeerStatus]
) -> schema_check.CheckReport:
    """libfabric is not asked again while the node has its NICs open (`fabric`)."""
    facts = await asyncio.to_thread(
        gather.gather, config, (), "the running node", library=_library(fabric), placement=placement
    )
    links = (_link(status) for status in dialled)
    return schema_check.CheckReport(checks=(*judge(facts, chosen(())), *links))


def _link(status: PeerStatus) -> schema_check.CheckResult:
    """D070 of a prefiller, as this node's link to it is; nobody is called."""
    address, since = parse_address(status.address), show_duration(status.age_seconds)
    if status.state == "up":
        drains = ", it drains" if status.draining else ""
        return result("D070", address, PASS, f"the link to {status.name} is up for {since}{drains}")
    level = WARN if status.state in ("suspect", "connecting") else FAIL
    why = f": {status.last_error}" if status.last_error else ""
    return result("D070", address, level, f"the link is {status.state} for {since}{why}", fix=(
        f"`pdd check --peer {address}` calls at it from here",
        "there: `systemctl status 'pdd@*'`, `pdd status`; a process that is stopped or swaps is silent, too",
    ))


def _library(fabric: KvFabric | None) -> Library | None:
    if fabric is None:
        return None
    caps = fabric.caps
    return Library(caps.library_path, caps.library_version,
                   offers=tuple((fabric.provider, nic.domain, nic.address) for nic in caps.nics))

"""What the running daemon sees of itself: the checks of `pdd check`, from inside its limits and its sandbox."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pdd.control import schema_check
from pdd.doctor import gather
from pdd.doctor.facts import Library
from pdd.doctor.report import chosen, judge

if TYPE_CHECKING:
    from pdd.daemon.node import Node


async def report(node: Node) -> schema_check.CheckReport:
    """libfabric is not asked again while the node has its NICs open."""
    facts = await asyncio.to_thread(
        gather.gather, node.config, (), "the running node", library=_library(node), placement=node.placement
    )
    return schema_check.CheckReport(checks=tuple(judge(facts, chosen(()))))


def _library(node: Node) -> Library | None:
    if node.fabric is None:
        return None
    caps = node.fabric.caps
    return Library(caps.library_path, caps.library_version,
                   offers=tuple((node.fabric.provider, nic.domain, nic.address) for nic in caps.nics))

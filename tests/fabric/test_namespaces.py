"""Two hosts joined by two cables: what happens when one of them carries nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from pdd.fabric import _native as native
from tests.fabric.conftest import Stack, link
from tests.fabric.fabric_node import RemoteNode, spawn
from tests.fabric.namespaces import Host, Unavailable, two_hosts

pytestmark = pytest.mark.slow


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    try:
        with two_hosts([400, 400]) as pair:
            yield pair
    except Unavailable as error:
        pytest.skip(str(error))


def push(writer: RemoteNode, reader: RemoteNode, ends: tuple[int, int], count: int) -> list[int]:
    """Moves pages four times; how many writes each NIC took."""
    before = writer.call("stats")["nic_writes"]
    for _ in range(4):
        key = reader.call("imm_allocate", ends[1])
        reader.call("imm_arm", key, count)
        writer.push(ends[0], key, list(range(count)), list(range(0, 2 * count, 2)))
        reader.wait(native.IMM_REACHED, key)
    return [now - then for now, then in zip(writer.call("stats")["nic_writes"], before, strict=True)]


def test_a_cable_that_is_out_leaves_its_share_to_the_other(best_fabric_stack: Stack, hosts: tuple[Host, Host]) -> None:
    here, there = hosts
    count = 512
    there.set_link(1, False)
    reader = spawn(best_fabric_stack.library, "tcp", there.addresses, 2 * count, prefix=there.prefix)
    writer = spawn(best_fabric_stack.library, "tcp", here.addresses, 2 * count, prefix=here.prefix)
    try:
        shares = push(writer, reader, link(writer, reader), count)
        assert shares[0] > 0
        assert shares[1] == 0
        there.set_link(1, True)
        again = link(writer, reader)
        deadline = time.monotonic() + 30
        while push(writer, reader, again, count)[1] == 0:  # a lost SYN is sent again after a second
            assert time.monotonic() < deadline
    finally:
        writer.stop()
        reader.stop()

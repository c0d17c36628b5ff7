"""The typed face of the native fabric: nothing that native code says is lost or of another type."""

from __future__ import annotations

import msgspec
import pytest

from pdd.fabric import _native as native
from pdd.fabric.engine import Fabric
from pdd.fabric.types import Caps, EndpointClosed, EndpointFailed, Nic, Stats, TransferDone


@pytest.fixture
def fabric() -> Fabric:
    return Fabric(provider="tcp", bind=["127.0.0.1"])


def test_caps_and_stats_have_every_field_of_native_code(fabric: Fabric) -> None:
    assert set(fabric.caps) == set(Caps.__struct_fields__)
    assert set(fabric.caps["nics"][0]) == set(Nic.__struct_fields__)
    assert set(fabric.stats()) == set(Stats.__struct_fields__)
    caps, stats = fabric.read_caps(), fabric.read_stats()
    assert msgspec.to_builtins(caps) == {**fabric.caps, "nics": tuple(fabric.caps["nics"])}
    assert (caps.kind, caps.fence, caps.nics[0].domain) == ("tcp", "endpoint", caps.domain)
    assert (stats.endpoints, stats.nic_writes) == (0, (0,))
    fabric.close()


def test_a_field_of_another_type_is_an_error() -> None:
    with pytest.raises(msgspec.ValidationError, match="writes"):
        msgspec.convert({"writes": "many"}, Stats)


def test_events_of_a_transfer_and_of_endpoints(fabric: Fabric) -> None:
    """A transfer on an endpoint that leads nowhere ends with it, and the fence is told."""
    endpoint = fabric.open_endpoint()
    transfer = fabric.open_transfer(endpoint, 7)
    fabric.close_endpoint(endpoint)
    events = []
    while not any(isinstance(event, EndpointClosed | EndpointFailed) for event in events):
        events += fabric.read_events()
    assert [type(event) for event in events] == [TransferDone, EndpointClosed]
    done, closed = events
    assert isinstance(done, TransferDone)
    assert (done.transfer, done.end.ok, done.end.failed, done.end.unknown) == (transfer, 0, 0, 0)
    assert closed == EndpointClosed(endpoint)
    fabric.close()


def test_every_kind_of_event_has_a_type() -> None:
    from pdd.fabric.engine import _EVENTS

    kinds = {getattr(native, name) for name in dir(native) if name.startswith(("IMM_RE", "IMM_OV", "TRANSFER_", "ENDPOINT_"))}
    assert set(_EVENTS) == kinds
    assert len(kinds) == 5

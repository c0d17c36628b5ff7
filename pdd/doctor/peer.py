"""Checks of another node: can it be reached, does it know the token, does it fit, how long a message takes. A call, no link."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

from pdd.address import Address
from pdd.config import Config
from pdd.config_credentials import read_credential
from pdd.control.schema_check import CheckResult
from pdd.doctor.verdict import FAIL, PASS, SKIP, Check, Verdict
from pdd.errors import ModelError, PeerIncompatible, PeerLost, PeerUnauthenticated
from pdd.messenger import versions, wire
from pdd.messenger.handshake import LocalNode
from pdd.messenger.planner import compare
from pdd.messenger.visit import Visit, visit
from pdd.model.config import fingerprint, load_config
from pdd.units import show_duration
from pdd.version import VERSION

_TITLES = {"D070": "reached", "D071": "token", "D072": "fits", "D073": "round trip", "D074": "write test"}


def result(id: str, address: Address, level: str, message: str, **more: object) -> CheckResult:
    found = Verdict(level, f"{address}: {message.removeprefix(f'{address} ')}", **more)  # type: ignore[arg-type]
    check = Check(id, "peer", _TITLES[id], lambda facts: found)
    return CheckResult(id=check.id, group=check.group, title=check.title, level=level, message=found.message,
                       observed=found.observed, expected=found.expected, fix=found.fix)


def call(address: Address, config: Config, timeout: float) -> list[CheckResult]:
    """D070 to D073. Raises WrongGreeting: no node answers there, but something that speaks frames."""
    try:
        node = local_node(config)
        found = asyncio.run(visit(address, node, timeout))
    except PeerUnauthenticated as error:
        fix = ("compare the files of peers.token_credential on both nodes",)
        return [result("D070", address, PASS, "answers"), result("D071", address, FAIL, error.message, fix=fix)]
    except PeerIncompatible as error:
        return [result("D070", address, PASS, "answers"),
                result("D072", address, FAIL, error.message, fix=("upgrade the older of the two nodes",))]
    except PeerLost as error:
        return [result("D070", address, FAIL, error.message, fix=(error.hint, "is a firewall between the two?"))]
    return [
        result("D070", address, PASS, f"{found.hello.name} ({found.hello.role}) answers, pdd {found.hello.version}",
               observed=found.connect_seconds),
        result("D071", address, PASS, "the token is the same" if node.token else "neither end has a token"),
        _fits(address, config, node, found),
        result("D073", address, PASS, f"connected in {show_duration(found.connect_seconds)}, a message and its answer took "
               f"{show_duration(found.round_trip_seconds)}", observed=found.round_trip_seconds),
    ]


def _fits(address: Address, config: Config, node: LocalNode, found: Visit) -> CheckResult:
    theirs = found.hello
    if theirs.role == "decode":
        message = f"{theirs.name} has role decode, and only prefillers are called"
        return result("D072", address, FAIL, message, observed=theirs.role)
    if not config.model.path:
        return result("D072", address, SKIP, "model.path is not set here: there is nothing to compare with")
    diff = compare(node.geometry, theirs.geometry)
    if diff:
        return result("D072", address, FAIL, "; ".join(map(str, diff)), observed={each.field: each.theirs for each in diff},
                      expected={each.field: each.ours for each in diff},
                      fix=("give both nodes the same model and dtype, and page sizes that divide one another",))
    return result("D072", address, PASS, f"same model and layout, protocol {found.version}, KV over {theirs.provider}",
                  observed=theirs.provider)


def local_node(config: Config) -> LocalNode:
    """What a node of these settings would say of itself, as far as that is known before its model is loaded.

    Raises:
        ConfigError, ModelError: the token or the model cannot be read.
    """
    token = read_credential(config.peers.token_credential, "peers.token_credential")
    return LocalNode(
        name=config.node.name, role=config.node.role, epoch=secrets.randbits(64), version=VERSION,
        provider=config.fabric.provider, geometry=_geometry(config), regions=(),
        versions=versions.of_decoder(config.engine.dp),
        token=token[0].get_secret_value().encode() if token else None,
    )


def _geometry(config: Config) -> wire.Geometry:
    one = wire.Geometry(model="", dtype="", num_layers=1, num_kv_heads=1, head_dim=1, page_size=config.kv.page_size,
                        tp=config.engine.tp, num_pages=config.kv.num_pages or 1, vocab_size=1, groups=config.engine.dp)
    if not config.model.path:
        return one
    folder = Path(config.model.path)
    try:
        model, identity = load_config(folder), fingerprint(folder)
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error.strerror}", hint="Check model.path.") from None
    dtype = model.dtype if config.model.dtype == "auto" else config.model.dtype
    shape = model.kv_shape(dtype)
    fields = {"model": identity, "dtype": dtype, "num_layers": shape.num_layers, "num_kv_heads": shape.num_kv_heads,
              "head_dim": shape.head_dim, "tiles": shape.tiles, "vocab_size": model.vocab_size}
    return wire.Geometry(**{**{name: getattr(one, name) for name in one.__struct_fields__}, **fields})


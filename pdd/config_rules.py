"""Rules that involve more than one setting: what a role needs, what must be proved beyond loopback, which time is longer.

They look at a config whose settings are right one by one. Where some were wrong it has defaults in their place, and each
broken rule says which keys it looked at, so that `config_load` leaves out those that defaults have broken.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

from pdd.address import parse_address
from pdd.config import Config
from pdd.config_sources import Origin, Problem


@dataclasses.dataclass(frozen=True, slots=True)
class BrokenRule:
    """A rule that does not hold: `keys` are the settings that it looks at."""

    problem: Problem
    keys: set[str]
    is_of_entry: bool  # of a list, and not of the list as a whole


def broken_rules(
    config: Config, origins: Mapping[str, Origin], demo: bool, entries: Mapping[str, Sequence[int]]
) -> list[BrokenRule]:
    """Mistakes that are in no single setting. `entries`: of a list that lost its wrong entries, where the others stood."""
    found: list[BrokenRule] = []

    def report(key: str, message: str, *others: str, index: int | None = None) -> None:
        known = (origins[each] for each in (key, *others) if each in origins)
        origin = origins.get(key) or next((each for each in known if each.kind == "file"), Origin("default"))
        place = entries[key][index] if index is not None and key in entries else index
        found.append(BrokenRule(Problem.at(origin, key, message, index=place), {key, *others}, index is not None))

    if not config.model.path and not demo:
        report("model.path", "required; the folder of the model (or start with --demo)")
    if config.node.role == "prefill" and not config.peers.listen:
        report("peers.listen", "required for role prefill; decoders connect to it", "node.role")
    _check_role(config, report)
    addresses: list[tuple[str, int | None, str]] = [("api.listen", None, config.api.listen)]
    addresses += [("peers.listen", None, config.peers.listen)] if config.peers.listen else []
    addresses += [("peers.static", index, peer) for index, peer in enumerate(config.peers.static)]
    for key, index, address in addresses:
        place = parse_address(address, listen=True)
        if place.port == 0:
            report(key, f"{address} has no port", index=index)
        if key != "api.listen" and not place.is_loopback and not config.peers.token_credential:
            report(
                key,
                f"{address} is not loopback: peers must prove a shared token; set peers.token_credential",
                "peers.token_credential",
                index=index,
            )
    if not parse_address(config.api.listen, listen=True).is_loopback and not config.api.api_keys_credential:
        report(
            "api.listen",
            f"{config.api.listen} is not loopback: clients must have a key; set api.api_keys_credential",
            "api.api_keys_credential",
        )
    if config.api.tls_key and not config.api.tls_cert:
        report("api.tls_key", "is the key of no certificate: set api.tls_cert", "api.tls_cert")
    required, wanted = config.fabric.require, config.fabric.provider
    if required and wanted not in ("auto", required):
        report("fabric.require", f"{required} is required and fabric.provider asks for {wanted}: no start can have both",
               "fabric.provider")
    order = ("heartbeat", "suspect_after", "dead_after")
    for less, more in itertools.pairwise(order):
        if getattr(config.peers, less) >= getattr(config.peers, more):
            report(f"peers.{more}", f"must be longer than peers.{less}", f"peers.{less}")
    return found


def _check_role(config: Config, report: Callable[..., None]) -> None:
    """What a role would pass over, or could not work without."""
    role, peers = config.node.role, config.peers
    if role == "decode" and peers.listen:
        report("peers.listen", "role decode takes no work of decoders; remove it, or use role prefill or both", "node.role")
    if role != "decode" and peers.static:
        what = "prefills by itself and asks no prefiller" if role == "both" else "is asked, and connects to nobody"
        where = "use role decode" if role == "both" else "set it on the decoders"
        report("peers.static", f"role {role} {what}; remove it, or {where}", "node.role")
    if config.engine.dp > 1 and peers.listen:
        report(
            "engine.dp",
            "a node that takes prompts of decoders (peers.listen) has one group, whose layer counter tells when KV can be "
            "sent: start more prefillers instead, decoders use all that they are told of",
            "peers.listen",
            "node.role",
        )
    if role == "decode" and not peers.static and not config.scheduler.local_prefill_fallback:
        report(
            "peers.static",
            "role decode needs a prefiller: set peers.static (--peer HOST:PORT), or "
            "scheduler.local_prefill_fallback = true to prefill here, or use role both",
            "node.role",
            "scheduler.local_prefill_fallback",
        )

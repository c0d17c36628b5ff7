"""What the transfer of one prompt between two layouts will be: who writes what to whom, in how many writes, how long it
takes and how much of that nobody waits for. Pure arithmetic on the planner that both ends run.

Pages are looked at twice: adjacent, when the pools had neighbours to give and pages merge, and scattered, when no two
pages touch. A network is two published figures: writes a second of a NIC, and the size of a write from which it runs at
line rate. A layer takes, over the ranks that send and those that receive,

    max(bytes of the rank / rate of its NICs, its writes / writes a second)

and is sent while the next one is computed: compute of a layer = its FLOPs / (ranks * FLOP/s of one). What is still on
its way when the last layer is computed is exposed. Nothing else is modelled: no latency, no congestion, no decode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from pdd.kv.dry_run_report import Amount, Pair, Refused, Report, Side, Verdict
from pdd.kv.merge import MergedWrite, merge
from pdd.kv.sharding import ShardSpec, ShardWrites, incompatibilities, node_units, plan_node_writes

NETWORKS = (("EFA", 2_100_000, 32 << 10), ("ConnectX-7", 11_000_000, 16 << 10))  # writes/s, bytes of a saturating write
ADJACENT, SCATTERED = "adjacent", "scattered"


@dataclasses.dataclass(frozen=True, slots=True)
class Assumptions:
    """About the machines; everything else is known."""

    rank_flops: float = 400e12  # that one rank of the prefiller reaches, FLOP/s
    rank_bits_per_second: float = 400e9  # of the NICs of one rank, on both ends
    chunk_tokens: int = 8192  # of one step


Flops = Callable[[int, int, int], float]  # of a layer, computing tokens [begin, end)


def dry_run(
    family: str, source: ShardSpec, destination: ShardSpec, flops: Flops, *, dp: int = 1, prompt_tokens: int,
    skip_tokens: int = 0, assumed: Assumptions = Assumptions(),
) -> Report:
    """`num_pages` of both need not be set; two that do not fit give a report without pairs."""
    moved = prompt_tokens - 1
    refused = tuple(Refused(field=field, source=a, destination=b) for field, a, b in incompatibilities(source, destination))
    plans: dict[str, tuple[ShardWrites, ...]] = {}
    if not refused:
        plans = {pages: _plan(source, destination, moved, skip_tokens, step) for pages, step in ((ADJACENT, 1), (SCATTERED, 2))}
    chunks = _chunks(skip_tokens, moved, assumed.chunk_tokens)
    steps = {pages: _by_chunk(plans[pages], chunks) for pages in plans}
    speed = source.tp * assumed.rank_flops
    compute = [[flops(layer, *chunk) / speed for layer in range(source.num_layers)] for chunk in chunks]
    pairs = _pairs(source, destination, plans.get(ADJACENT, ()), steps)
    layer = Amount(
        units=sum(pair.units for pair in pairs), nbytes=sum(pair.nbytes for pair in pairs),
        writes_adjacent=sum(pair.writes_adjacent for pair in pairs),
        writes_scattered=sum(pair.writes_scattered for pair in pairs),
    )
    layers = source.num_layers
    request = Amount(units=layers * layer.units, nbytes=layers * layer.nbytes,
                     writes_adjacent=layers * layer.writes_adjacent, writes_scattered=layers * layer.writes_scattered)
    assert refused or request.units == node_units(source, destination, moved, skip_tokens)
    total = sum(map(sum, compute))
    return Report(
        family=family, num_layers=layers, num_kv_heads=source.num_kv_heads, tiles=source.tiles, head_dim=source.head_dim,
        source=_side(source, 1), destination=_side(destination, dp), refused=refused, prompt_tokens=prompt_tokens,
        moved_tokens=moved, skip_tokens=skip_tokens, unit_tokens=min(source.page_size, destination.page_size), pairs=pairs,
        layer=layer, request=request, rank_flops=assumed.rank_flops, rank_bits_per_second=assumed.rank_bits_per_second,
        chunk_tokens=assumed.chunk_tokens, layer_compute_seconds=total / layers, request_compute_seconds=total,
        verdicts=tuple(
            _verdict(network, pages, steps[pages], compute, assumed) for network in NETWORKS for pages in plans
        ),
    )


def _side(spec: ShardSpec, dp: int) -> Side:
    return Side(tp=spec.tp, dp=dp, page_size=spec.page_size, copies=spec.copies, heads_per_rank=spec.heads_per_rank,
                page_bytes=spec.layout.page_bytes, dtype=spec.dtype)


def _plan(source: ShardSpec, destination: ShardSpec, num_tokens: int, skip_tokens: int, step: int) -> tuple[ShardWrites, ...]:
    """With every `step`-th page of both pools."""
    pages = [range(0, step * spec.layout.num_pages_for(num_tokens), step) for spec in (source, destination)]
    specs = [dataclasses.replace(spec, num_pages=len(spread) * step)
             for spec, spread in zip((source, destination), pages, strict=True)]
    return plan_node_writes(specs[0], specs[1], num_tokens=num_tokens, skip_tokens=skip_tokens, src_pages=pages[0],
                            dst_pages=pages[1])


def _chunks(begin: int, end: int, size: int) -> list[tuple[int, int]]:
    return [(at, min(at + size, end)) for at in range(begin, end, size)]


@dataclasses.dataclass(frozen=True, slots=True)
class _Sent:
    """Writes of one layer of one chunk between two ranks."""

    source_rank: int
    destination_rank: int
    writes: list[MergedWrite]

    @property
    def nbytes(self) -> int:
        return sum(write.nbytes for write in self.writes)


def _by_chunk(plans: Sequence[ShardWrites], chunks: Sequence[tuple[int, int]]) -> list[list[_Sent]]:
    return [[_Sent(plan.src_rank, plan.dst_rank, merge(plan, *plan.entries(*chunk))) for plan in plans] for chunk in chunks]


def _pairs(
    source: ShardSpec, destination: ShardSpec, plans: Sequence[ShardWrites], steps: dict[str, list[list[_Sent]]]
) -> tuple[Pair, ...]:
    found = []
    for number, plan in enumerate(plans):
        counts = {pages: sum(len(sent[number].writes) for sent in steps[pages]) for pages in steps}
        held, wanted = source.heads(plan.src_rank), destination.heads(plan.dst_rank)
        first, last = max(held.start, wanted.start), min(held.stop, wanted.stop) - 1
        found.append(Pair(
            source_rank=plan.src_rank, destination_rank=plan.dst_rank, heads=f"{first}" if first == last else f"{first}-{last}",
            units=int(plan.units.sum()), nbytes=int(plan.nbytes.sum()), writes_adjacent=counts[ADJACENT],
            writes_scattered=counts[SCATTERED],
        ))
    return tuple(sorted(found, key=lambda pair: (pair.source_rank, pair.destination_rank)))


def _verdict(
    network: tuple[str, int, int], pages: str, steps: list[list[_Sent]], compute: list[list[float]], assumed: Assumptions
) -> Verdict:
    name, writes_per_second, needs = network
    rate = assumed.rank_bits_per_second / 8
    wire = [_layer_seconds(sent, rate, writes_per_second) for sent in steps]
    computed = sent_at = 0.0
    for chunk_compute, seconds in zip(compute, wire, strict=True):
        for layer_compute in chunk_compute:
            computed += layer_compute
            sent_at = max(sent_at, computed) + seconds
    num_layers = len(compute[0]) if compute else 0
    num_writes = sum(len(each.writes) for sent in steps for each in sent)
    mean = sum(each.nbytes for sent in steps for each in sent) / num_writes if num_writes else 0.0
    return Verdict(
        network=name, pages=pages, bytes_per_write=mean, needs_bytes=needs, saturates=mean >= needs,
        writes_per_second=writes_per_second, layer_seconds=sum(wire), request_seconds=sum(wire) * num_layers,
        exposed_seconds=sent_at - computed,
    )


def _layer_seconds(sent: Sequence[_Sent], rate: float, writes_per_second: int) -> float:
    """Until the busiest NIC of either end is done with one layer of one chunk."""
    loads: dict[tuple[str, int], tuple[int, int]] = {}
    for each in sent:
        for end in (("source", each.source_rank), ("destination", each.destination_rank)):
            nbytes, writes = loads.get(end, (0, 0))
            loads[end] = nbytes + each.nbytes, writes + len(each.writes)
    return max((max(nbytes / rate, writes / writes_per_second) for nbytes, writes in loads.values()), default=0.0)

"""Hands NICs out to GPUs fairly. Pure: a function of who may have what.

Each GPU comes with the NICs that are equally good for it. Nobody goes without: where NICs are scarce, they are shared
as evenly as can be. Where they abound, every GPU of a group gets the same number and none is shared, so that ranks that
wait for each other move their bytes at the same pace; what does not divide stays spare.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

G = TypeVar("G", bound=Hashable)
N = TypeVar("N", bound=Hashable)


def share_out(wanted: Mapping[G, Sequence[N]]) -> dict[G, tuple[N, ...]]:
    """The NICs of each GPU. Earlier GPUs get earlier NICs."""
    given: dict[G, list[N]] = {gpu: [] for gpu in wanted}
    for group in _groups(wanted):
        free = [nic for gpu in group for nic in wanted[gpu]]
        free = list(dict.fromkeys(free))
        while True:
            round_ = _match({gpu: [nic for nic in wanted[gpu] if nic in free] for gpu in group})
            if len(round_) < len(group):
                break
            for gpu, nic in round_.items():
                given[gpu].append(nic)
                free.remove(nic)
        if not given[group[0]]:
            _share(group, wanted, round_, given)
    order = {gpu: {nic: place for place, nic in enumerate(nics)} for gpu, nics in wanted.items()}
    return {gpu: tuple(sorted(nics, key=order[gpu].__getitem__)) for gpu, nics in given.items()}


def _share(group: list[G], wanted: Mapping[G, Sequence[N]], first: dict[G, N], given: dict[G, list[N]]) -> None:
    """Too few for each to have its own: matched ones first, then round after round among those left over."""
    left, round_ = list(group), first
    while round_:
        for gpu, nic in round_.items():
            given[gpu].append(nic)
            left.remove(gpu)
        load = Counter(nic for gpu in group for nic in given[gpu])
        round_ = _match({gpu: sorted(wanted[gpu], key=load.__getitem__) for gpu in left})


def _groups(wanted: Mapping[G, Sequence[N]]) -> list[list[G]]:
    """GPUs that compete with each other, directly or through others. GPUs that want nothing are in none."""
    holders: dict[N, list[G]] = {}
    for gpu, nics in wanted.items():
        for nic in nics:
            holders.setdefault(nic, []).append(gpu)
    seen: set[G] = set()
    found = []
    for start in wanted:
        if start in seen or not wanted[start]:
            continue
        seen.add(start)
        reached, waiting = {start}, [start]
        while waiting:
            for nic in wanted[waiting.pop()]:
                new = [gpu for gpu in holders[nic] if gpu not in reached]
                reached.update(new)
                waiting += new
        seen |= reached
        found.append([gpu for gpu in wanted if gpu in reached])
    return found


def _match(wanted: Mapping[G, Sequence[N]]) -> dict[G, N]:
    """As many GPUs as can have one NIC of their own each, in the order of GPUs (augmenting paths)."""
    holder: dict[N, G] = {}

    def seat(gpu: G, tried: set[N]) -> bool:
        free = next((nic for nic in wanted[gpu] if nic not in holder), None)
        if free is not None:
            holder[free] = gpu
            return True
        for nic in wanted[gpu]:
            if nic not in tried:
                tried.add(nic)
                if seat(holder[nic], tried):
                    holder[nic] = gpu
                    return True
        return False

    for gpu in wanted:
        seat(gpu, set())
    place = {gpu: nic for nic, gpu in holder.items()}
    return {gpu: place[gpu] for gpu in wanted if gpu in place}

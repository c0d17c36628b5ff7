"""Which requests an operator means by an id, as it was copied from a log, an answer or a list. Pure.

Any of the forms that pdd/api/ids.py names, and any prefix of one that only one HTTP request has. What is written out wins
over what is only a beginning.
"""

from __future__ import annotations

from collections.abc import Mapping

from pdd.daemon.ledger import MOST_FINISHED
from pdd.errors import AmbiguousRequest, NoSuchRequest
from pdd.units import counted, show_duration

_PREFIXES = ("chatcmpl-", "cmpl-", "req-")
_MOST_NAMED = 4  # in a message


def of_one(wanted: str, known: Mapping[str, str | None]) -> list[str]:
    """The node's ids of the one HTTP request that `wanted` names: one per choice of its answer that matches.

    Args:
        known: id inside the node → what the client called it, if it did.
    Raises:
        NoSuchRequest, AmbiguousRequest.
    """
    key = next((wanted.removeprefix(prefix) for prefix in _PREFIXES if wanted.startswith(prefix)), wanted)
    for exact in (
        [each for each in known if each in (wanted, key)],
        [each for each in known if base(each) == key],
        [each for each, given in known.items() if given == wanted],
        [each for each, given in known.items()
         if (key and each.startswith(key)) or (given is not None and given.startswith(wanted))],
    ):
        requests = {base(each) for each in exact}
        if len(requests) == 1:
            return exact
        if requests:
            raise AmbiguousRequest(f"{wanted} may be any of {listed(sorted(requests))}", hint="Write more of it.")
    raise NoSuchRequest(f"no request {wanted} is live or lately finished here", hint="`pdd requests` lists the live ones.")


def unknown(
    wanted: str, *, live: int, ended: int, forgotten: int, oldest_seconds: float | None, dumps: str
) -> NoSuchRequest:
    """What is kept, that `wanted` is not among it, and where else to look.

    Args:
        live, ended, forgotten: requests in hand, requests that are kept after their end, and those that no longer are.
        oldest_seconds: since the end of the oldest that is kept; None: none is.
        dumps: the directory of the flight recorder's dumps.
    """
    among, bound = counted(live, "live request"), f"at most {MOST_FINISHED} that ended are kept"
    if oldest_seconds is not None:
        among += f" and the latest {ended} that ended, the oldest {show_duration(oldest_seconds)} ago"
        bound = f"at most {MOST_FINISHED} are kept"
    lost = f"; {counted(forgotten, 'older one')} {'is' if forgotten == 1 else 'are'} forgotten" if forgotten else ""
    return NoSuchRequest(
        f"no request {wanted} is known here: it is not among {among} ({bound}){lost}",
        hint="Another node may have taken it, or this one before its last start. Of older ones that failed the log may tell "
        f"(`journalctl -u 'pdd@*' -g ID`), and the dumps in {dumps} (`zgrep -l ID`).",
    )


def base(request_id: str) -> str:
    """The part that all choices of one answer share."""
    return request_id.partition("-")[0]


def listed(ids: list[str]) -> str:
    more = f" and {len(ids) - _MOST_NAMED} more" if len(ids) > _MOST_NAMED else ""
    return ", ".join(ids[:_MOST_NAMED]) + more

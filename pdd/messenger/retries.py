"""How often a request has tried to get its KV, and from whom: what must outlive one attempt.

Kept by request id from the first failed attempt until the KV is whole or the request ends; bounded, the oldest go
first.
"""

from __future__ import annotations

import dataclasses

_MOST = 4096


@dataclasses.dataclass(slots=True)
class Tries:
    num_failed: int = 0  # refusals included
    last: str = ""  # why the last attempt failed
    failed_by: set[int] = dataclasses.field(default_factory=set)  # epochs of prefillers that did not finish it
    refused_by: dict[int, str] = dataclasses.field(default_factory=dict)  # of those that never will -> why


class Retries:
    """Owner: Decoder."""

    def __init__(self) -> None:
        self._by_request: dict[str, Tries] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def of(self, request_id: str) -> Tries:
        """What is known, for reading."""
        return self._by_request.get(request_id) or Tries()

    def failed(self, request_id: str, epoch: int | None, why: str, *, refused: bool) -> Tries:
        tries = self._by_request.pop(request_id, None) or Tries()
        self._by_request[request_id] = tries  # youngest last
        tries.num_failed += 1
        tries.last = why
        if epoch is not None:
            tries.failed_by.add(epoch)
            if refused:
                tries.refused_by[epoch] = why
        if len(self._by_request) > _MOST:
            del self._by_request[next(iter(self._by_request))]
        return tries

    def forget(self, request_id: str) -> None:
        self._by_request.pop(request_id, None)

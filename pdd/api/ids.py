"""How one HTTP request is named: everything that this node makes of it shares one hex part.

    X-Request-Id of the answer   req-HEX, or what the client sent, unchanged
    id of the body               cmpl-HEX or chatcmpl-HEX
    inside the node              HEX, with -INDEX where the answer has several choices

A client's own id is kept beside, for logs and `pdd requests`; it never names anything inside the node, so that two clients
may send the same one. One that is too long, or not printable ASCII without blanks, counts as not sent.
"""

from __future__ import annotations

import dataclasses
import re
import secrets

from starlette.datastructures import Headers
from starlette.types import Scope

_KEY = "pdd.ids"  # in scope["state"]
_USABLE = re.compile(r"[\x21-\x7e]{1,128}")


@dataclasses.dataclass(frozen=True, slots=True)
class RequestIds:
    hex: str
    given: str | None = None  # the client's X-Request-Id

    @classmethod
    def new(cls, headers: Headers) -> RequestIds:
        given = headers.get("x-request-id", "")
        return cls(secrets.token_hex(12), given if _USABLE.fullmatch(given) else None)

    @property
    def header(self) -> str:
        """X-Request-Id of the answer."""
        return self.given or f"req-{self.hex}"

    def __str__(self) -> str:
        """For the log."""
        return f"{self.hex} ({self.given})" if self.given else self.hex


def keep(scope: Scope, ids: RequestIds) -> None:
    scope.setdefault("state", {})[_KEY] = ids


def kept(scope: Scope) -> RequestIds:
    """The ids that `keep` put there."""
    ids: RequestIds = scope["state"][_KEY]
    return ids

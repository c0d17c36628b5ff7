"""Takes out of a document what a stranger need not see, and counts it. Pure.

Always: prompts. Unless it is told otherwise: what names or holds a credential, ids that clients gave their requests
(which may say who they are), hardware identities, and what looks like a key or a token in any text.
"""

from __future__ import annotations

import collections
import re
from typing import Any

HIDDEN = "(hidden)"
_PROMPTS = ("prompt", "prompt_text", "tokens_text")
_IDENTITIES = ("uuid", "serial", "gid", "guid", "mac")
_CREDENTIAL = re.compile(r"credential|secret|password|token_file|api_key", re.IGNORECASE)
_KEY = re.compile(r"(?i)\bbearer\s+[\w.~+/=-]+|\b(?:sk|hf|ghp|xox[a-z])[-_][\w-]{8,}")
_ASSIGNED = re.compile(  # a line of a settings file
    r'^(\s*#?\s*[\w.]*(?:credential|secret|password|api_key)\w*\s*=\s*)"[^"\n]+"', re.IGNORECASE | re.MULTILINE
)


class Redactor:
    """One for everything that is packed together, so that the same id is the same everywhere."""

    def __init__(self, *, everything: bool) -> None:
        """`everything`: else only prompts."""
        self.counts: collections.Counter[str] = collections.Counter()
        self._everything = everything
        self._clients: dict[str, str] = {}

    def meet(self, document: Any) -> None:
        """Learns the ids that clients gave, wherever in a document they stand."""
        if isinstance(document, dict):
            given = document.get("client_request_id")
            if isinstance(given, str) and len(given) > 3:
                self._clients.setdefault(given, f"client-id-{len(self._clients) + 1}")
            for value in document.values():
                self.meet(value)
        elif isinstance(document, list):
            for value in document:
                self.meet(value)

    def clean(self, document: Any, name: str = "") -> Any:
        """A copy without what is hidden. `name`: of the member that it is."""
        if name in _PROMPTS and document is not None:
            return self._hide("prompt")
        if self._everything and name in _IDENTITIES and document:
            return self._hide("hardware identity")
        if self._everything and _CREDENTIAL.search(name) and document:
            return self._setting(document)
        if isinstance(document, dict):
            return {key: self.clean(value, key) for key, value in document.items()}
        if isinstance(document, list):
            return [self.clean(value, name) for value in document]
        return self.text(document) if isinstance(document, str) else document

    def text(self, text: str) -> str:
        if not self._everything:
            return text
        for given, stand_in in self._clients.items():
            if given in text:
                self.counts["client's request id"] += text.count(given)
                text = text.replace(given, stand_in)
        text, keys = _KEY.subn(HIDDEN, text)
        text, settings = _ASSIGNED.subn(rf'\1"{HIDDEN}"', text)
        self.counts += collections.Counter({"key or token": keys, "credential": settings})
        return text

    def _setting(self, document: Any) -> Any:
        """A setting of pdd.config/1 keeps its origin."""
        if isinstance(document, dict) and "value" in document:
            return {**document, "value": self._hide("credential") if document["value"] else document["value"]}
        return self._hide("credential")

    def _hide(self, what: str) -> str:
        self.counts[what] += 1
        return HIDDEN

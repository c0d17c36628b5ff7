"""What a node may be called: the name is a directory of its sockets, a label of its metrics and a word on command lines."""

from __future__ import annotations

import re

PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
RULE = "use 1 to 64 letters, digits, dots, hyphens and underscores, the first a letter or digit"


def is_name(text: str) -> bool:
    return re.fullmatch(PATTERN, text) is not None

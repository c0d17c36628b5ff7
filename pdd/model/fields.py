"""Values of config.json, each of the type that it must have. No torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from pdd.errors import ModelError


@dataclasses.dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object of config.json. A value that is null counts as absent. Raises ModelError, which names the field."""

    raw: dict[str, Any]
    at: str = ""  # where it stands, for messages

    def get(self, name: str, default: Any = None) -> Any:
        value = self.raw.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ModelError(f"config.json: {self.at}{name} must be a positive integer, is {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Greater than 0, or the default, which may be 0."""
        value = self.raw.get(name)
        if default is not None and value in (None, default):
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ModelError(f"config.json: {self.at}{name} must be a positive number, is {value!r}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.get(name, default))

    def token_ids(self, name: str) -> list[int]:
        """One id or a list of them; none when absent."""
        value = self.get(name, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and item >= 0 for item in ids):
            raise ModelError(f"{name} must be a token id or a list of them, is {value!r}")
        return ids

    def rope(self) -> Fields:
        """`rope_parameters` (transformers 5) or `rope_scaling` (4)."""
        for name in ("rope_parameters", "rope_scaling"):
            value = self.get(name)
            if value is None:
                continue
            if not isinstance(value, dict) or any(isinstance(item, dict) for item in value.values()):
                raise ModelError(f"config.json: {name} per layer type are not supported")
            return Fields(value, f"{name}.")
        return Fields({})

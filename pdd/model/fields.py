"""Values of config.json, each of the type that it must have and no larger than any model's. No torch.

The file may come from anywhere: whatever stands in it is used or refused by name, here and by its readers.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from pdd.errors import ModelError

MOST_LAYERS = 4096
_DTYPES = {"bfloat16": "bfloat16", "float16": "bfloat16", "float32": "float32"}  # fp16 weights run as bf16
_MOST = 2**31 - 1
_ALMOST_INFINITE = 1e30  # squares and products of such are numbers yet
_MOST_BYTES = 16 << 20  # of a config.json; the largest have lists per layer, and are below 1 MiB


def read_json(path: Path, hint: str = "", hint_broken: str = "Copy the checkpoint again.") -> dict[str, Any]:
    """The JSON object in the file.

    Raises:
        ModelError: there is none, or more than any model needs. FileNotFoundError
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ModelError(f"{path} is longer than {_MOST_BYTES >> 20} MiB", hint=hint_broken)
        value = json.loads(text.decode("utf-8"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}", hint=hint) from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}", hint=hint_broken) from error
    except RecursionError:
        raise ModelError(f"{path} is nested too deeply", hint=hint_broken) from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


@dataclasses.dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object of config.json. A value that is null counts as absent. Raises ModelError, which names the field."""

    raw: dict[str, Any]
    at: str = ""  # where it stands, for messages

    def get(self, name: str, default: Any = None) -> Any:
        value = self.raw.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None, *, least: int = 1, most: int = _MOST) -> int:
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            if isinstance(value, int) and value > most:
                raise ModelError(f"config.json: {self.at}{name} must be at most {most}")
            what = "a positive integer" if least == 1 else f"an integer from {least}"
            raise ModelError(f"config.json: {self.at}{name} must be {what}, is {_shown(value)}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Greater than 0, or the default, which may be 0."""
        value = self.raw.get(name)
        if default is not None and value in (None, default):
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _ALMOST_INFINITE:
            raise ModelError(f"config.json: {self.at}{name} must be a positive number, is {_shown(value)}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if value not in (True, False):
            raise ModelError(f"config.json: {self.at}{name} must be true or false, is {_shown(value)}")
        return bool(value)

    def integers(self, name: str) -> list[int]:
        """None when absent."""
        value = self.get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise ModelError(f"config.json: {self.at}{name} must be a list of integers, is {_shown(value)}")
        return value

    def texts(self, name: str) -> list[str]:
        """None when absent."""
        value = self.get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ModelError(f"config.json: {self.at}{name} must be a list of texts, is {_shown(value)}")
        return value

    def word(self, name: str, default: str) -> str:
        value = self.get(name, default)
        if not isinstance(value, str):
            raise ModelError(f"config.json: {self.at}{name} must be a text, is {_shown(value)}")
        return value

    def token_ids(self, name: str) -> list[int]:
        """One id or a list of them; none when absent."""
        value = self.get(name, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and 0 <= item <= _MOST for item in ids):
            raise ModelError(f"{name} must be a token id or a list of them, is {_shown(value)}")
        return ids

    def dtype(self) -> str:
        """What the model runs in: "bfloat16" or "float32", which is meant when config.json says nothing."""
        dtype = self.word("dtype", self.word("torch_dtype", "float32"))
        if dtype not in _DTYPES:
            raise ModelError(f"config.json: dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
        return _DTYPES[dtype]

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


def _shown(value: object) -> str:
    """Of a value that may be anything, as much as a message takes."""
    text = repr(value)
    return text if len(text) <= 64 else f"{text[:60]}..."

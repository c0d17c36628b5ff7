"""The types of settings: how a duration, a size, an address or a provider is written, and what of it is refused.

Each is what pydantic takes as a field's type: it checks the text, and turns one that carries a unit into a number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any

from annotated_types import Le
from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from pdd import names, units
from pdd.address import parse_address


@dataclasses.dataclass(frozen=True)
class TextForm:
    """How a number is written in TOML when it carries a unit. Found in a field's metadata."""

    noun: str
    parse: Callable[[str], float]
    format: Callable[[Any], str]


def _reader(form: TextForm) -> BeforeValidator:
    def read(value: object) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return form.parse(f"{value}")
        if not isinstance(value, str):
            raise ValueError(f'{value!r} is no {form.noun}; write a text like "{form.format(30)}"')
        return form.parse(value)

    return BeforeValidator(read)


def _tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _listen_address(text: str) -> str:
    return str(parse_address(text, listen=True))


def _optional_listen_address(text: str) -> str:
    return _listen_address(text) if text else text


def _peer_address(text: str) -> str:
    return str(parse_address(text))


_PROVIDERS = ("efa", "verbs", "tcp")
_NO_PROVIDERS = {
    "net": "libfabric before 1.18 calls tcp that; write tcp",
    "verbs;ofi_rxm": "write verbs",
    "shm": "it cannot carry KV: nothing stops the writes of a peer that died or hangs; on one host, tcp over loopback can",
    "tcp;ofi_rxm": "it crashes: 1.17 when an endpoint closes under incoming writes, 2.x in the survivor of a killed peer",
    "sockets": "it starves its own progress thread and is deprecated",
}


def _provider(text: str) -> str:
    """One that pdd can fence; native code refuses the same ones, whoever asks."""
    if text not in _PROVIDERS:
        why = _NO_PROVIDERS.get(text, "it is none that pdd uses")
        raise ValueError(f"{text!r} is refused: {why} (one of {', '.join(_PROVIDERS)})")
    return text


def _wanted_provider(text: str) -> str:
    return text if text == "auto" else _provider(text)


def _required_provider(text: str) -> str:
    return _provider(text) if text else text


def _compatible(text: str) -> str:
    if text != "vllm":
        raise ValueError(f"{text!r} is none whose names pdd knows (vllm)")
    return text


_DURATION = TextForm("duration", units.parse_duration, units.format_duration)
_SIZE = TextForm("size", units.parse_size, units.format_size)
_LARGEST_BYTES = 1 << 30
LARGEST_INT32 = 2**31 - 1  # numbers of tokens and of pages are int32 on the wire and in tensors
Duration = Annotated[
    float, _reader(_DURATION), Le(units.LONGEST_SECONDS), _DURATION,
    WithJsonSchema({"type": "string", "examples": ["30s", "5m"]}),
]
Size = Annotated[
    int, _reader(_SIZE), Le(_LARGEST_BYTES), _SIZE, WithJsonSchema({"type": "string", "examples": ["8MiB"]})
]
Provider = Annotated[str, AfterValidator(_wanted_provider)]
RequiredProvider = Annotated[str, AfterValidator(_required_provider)]
ListenAddress = Annotated[str, AfterValidator(_listen_address)]
OptionalListenAddress = Annotated[str, AfterValidator(_optional_listen_address)]
PeerAddress = Annotated[str, AfterValidator(_peer_address)]
Strings = Annotated[tuple[str, ...], BeforeValidator(_tuple)]
PeerAddresses = Annotated[tuple[PeerAddress, ...], BeforeValidator(_tuple)]
CompatNames = Annotated[tuple[Annotated[str, AfterValidator(_compatible)], ...], BeforeValidator(_tuple)]
Name = Annotated[str, Field(pattern=names.PATTERN)]


def text_form(field: Any) -> TextForm | None:
    return next((item for item in field.metadata if isinstance(item, TextForm)), None)

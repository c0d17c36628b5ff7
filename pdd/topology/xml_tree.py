"""XML files as a small tree of elements, for files that may come from anyone.

Nothing is expanded or fetched: a file that declares an entity is refused, an external DTD is not looked at. Size,
number and depth of elements are bounded. Text between elements is dropped: neither format of ours uses it, but for
hwloc's distance values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any
from xml.parsers import expat

from pdd.errors import TopologyError

MAX_BYTES = 64 << 20
MAX_ELEMENTS = 500_000
MAX_DEPTH = 200
_MAX_TEXT = 1 << 20  # of one element


@dataclasses.dataclass(slots=True)
class Element:
    tag: str
    attributes: dict[str, str]
    children: list[Element] = dataclasses.field(default_factory=list)
    text: list[str] = dataclasses.field(default_factory=list)

    def get(self, name: str, default: str = "") -> str:
        return self.attributes.get(name, default)

    def all(self, *tags: str) -> Iterator[Element]:
        """This element and all below it that have one of these tags."""
        waiting = [self]
        while waiting:
            element = waiting.pop()
            if element.tag in tags:
                yield element
            waiting += reversed(element.children)


class _Builder:
    def __init__(self, name: str) -> None:
        self._name = name
        self._open: list[Element] = []
        self._count = 0
        self._text = 0
        self.root: Element | None = None

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        element = Element(tag, attributes)
        self._count += 1
        if self._count > MAX_ELEMENTS or len(self._open) >= MAX_DEPTH:
            raise TopologyError(f"{self._name}: more than {MAX_ELEMENTS} XML elements, or nested deeper than {MAX_DEPTH}",
                                hint="This describes no machine.")
        if self._open:
            self._open[-1].children.append(element)
        else:
            self.root = element
        self._open.append(element)
        self._text = 0

    def end(self, tag: str) -> None:
        self._open.pop()

    def text(self, data: str) -> None:
        self._text += len(data)
        if self._text <= _MAX_TEXT:
            self._open[-1].text.append(data)

    def entity(self, name: str, *_: Any) -> None:
        raise TopologyError(f"{self._name}: declares the XML entity {name[:40]!r}",
                            hint="Neither hwloc nor NCCL writes entities: the file is not what it seems.")


def parse(data: bytes, name: str) -> Element:
    """The root element. `name`: of the file, for errors. Raises TopologyError for what is no XML of a bounded size."""
    builder = _Builder(name)
    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.text
    parser.EntityDeclHandler = builder.entity
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        raise TopologyError(f"{name}:{error.lineno}:{error.offset + 1}: broken XML: {expat.ErrorString(error.code)}",
                            hint="Copy the file again.") from error
    except (LookupError, ValueError) as error:  # an encoding that Python does not have, or a multi-byte one
        raise TopologyError(f"{name}: XML in an encoding that cannot be read: {error}", hint="Save it as UTF-8.") from error
    if builder.root is None:
        raise TopologyError(f"{name}: an XML file without an element", hint="Copy the file again.")
    return builder.root

"""Renders a model's chat template as transformers does, in jinja2's immutable sandbox.

The template comes with the model and is data: the sandbox keeps it from reaching Python through attributes, and it
may not change what it is given. What it refuses (raise_exception) or stumbles over is the request's error.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from pdd.errors import InvalidRequest, ModelError


class ChatTemplate:
    """One compiled template. Rendering is safe from any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """special_tokens: what the template may use by name, e.g. bos_token.

        Raises:
            ModelError: the template is no valid jinja2.
        """
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template does not compile: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """
        Raises:
            InvalidRequest: the template refuses these messages.
        """
        try:
            return self._template.render(messages=[dict(message) for message in messages], tools=None, documents=None,
                                         add_generation_prompt=add_generation_prompt, **self._special_tokens)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as error:
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}",
                                 param="messages") from error


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
            sort_keys: bool = False) -> str:
    # jinja2's own escapes <, > and & for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)

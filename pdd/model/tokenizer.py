"""Text to token ids and back, with the model folder's tokenizer.json. No torch.

Detokenizing works on bytes: each token stands for a fixed run of bytes, and an incremental UTF-8 decoder turns runs
into whole characters. That holds for byte-level BPE (GPT-2's alphabet) and for sentencepiece-style BPE with byte
fallback, the two kinds that the supported families use; others are refused. Bytes that can never become a character
read U+FFFD, as the tokenizers library writes them; bytes that still may are held.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from pdd.errors import InvalidRequest, ModelError
from pdd.model.chat_template import ChatTemplate
from pdd.model.config import load_config
from pdd.model.folder import TOKENIZER_FILE

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_BOS_CHARACTERS = 64  # longer than any BOS with the blanks before it
_SPACE_MARK = "▁"  # sentencepiece's space


class Tokenizer:
    """The tokenizer of one model. Safe from any thread."""

    def __init__(self, model_dir: str | Path) -> None:
        """
        Raises:
            ModelError: a file is missing or unreadable, or the tokenizer is of a kind that is not supported.
        """
        directory = Path(model_dir)
        config = load_config(directory)
        self.vocab_size = config.vocab_size
        self.eos_token_ids = config.eos_token_ids
        path = directory / TOKENIZER_FILE
        try:
            text = path.read_text(encoding="utf-8")
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
            settings = _read_settings(directory / "tokenizer_config.json")
        except FileNotFoundError as error:
            raise ModelError(f"{path} is missing", hint="pdd needs the fast tokenizer's file.") from error
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ModelError(f"{path} is unreadable: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special, self._bytes = _token_table(self._tokenizer, json.loads(text), path)
        named = _special_tokens(settings)
        self._add_bos: bool | None = settings.get("add_bos_token")
        self._bos_id = self._tokenizer.token_to_id(named["bos_token"]) if "bos_token" in named else None
        template = _template(directory, settings)
        self._chat_template = ChatTemplate(template, named) if template is not None else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. With `add_special_tokens`, BOS stands first if the model wants one, and never twice."""
        ids = self._ids(text, add_special_tokens)
        bos = self._bos_id
        if not add_special_tokens or bos is None:
            return ids
        written = self._ids(text[:_BOS_CHARACTERS], False)[:1] == [bos]  # by the client, in the text
        present = ids[:1] == [bos]
        if written and ids[:2] == [bos, bos]:
            return ids[1:]
        if self._add_bos is True and not present:
            return [bos, *ids]
        if self._add_bos is False and present and not written:
            return ids[1:]
        return ids

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        # `Tokenizer.encode` of the library holds Python's lock throughout, which stops the event loop whatever thread it
        # runs on; `encode_batch_fast` gives it up, and leaves out offsets that nobody here reads.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids` as the continuation of some text: no leading space is stripped."""
        parts = (self.token_bytes(token) for token in ids if not (skip_special_tokens and token in self._special))
        return b"".join(parts).decode("utf-8", "replace")

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The rendered prompt with the header of the answer. Encode it with add_special_tokens=False.

        Raises:
            InvalidRequest: the model has no chat template, or its template refuses the messages.
        """
        if self._chat_template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        return self._chat_template.render(messages)

    def detokenizer(self) -> Detokenizer:
        """For the tokens of one generated text."""
        return Detokenizer(self._bytes, self._special)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that the token stands for; the name of a special token; b"" for an id that has no token."""
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""


class Detokenizer:
    """Tokens of one text in, whole characters out. Owner: whoever streams the text."""

    def __init__(self, table: Sequence[bytes], special: frozenset[int]) -> None:
        self._table = table
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Text that became certain with this token; "" inside a character or for a special token."""
        if token in self._special or not 0 <= token < len(self._table):
            return ""
        return self._decoder.decode(self._table[token])

    def flush(self) -> str:
        """What is still held, at the end of the text: U+FFFD for a cut character."""
        return self._decoder.decode(b"", final=True)


def byte_characters() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte, as every byte-level BPE vocabulary spells it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in printable}
    rest = (byte for byte in range(256) if byte not in table)
    table.update({byte: chr(256 + index) for index, byte in enumerate(rest)})
    return table


def _token_table(tokenizer: tokenizers.Tokenizer, raw: dict[str, Any],
                 path: Path) -> tuple[frozenset[int], list[bytes]]:
    """(ids of special tokens, bytes by id)."""
    decoder = raw.get("decoder") or {}
    kinds = {decoder.get("type"), *(part.get("type") for part in decoder.get("decoders", ()))}
    byte_level = "ByteLevel" in kinds
    if not byte_level and not kinds & {"ByteFallback", "Metaspace"}:
        raise ModelError(f"{path}: a tokenizer with decoder {sorted(map(str, kinds))} is not supported",
                         hint="pdd runs byte-level BPE and sentencepiece BPE with byte fallback.")
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values()) + 1)
    byte_of = {character: byte for byte, character in byte_characters().items()}
    for token, index in vocabulary.items():
        table[index] = _byte_level(token, byte_of) if byte_level else _sentencepiece(token)
    special = set()
    for added in raw.get("added_tokens", ()):  # stand for their own text, whatever the model's alphabet is
        table[added["id"]] = added["content"].encode()
        if added["special"]:
            special.add(added["id"])
    return frozenset(special), table


def _byte_level(token: str, byte_of: Mapping[str, int]) -> bytes:
    if all(character in byte_of for character in token):
        return bytes(byte_of[character] for character in token)
    return token.encode()


def _sentencepiece(token: str) -> bytes:
    byte = _BYTE_TOKEN.match(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE_MARK, " ").encode()


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    settings = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(settings, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return settings


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... by name; each is a string or an object with its content."""
    named = {}
    for key, value in settings.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            named[key] = content
    return named


def _template(directory: Path, settings: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        template = {item.get("name"): item.get("template") for item in template}.get("default")
    return template if isinstance(template, str) else None

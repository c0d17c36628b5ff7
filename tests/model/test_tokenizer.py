"""Tokenizer, incremental detokenizer and chat templates, against transformers where it has the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from pdd.errors import InvalidRequest, ModelError
from pdd.model.chat_template import ChatTemplate
from pdd.model.demo import END_OF_TEXT, IM_END, IM_START, write_demo_model
from pdd.model.tokenizer import Tokenizer

CHAT = [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": "naïve 🙂 <b>?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer(model)


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@settings(deadline=None)
@given(text=st.text())
def test_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    if "�" not in text:
        assert not any("�" in piece for piece in pieces)


@settings(deadline=None)
@given(raw=st.binary(max_size=40))
def test_any_bytes_stream_as_they_decode(tokenizer: Tokenizer, raw: bytes) -> None:
    """Tokens of a sampled text may be no UTF-8 at all."""
    assert "".join(stream(tokenizer, list(raw))) == raw.decode("utf-8", "replace")


def test_a_split_character_is_held_and_flushed(tokenizer: Tokenizer) -> None:
    assert stream(tokenizer, list("a🙂".encode())) == ["a", "", "", "", "🙂", ""]
    assert stream(tokenizer, list("a🙂".encode())[:-1]) == ["a", "", "", "", "�"]


def test_special_tokens_have_names_but_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>")
    assert ids == [IM_START, *b"hi", IM_END]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"
    assert tokenizer.token_bytes(END_OF_TEXT) == b"<|endoftext|>"
    assert tokenizer.eos_token_ids == (IM_END, END_OF_TEXT)


def test_ids_without_a_token_are_empty(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 264
    assert tokenizer.token_bytes(263) == tokenizer.token_bytes(10**6) == tokenizer.token_bytes(-1) == b""
    assert stream(tokenizer, [104, 263, 105]) == ["h", "", "i", ""]


@pytest.mark.filterwarnings("ignore")
def test_chat_and_ids_equal_transformers(model: Path, tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(model)
    text = tokenizer.apply_chat_template(CHAT)
    assert text == reference.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert tokenizer.encode(text, add_special_tokens=False) == reference(text, add_special_tokens=False).input_ids
    ids = list(range(32, 261))
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


# -- BOS --------------------------------------------------------------------------------------------------------------
def with_bos(model: Path, target: Path, *, post_processor: bool, **settings_: object) -> Tokenizer:
    """The demo tokenizer with <|user|> as BOS."""
    write_demo_model(target)
    if post_processor:
        raw = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
        raw.post_processor = tokenizers.processors.TemplateProcessing(single="<|user|> $A",
                                                                     special_tokens=[("<|user|>", 259)])
        raw.save(str(target / "tokenizer.json"))
    path = target / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"bos_token": {"content": "<|user|>"}} | settings_
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return Tokenizer(target)


@pytest.mark.parametrize(("post_processor", "flag", "plain", "written"), [
    (True, None, [259, 97], [259, 97]),
    (True, True, [259, 97], [259, 97]),
    (True, False, [97], [259, 97]),
    (False, True, [259, 97], [259, 97]),
    (False, None, [97], [259, 97]),
])
def test_bos_stands_once(model: Path, tmp_path: Path, post_processor: bool, flag: bool | None, plain: list[int],
                         written: list[int]) -> None:
    tokenizer = with_bos(model, tmp_path, post_processor=post_processor, add_bos_token=flag)
    assert tokenizer.encode("a") == plain
    assert tokenizer.encode("<|user|>a") == written
    assert tokenizer.encode("a", add_special_tokens=False) == [97]
    assert tokenizer.encode("<|user|>a", add_special_tokens=False) == [259, 97]


# -- sentencepiece ----------------------------------------------------------------------------------------------------
def test_sentencepiece_with_byte_fallback(tmp_path: Path) -> None:
    """As Llama 2's: ▁ for space, <0xNN> for bytes. A continuation keeps its leading space."""
    write_demo_model(tmp_path)
    vocab = {"<unk>": 0, "<s>": 1, "▁": 2, "▁Hi": 3, "H": 4, "i": 5, "▁H": 6,
             **{f"<0x{byte:02X}>": 7 + byte for byte in range(256)}}
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[("▁", "H"), ("▁H", "i")], byte_fallback=True,
                                                     unk_token="<unk>"))
    raw.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Prepend("▁"),
                                                      tokenizers.normalizers.Replace(" ", "▁")])
    raw.decoder = tokenizers.decoders.Sequence([
        tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse(),
        tokenizers.decoders.Strip(" ", 1, 0)])
    raw.add_special_tokens(["<s>"])
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode("Hi 🙂")
    assert ids == [3, 2, *(7 + byte for byte in "🙂".encode())]
    assert stream(tokenizer, [1, *ids]) == ["", " Hi", " ", "", "", "", "🙂", ""]
    assert raw.decode(ids) == "Hi 🙂"


def test_other_kinds_are_refused(model: Path, tmp_path: Path) -> None:
    write_demo_model(tmp_path)
    raw = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    raw.decoder = tokenizers.decoders.WordPiece()
    raw.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="WordPiece"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json is unreadable"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="is missing"):
        Tokenizer(tmp_path)


# -- chat templates ---------------------------------------------------------------------------------------------------
def test_template_helpers() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}\n{{ m | tojson }}"
        "{% endfor %}{{ strftime_now('%Y')|length }}", {"bos_token": "<s>"})
    assert template.render(CHAT) == (
        '<s>{"role": "system", "content": "Be brief.\\n"}{"role": "user", "content": "naïve 🙂 <b>?"}4')


@pytest.mark.parametrize("source", [
    "{{ raise_exception('system role not supported') }}",
    "{{ messages[0].absent.more }}",
    "{{ messages[0]['content'] + 1 }}",
    "{{ ''.__class__.__mro__ }}",  # the sandbox
    "{{ messages.append(1) }}",
    "{{ 1 / 0 }}",
])
def test_a_template_that_refuses_ends_the_request_only(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template refuses"):
        ChatTemplate(source, {}).render(CHAT)


def test_a_broken_template_is_the_models_error() -> None:
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate("{% if %}", {})


def test_template_sources_in_order(tmp_path: Path) -> None:
    write_demo_model(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    path.write_text(json.dumps(config))
    assert Tokenizer(tmp_path).apply_chat_template(CHAT) == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer(tmp_path).apply_chat_template(CHAT) == "file"
    (tmp_path / "chat_template.jinja").unlink()
    path.unlink()
    with pytest.raises(InvalidRequest, match="no chat template"):
        Tokenizer(tmp_path).apply_chat_template(CHAT)

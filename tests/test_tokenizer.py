import hashlib
from dataclasses import replace

import pytest
import tokenizers
from counting_artifact import Counting
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from artifacts import Manifest
from runtime.errors import LoadError, RequestError
from runtime.tokenizer import TextStream, Tokenizer


def bytes_tokenizer() -> tokenizers.Tokenizer:
    """One token a byte, and one special token: what a character is split into is known."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|end|>"])
    return inner


INNER = bytes_tokenizer()
TOKENIZER = Tokenizer(INNER)
END = INNER.token_to_id("<|end|>")


def artifact_with(tmp_path, text: str | None) -> tuple:
    folder = Counting().write(tmp_path)
    manifest = Manifest.read(folder)
    if text is not None:
        (folder / "tokenizer.json").write_text(text)
        digest = hashlib.sha256(text.encode()).hexdigest()
        manifest = replace(manifest, files={"tokenizer.json": digest})
    return folder, manifest


@given(st.text(max_size=40), st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_the_pieces_of_a_stream_make_the_text_and_none_holds_half_a_character(text, size):
    ids = TOKENIZER.encode(text)
    stream = TextStream(TOKENIZER)
    pieces = [stream.add(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert "".join(pieces) + stream.finish() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 256), max_size=60))
@settings(max_examples=60, deadline=None)
def test_bytes_that_are_no_text_give_what_decoding_them_at_once_gives(ids):
    stream = TextStream(TOKENIZER)
    pieces = [stream.add([i]) for i in ids]
    assert "".join(pieces) + stream.finish() == TOKENIZER.decode(ids)


def test_a_character_appears_with_its_last_byte():
    stream = TextStream(TOKENIZER)
    ids = TOKENIZER.encode("a\N{EURO SIGN}b")
    assert [stream.add([i]) for i in ids] == ["a", "", "", "\N{EURO SIGN}", "b"]


def test_half_a_character_at_the_end_is_not_lost():
    stream = TextStream(TOKENIZER)
    assert stream.add(TOKENIZER.encode("\N{EURO SIGN}")[:2]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_special_tokens_are_not_shown():
    stream = TextStream(TOKENIZER)
    assert stream.add([*TOKENIZER.encode("hi"), END]) == "hi"
    assert stream.finish() == ""


def test_nothing_is_added_to_a_prompt():
    assert TOKENIZER.decode(TOKENIZER.encode("  x\n")) == "  x\n"
    assert TOKENIZER.encode("") == []


def test_what_is_no_text_is_refused():
    with pytest.raises(RequestError, match="not UTF-8 at character 1"):
        TOKENIZER.encode("a\udcff")


def test_an_artifact_may_have_no_tokenizer(tmp_path):
    assert Tokenizer.of(*artifact_with(tmp_path, None)) is None


def test_the_tokenizer_of_an_artifact_is_read(tmp_path):
    tokenizer = Tokenizer.of(*artifact_with(tmp_path, INNER.to_str()))
    assert tokenizer is not None
    assert tokenizer.encode("abc") == TOKENIZER.encode("abc")


@pytest.mark.parametrize("text", ["{}", "not json", '{"model": 3}'])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, text):
    with pytest.raises(LoadError, match=r"tokenizer.json is no tokenizer: .* token ids"):
        Tokenizer.of(*artifact_with(tmp_path, text))


def test_a_tokenizer_that_was_changed_is_refused(tmp_path):
    folder, manifest = artifact_with(tmp_path, INNER.to_str())
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(LoadError, match=r"tokenizer.json has the SHA-256"):
        Tokenizer.of(folder, manifest)

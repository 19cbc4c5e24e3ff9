import json
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from echo_batch.errors import ModelError
from echo_batch.io.tokenizer import IncrementalDetokenizer, Tokenizer, load_tokenizer
from tests.tiny_tokenizer import SPECIAL, tokenizer_json, write_tokenizer


def load(directory: Path, config: dict[str, Any] | None = None, **options: Any) -> Tokenizer:
    tokenizer = load_tokenizer(write_tokenizer(directory, config, **options))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(tmp_path_factory.mktemp("tokenizer"))


def byte_fallback() -> Tokenizer:
    """A SentencePiece-like vocabulary, which has no byte-level decoder."""
    words = ["▁hello", "▁world", "▁", "a", "b", "é", "日"]
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {word: 256 + i for i, word in enumerate(words)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token=None))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(inner, {})


def test_no_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    assert load_tokenizer(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
    ],
)
def test_broken_files(tmp_path: Path, name: str, text: str) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=name):
        load_tokenizer(tmp_path)


def test_a_file_can_be_named(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer is not None and tokenizer.bos_token_id == 0


def test_round_trip_and_ids(tiny: Tokenizer) -> None:
    text = "the quick brown fox été 日本語 😀\n\n\t  x"
    assert tiny.decode(tiny.encode(text)) == text
    assert (tiny.bos_token_id, tiny.eos_token_id, tiny.token_to_id("<think>"), tiny.token_to_id("no")) == (
        0,
        1,
        4,
        None,
    )
    assert tiny.encode_batch([text, "", "a"]) == [tiny.encode(text), [], tiny.encode("a")]
    assert tiny.vocab_size > max(tiny.encode(text))
    assert tiny.special_tokens == {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1]}


@pytest.mark.parametrize(
    ("config", "in_post_processor", "adds"),
    [
        ({"add_bos_token": True}, False, True),
        ({"add_bos_token": False}, True, False),
        ({"add_bos_token": None}, True, True),
        ({"add_bos_token": None}, False, False),
        ({"add_bos_token": True}, True, True),
        ({"bos_token": None}, False, False),  # GLM has none
    ],
)
def test_exactly_one_bos(tmp_path: Path, config: dict[str, Any], in_post_processor: bool, adds: bool) -> None:
    tokenizer = load(tmp_path, config, bos_in_post_processor=in_post_processor)
    plain = tokenizer.encode("hello world")
    assert 0 not in plain
    assert tokenizer.encode("hello world", add_special_tokens=True) == ([0, *plain] if adds else plain)
    written = tokenizer.encode(SPECIAL[0] + "hello world", add_special_tokens=True)
    assert written == [0, *plain]


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer.from_str(tokenizer_json())
    inner.enable_truncation(5)
    inner.enable_padding(length=50)
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert len(tokenizer.encode("x" * 10)) == 10
    assert [len(ids) for ids in tokenizer.encode_batch(["x", "y" * 9])] == [1, 9]


def test_special_tokens_are_not_text_but_thinking_is(tiny: Tokenizer) -> None:
    ids = tiny.encode(f"{SPECIAL[2]}hello<think>a</think>b{SPECIAL[1]}")
    assert tiny.decode(ids) == "hello<think>a</think>b"
    assert tiny.decode(ids, skip_special_tokens=False) == f"{SPECIAL[2]}hello<think>a</think>b{SPECIAL[1]}"


def test_tokens_that_only_the_config_knows(tmp_path: Path) -> None:
    size = tokenizers.Tokenizer.from_str(tokenizer_json()).get_vocab_size()
    listed = {"0": {"content": SPECIAL[0], "special": True}, str(size): {"content": "<new>", "special": True}}
    tokenizer = load(tmp_path, {"added_tokens_decoder": listed})
    assert tokenizer.encode("<new>") == [size] and tokenizer.decode([size]) == ""
    with pytest.raises(ModelError, match="'<new>' should have id 9999"):
        load(tmp_path, {"added_tokens_decoder": {"9999": {"content": "<new>"}}})


@pytest.mark.parametrize("text", ["a" * 400_000, "the lazy dog " * 40_000, "日本" * 100_000, "\n" * 400_000])
def test_very_long_texts(tiny: Tokenizer, text: str) -> None:
    start = time.monotonic()
    ids = tiny.encode(text)
    assert tiny.decode(ids) == text
    assert time.monotonic() - start < 15  # quadratic would be minutes


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [*(detokenizer.add([i]) for i in ids), detokenizer.finish()]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_incremental_text_is_the_whole_text(tiny: Tokenizer, data: st.DataObject) -> None:
    # Any ids: broken UTF-8, special tokens and ids that do not exist among them.
    ids = data.draw(st.lists(st.integers(0, tiny.vocab_size + 2) | st.integers(6, 270), max_size=40))
    assert "".join(pieces(tiny, ids)) == tiny.decode(ids)
    cut = data.draw(st.integers(0, len(ids)))
    detokenizer = tiny.make_detokenizer()
    assert detokenizer.add(ids[:cut]) + detokenizer.add(ids[cut:]) + detokenizer.finish() == tiny.decode(ids)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=20))
def test_pieces_never_hold_half_a_character(tiny: Tokenizer, text: str) -> None:
    text = text.replace("�", "")
    parts = pieces(tiny, tiny.encode(text))
    assert "".join(parts) == text
    assert not any("�" in part for part in parts)


def test_character_comes_with_its_last_byte(tiny: Tokenizer) -> None:
    ids = tiny.encode("𝄞")  # not in the training text: four byte tokens
    assert len(ids) == 4
    assert pieces(tiny, ids) == ["", "", "", "𝄞", ""]
    assert pieces(tiny, ids[:3]) == ["", "", "", "�"]


@pytest.mark.parametrize("text", ["hello world hello", "a b a", "日é日 hello", "𝄞 a 😀", "a" * 300, " world" * 200])
def test_incremental_text_of_other_vocabularies(text: str) -> None:
    tokenizer = byte_fallback()
    assert tokenizer.token_bytes(5) is None
    ids = tokenizer.encode(text)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)
    assert "�" not in "".join(pieces(tokenizer, ids))


def test_endless_broken_bytes_do_not_wait_for_ever() -> None:
    tokenizer = byte_fallback()
    parts = pieces(tokenizer, [0x80] * 1_000)
    assert len("".join(parts)) >= 900
    assert max(i for i, part in enumerate(parts) if part) > 500


def test_cost_of_a_token_does_not_grow(tiny: Tokenizer) -> None:
    ids = tiny.encode("the quick brown fox 😀 ") * 5_000
    detokenizer = IncrementalDetokenizer(tiny)
    start = time.monotonic()
    assert "".join(detokenizer.add([i]) for i in ids) == "the quick brown fox 😀 " * 5_000
    assert time.monotonic() - start < 10


def test_config_may_name_no_tokens(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": None, "add_bos_token": True}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None and tokenizer.bos_token_id is None and not tokenizer.adds_bos

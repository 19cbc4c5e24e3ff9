"""The tiny tokenizer that tests with text rely on."""

from pathlib import Path

from tokenizers import Tokenizer

from tests.checkpoints import BOS_ID, EOS_ID, SPECIAL_TOKENS, write_tokenizer


def test_tokenizer_round_trips_any_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template=None)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 512
    for text in ("the thin rain", "Grüße, 世界! 🙂\n\ttab", "", "\x00\x7f"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text and all(len(SPECIAL_TOKENS) <= i < 512 for i in ids)
    assert len(tokenizer.encode("the").ids) < 3


def test_special_tokens(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template="x")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("<｜begin▁of▁sentence｜>a<｜end▁of▁sentence｜>").ids[::2] == [BOS_ID, EOS_ID]
    assert tokenizer.decode([BOS_ID, 20, EOS_ID]) == tokenizer.decode([20])
    assert (tmp_path / "chat_template.jinja").read_text() == "x"

"""Text to token ids and back: `tokenizers` over a checkpoint's tokenizer.json, with Hugging Face's rules for BOS.

Also the incremental detokenizer of a running request. Knows no chat and no rows.
"""

import codecs
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import ByteLevel

from echo_batch.errors import ModelError

# These are part of the text that a user wants (reasoning is split at them), special or not.
KEPT_TOKENS = ("<think>", "</think>")
_WINDOW_TOKENS = 64


class Tokenizer:
    """A fast tokenizer. Texts longer than any context are fine; nothing is truncated or padded."""

    def __init__(self, inner: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        _add_missing_tokens(inner, config)
        self.special_tokens = _special_tokens(config)
        """Named special tokens (bos_token, eos_token, ...) as texts: what chat templates are given."""
        self.chat_template: Any = config.get("chat_template")
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """One more than the largest id."""
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        self.adds_bos = self._adds_bos(config)
        added = inner.get_added_tokens_decoder()
        self._skipped = frozenset(i for i, token in added.items() if token.special and token.content not in KEPT_TOKENS)
        # A byte-level vocabulary can be decoded token by token, exactly.
        self._is_byte_level = isinstance(inner.decoder, ByteLevel)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of one text. `add_special_tokens` puts BOS first if this tokenizer wants one and the text does
        not begin with it; no other special token is ever added."""
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        """Token ids of many texts, on all cores."""
        # Without offsets into the text: half the memory.
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        rows = [encoding.ids for encoding in encodings]
        bos = self.bos_token_id
        if not add_special_tokens or not self.adds_bos or bos is None:
            return rows
        return [ids if ids[:1] == [bos] else [bos, *ids] for ids in rows]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; special tokens are left out but for <think> and </think>."""
        ids = self._shown(token_ids) if skip_special_tokens else list(token_ids)
        return self._inner.decode(ids, skip_special_tokens=False)

    def token_to_id(self, token: str) -> int | None:
        """Id of a token, special or not, by its text in the vocabulary."""
        return self._inner.token_to_id(token)

    def make_detokenizer(self) -> "IncrementalDetokenizer":
        """A fresh detokenizer for one request."""
        return IncrementalDetokenizer(self)

    def token_bytes(self, token_id: int) -> bytes | None:
        """Bytes of one token of a byte-level vocabulary, b"" for unknown ids; None for other vocabularies."""
        if not self._is_byte_level:
            return None
        token = self._inner.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(_BYTE_OF_CHARACTER[c] for c in token)
        except KeyError:
            return token.encode()

    def _shown(self, token_ids: Iterable[int]) -> list[int]:
        skipped = self._skipped
        return [i for i in token_ids if i not in skipped]

    def _id_of(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._inner.token_to_id(text)

    def _adds_bos(self, config: dict[str, Any]) -> bool:
        if self.bos_token_id is None:
            return False
        if isinstance(config.get("add_bos_token"), bool):
            return bool(config["add_bos_token"])
        return self._inner.encode("a", add_special_tokens=True).ids[:1] == [self.bos_token_id]


class IncrementalDetokenizer:
    """Text of one request as its tokens come. The pieces together are `Tokenizer.decode` of all tokens.

    A character whose bytes are spread over tokens comes with its last one. The cost of a token does not grow with the
    text: byte-level vocabularies go through an incremental UTF-8 decoder, others through a short window of tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []
        self._num_emitted = 0

    def add(self, token_ids: Sequence[int]) -> str:
        """Text that these tokens add; what may still change stays back."""
        shown = self._tokenizer._shown(token_ids)
        pieces = []
        for token_id in shown:
            data = self._tokenizer.token_bytes(token_id)
            pieces.append(self._extend(token_id) if data is None else self._utf8.decode(data))
        return "".join(pieces)

    def finish(self) -> str:
        """Text held back at the end (an incomplete character becomes U+FFFD)."""
        rest = self._utf8.decode(b"", final=True)
        if self._window:
            text = self._tokenizer.decode(self._window)
            rest += text[self._num_emitted :]
            self._window, self._num_emitted = [], 0
        return rest

    def _extend(self, token_id: int) -> str:
        """One token more in the window; its text is what decoding the window gives beyond what was given before.

        Tokens are kept as context for the next one (a space may hang on its neighbour) until the window is full.
        """
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        if text.endswith("�") and len(self._window) < _WINDOW_TOKENS:
            return ""
        added = text[self._num_emitted :]
        self._num_emitted = len(text)
        if len(self._window) >= _WINDOW_TOKENS:
            # Keep a little context: the last tokens, of which all text has been given.
            self._window = self._window[-4:]
            self._num_emitted = len(self._tokenizer.decode(self._window))
        return added


def load_tokenizer(path: Path | str) -> Tokenizer | None:
    """The tokenizer of a checkpoint directory (or a tokenizer.json); None when there is no tokenizer.json.

    Raises ModelError for a broken file.
    """
    location = Path(path)
    file = location / "tokenizer.json" if location.is_dir() else location
    if not file.is_file():
        return None
    try:
        inner = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the binding raises plain Exception
        raise ModelError(f"{file}: not a tokenizer: {str(error)[:300]}") from error
    return Tokenizer(inner, _read_config(file.with_name("tokenizer_config.json")))


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path}: expected an object")
    return config


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _add_missing_tokens(inner: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Tokens that only tokenizer_config.json knows. Raises ModelError when they do not get the id that it gives."""
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return
    for key, token in sorted(listed.items(), key=lambda item: int(item[0])):
        content = token.get("content") if isinstance(token, dict) else None
        if not isinstance(content, str) or inner.token_to_id(content) is not None:
            continue
        flags = {name: bool(token.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "special")}
        added = tokenizers.AddedToken(content, normalized=bool(token.get("normalized", True)), **flags)
        inner.add_tokens([added])
        if inner.token_to_id(content) != int(key):
            raise ModelError(f"tokenizer_config.json: token {content!r} should have id {key}, which does not fit")


def _byte_characters() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's table), inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_characters()

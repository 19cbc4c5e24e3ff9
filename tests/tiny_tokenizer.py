"""A small byte-level BPE tokenizer directory for tests, with DeepSeek-like special tokens."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
TEXT = (
    "the quick brown fox jumps over the lazy dog and reads a long document about sparse attention, caches and"
    " batches; été naïve 日本語のテキスト 😀 emoji hello world question answer context input"
)


@cache
def tokenizer_json(vocab_size: int = 500, bos_in_post_processor: bool = False) -> str:
    """A trained byte-level BPE as tokenizer.json; ids 0-3 are SPECIAL, 4 and 5 are <think> and </think>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 2,
        special_tokens=[*SPECIAL, "<think>", "</think>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    if bos_in_post_processor:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], 0)]
        )
    return tokenizer.to_str()


def write_tokenizer(directory: Path, config: dict[str, Any] | None = None, **options: Any) -> Path:
    """Write tokenizer.json and tokenizer_config.json (BOS wanted, unless `config` says otherwise)."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(tokenizer_json(**options), encoding="utf-8")
    defaults = {
        "add_bos_token": True,
        "bos_token": {"__type": "AddedToken", "content": SPECIAL[0]},
        "eos_token": SPECIAL[1],
        "model_max_length": 100,
    }
    merged = {key: value for key, value in {**defaults, **(config or {})}.items() if value is not None}
    (directory / "tokenizer_config.json").write_text(json.dumps(merged), encoding="utf-8")
    return directory

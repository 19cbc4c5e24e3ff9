"""The read path over large inputs stays far below 1 GB of memory. tools/measure_input.py does the same at any size."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.make_big_input import make_rows, write_rows

REPOSITORY = Path(__file__).parents[2]


def measure(path: Path, tokenizer: Path, *options: str) -> dict[str, Any]:
    tool = str(REPOSITORY / "tools" / "measure_input.py")
    command = [sys.executable, tool, str(path), "--tokenizer", str(tokenizer), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY)
    found: dict[str, Any] = json.loads(done.stdout)
    print(found)
    return found


def write_bpe(path: Path) -> Path:
    """A byte-level BPE that knows the words of make_big_input: about as many characters to a token as a real one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2_000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator((row["prompt"] for row in make_rows(20, 50_000, 0)), trainer)
    tokenizer.save(str(path))
    return path


def write_one_token(path: Path) -> Path:
    """Every text is one unknown token: tokenizing costs nothing, so that a large input can be read in a test."""
    Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")).save(str(path))
    return path


def test_memory_with_a_real_tokenizer(tmp_path: Path) -> None:
    write_rows(tmp_path / "big.jsonl", make_rows(80, 50_000, 1))
    found = measure(tmp_path / "big.jsonl", write_bpe(tmp_path / "tokenizer.json"))
    assert found["rows"] == 80 and found["tokens"] > 1_000_000
    assert found["peak_rss_mb"] < 450


@pytest.mark.parametrize("name", ["big.parquet", "big.json.gz"])
def test_memory_of_other_forms(tmp_path: Path, name: str) -> None:
    write_rows(tmp_path / name, make_rows(600, 50_000, 1))
    found = measure(tmp_path / name, write_one_token(tmp_path / "tokenizer.json"))
    assert found["rows"] == 600
    assert found["peak_rss_mb"] < 450


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    """400 MB of text, more than the memory allowed; docs/benchmarks.md has 10 GB."""
    write_rows(tmp_path / "big.jsonl", make_rows(8_000, 50_000, 2))
    assert (tmp_path / "big.jsonl").stat().st_size > 0.38e9
    found = measure(tmp_path / "big.jsonl", write_one_token(tmp_path / "tokenizer.json"), "--pull-rows", "1000")
    assert found["rows"] == 8_000
    assert found["index_bytes_per_row"] <= 64
    assert found["peak_rss_mb"] < 300

"""The task generator: seeded, of the asked length, uniform in depth, and consistent with the training sequences."""

import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from tools.train_tiny.data import ANSWER, TaskBatches, prepare
from tools.train_tiny.keywords import KEY_WORDS, PASSKEY
from tools.train_tiny.tasks import (
    ANSWER_TOKENS,
    BUNDLED_MODEL,
    NUM_RECORDS,
    SAMPLE_FILLER,
    TaskGenerator,
    TaskName,
    load_generator,
    question_text,
    split_sentences,
)

TASKS: tuple[TaskName, ...] = ("passkey", "kv")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def generator() -> TaskGenerator:
    return load_generator(seed=3)


def test_same_seed_same_prompt_and_another_seed_another(generator: TaskGenerator) -> None:
    again, other = load_generator(seed=3), load_generator(seed=4)
    for task in TASKS:
        assert generator.make(task, 5, 2048) == again.make(task, 5, 2048)
        assert generator.make(task, 5, 2048) != other.make(task, 5, 2048)
        assert generator.make(task, 5, 2048) != generator.make(task, 6, 2048)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("tokens", [1024, 2048, 4096])
def test_length_leaves_room_for_the_answer(
    generator: TaskGenerator, tokenizer: Tokenizer, task: TaskName, tokens: int
) -> None:
    for i in range(3):
        made = generator.make(task, i, tokens)
        ids = tokenizer.encode(made.prompt).ids
        assert made.num_tokens == len(ids)
        assert tokens - 400 < len(ids) + ANSWER_TOKENS <= tokens
        assert ids.count(tokenizer.token_to_id("<|begin|>")) == 1


def test_the_answer_is_stated_once_and_asked_last(generator: TaskGenerator) -> None:
    for task in TASKS:
        made = generator.make(task, 0, 2048)
        assert made.prompt.endswith(question_text(made.key))
        stated = re.findall(rf"of {made.key} is #(\d{{5}})\.|the {made.key} is #(\d{{5}})\.", made.prompt)
        assert ["".join(groups) for groups in stated] == [made.answer]
        assert len(re.findall(r"is #\d{5}\.", made.prompt)) == (NUM_RECORDS if task == "kv" else 1)


def test_depth_is_uniform_and_true(generator: TaskGenerator) -> None:
    depths: list[float] = []
    for i in range(40):
        made = generator.make("passkey", i, 1024)
        depths.append(made.depth)
        found = made.prompt.index(f"the {PASSKEY} is #{made.answer}") / len(made.prompt)
        assert abs(found - made.depth) < 0.35
    counts = [sum(lo <= d < lo + 0.25 for d in depths) for lo in (0.0, 0.25, 0.5, 0.75)]
    assert min(counts) >= 3


def test_too_short_a_prompt_is_refused(generator: TaskGenerator) -> None:
    with pytest.raises(ValueError, match="does not fit in 200 tokens"):
        generator.make("kv", 0, 200)


def test_filler_without_sentences_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="no sentences"):
        TaskGenerator(split_sentences("\n\n"), tokenizer, seed=0)


def test_key_words_are_single_tokens_and_absent_from_filler(tokenizer: Tokenizer) -> None:
    filler = SAMPLE_FILLER.read_text(encoding="utf-8").lower()
    assert len(set(KEY_WORDS)) == len(KEY_WORDS)
    for word in (*KEY_WORDS, PASSKEY):
        assert len(tokenizer.encode(f" {word}", add_special_tokens=False).ids) == 1
        assert word not in filler


def test_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("#48213", add_special_tokens=False).tokens == ["#", "4", "8", "2", "1", "3"]


def test_tokenizer_round_trip(tokenizer: Tokenizer, generator: TaskGenerator) -> None:
    prompt = generator.make("kv", 1, 1024).prompt
    assert tokenizer.decode(tokenizer.encode(prompt).ids) == prompt


def test_training_sequences_state_what_they_ask(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = SAMPLE_FILLER.read_text(encoding="utf-8")[:60_000]
    (tmp_path / "train.txt").write_text(text, encoding="utf-8")
    prepare(tmp_path, BUNDLED_MODEL, tmp_path / "data.npz")
    batch = TaskBatches(tmp_path / "data.npz", torch.device("cpu"), 0).draw(6, 512, 6, 8)
    assert batch.tokens.shape == batch.targets.shape == (6, 512)
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    assert (batch.kind == ANSWER).sum() >= 6 * 8 * 5
    for row in batch.tokens:
        words = tokenizer.decode(row.tolist(), skip_special_tokens=False)
        values: dict[str, str] = {}
        for key, value, asked in re.findall(r" (\w+) is #(\d{5})(<\|end\|>)?", words):
            if asked:
                assert values[key] == value  # stated before it is asked for
            values.setdefault(key, value)
        assert len(values) >= 6

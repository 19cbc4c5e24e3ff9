"""Seeded retrieval prompts for echo-tiny: passkey and key-value questions over long filler text.

A prompt is filler with records scattered between its sentences, then one question; the answer is five digits, after
which the model ends the text. Knows text formats and a tokenizer to measure length with, nothing about models.

    passkey     one record            "Remember this: the passkey is #48213."
    key-value   32 records            "The number of giraffe is #48213."
    question                          "\\nQuestion: What is the number of giraffe?\\nAnswer: The number of giraffe is #"

`python -m tools.train_tiny.tasks --task kv --tokens 8192 --count 20 OUT.jsonl` writes rows {id, prompt, answer}.
"""

import argparse
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from tools.train_tiny.keywords import KEY_WORDS, PASSKEY

TaskName = Literal["passkey", "kv"]

NUM_DIGITS = 5
NUM_RECORDS = 32  # records of a key-value prompt
ANSWER_TOKENS = NUM_DIGITS + 1  # the digits, then the end token
SAMPLE_FILLER = Path(__file__).with_name("filler.txt")  # held-out chapters of the King James Bible
BUNDLED_MODEL = Path(__file__).parents[2] / "echo_batch" / "bundled" / "echo-tiny"


class Encoder(Protocol):
    """What this module needs of a tokenizer: `tokenizers.Tokenizer` fits."""

    def encode(self, sequence: str) -> "Encoded": ...


class Encoded(Protocol):
    @property
    def ids(self) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class TaskPrompt:
    """One question. `depth` is where its record lies: 0 at the start of the filler, 1 at its end."""

    prompt: str
    answer: str
    key: str
    depth: float
    num_tokens: int


def record_text(key: str, value: str) -> str:
    """The sentence, with its leading space, that states a value."""
    if key == PASSKEY:
        return f" Remember this: the {key} is #{value}."
    return f" The number of {key} is #{value}."


def ask_text(key: str) -> str:
    """The question alone: a chat turn ends here."""
    return f"\nQuestion: What is the {key}?" if key == PASSKEY else f"\nQuestion: What is the number of {key}?"


def reply_text(key: str) -> str:
    """The start of the answer sentence; the digits follow it directly."""
    return f"The {key} is #" if key == PASSKEY else f"The number of {key} is #"


def question_text(key: str) -> str:
    """The end of a plain prompt."""
    return f"{ask_text(key)}\nAnswer: {reply_text(key)}"


def split_sentences(text: str) -> list[str]:
    """Sentences of `text` in order, each with the space or line break that leads it."""
    sentences: list[str] = []
    for line in text.splitlines():
        parts = re.split(r"(?<=[.?!]) (?=\S)", line.strip())
        sentences += [("\n" if i == 0 else " ") + part for i, part in enumerate(parts) if part]
    return sentences


class TaskGenerator:
    """Makes prompts of a wanted length from one pool of filler sentences; prompt i depends on (seed, i) only."""

    def __init__(self, sentences: Sequence[str], tokenizer: Encoder, *, seed: int) -> None:
        """`sentences`: see split_sentences. Raises ValueError when there are none."""
        if not sentences:
            raise ValueError("the filler has no sentences")
        self._sentences = sentences
        self._tokenizer = tokenizer
        self._seed = seed
        self._lengths = [-1] * len(sentences)

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text).ids) - 1  # without the begin token

    def _sentence_tokens(self, index: int) -> int:
        if self._lengths[index] < 0:
            self._lengths[index] = self._count(self._sentences[index])
        return self._lengths[index]

    def make(self, task: TaskName, index: int, num_tokens: int) -> TaskPrompt:
        """Prompt `index` of `task`: num_tokens tokens less part of a sentence, begin token and answer included.

        Raises ValueError when the records and the question alone need more than `num_tokens`.
        """
        rng = random.Random(f"{self._seed}/{task}/{index}/{num_tokens}")
        keys = [PASSKEY] if task == "passkey" else rng.sample(KEY_WORDS, NUM_RECORDS)
        values = ["".join(rng.choices("0123456789", k=NUM_DIGITS)) for _ in keys]
        depths = [rng.random() for _ in keys]
        records = [record_text(k, v) for k, v in zip(keys, values, strict=True)]
        question = question_text(keys[0])
        budget = num_tokens - 1 - ANSWER_TOKENS - self._count(question) - sum(map(self._count, records))
        if budget < 0:
            raise ValueError(f"a {task} prompt does not fit in {num_tokens} tokens: {-budget} too few")
        filler: list[str] = []
        start = rng.randrange(len(self._sentences))
        while True:
            at = (start + len(filler)) % len(self._sentences)
            budget -= self._sentence_tokens(at)
            if budget < 0:
                break
            filler.append(self._sentences[at])
        pieces: list[str] = []
        order = sorted(range(len(keys)), key=lambda i: depths[i])
        done = 0
        for i in order:
            cut = round(depths[i] * len(filler))
            pieces += [*filler[done:cut], records[i]]
            done = cut
        pieces += [*filler[done:], question]
        prompt = "".join(pieces).lstrip()
        return TaskPrompt(prompt, values[0], keys[0], depths[0], len(self._tokenizer.encode(prompt).ids))


def load_generator(*, seed: int, filler: Path = SAMPLE_FILLER, model_dir: Path = BUNDLED_MODEL) -> TaskGenerator:
    """A generator over a filler file and the tokenizer of `model_dir`."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return TaskGenerator(split_sentences(filler.read_text(encoding="utf-8")), tokenizer, seed=seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--task", choices=("passkey", "kv"), default="kv")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--filler", type=Path, default=SAMPLE_FILLER)
    args = parser.parse_args()
    generator = load_generator(seed=args.seed, filler=args.filler)
    with args.output.open("w", encoding="utf-8") as file:
        for i in range(args.count):
            prompt = generator.make(args.task, i, args.tokens)
            row = {"id": f"{args.task}-{args.tokens}-{i}", "prompt": prompt.prompt, "answer": prompt.answer}
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

"""Training sequences made on the device: filler with many records and questions about them, all as tensors.

`python -m tools.train_tiny.data TEXT_DIR MODEL_DIR OUT_NPZ` tokenizes the corpus once; TaskBatches then builds batches
from that file alone (no tokenizer and no network on the training machine). The formats are those of tasks.py.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tools.train_tiny.keywords import KEY_WORDS, PASSKEY
from tools.train_tiny.match import Statements, find_statements
from tools.train_tiny.tasks import NUM_DIGITS, ask_text, question_text, record_text, reply_text
from tools.train_tiny.tokenizer import ASSISTANT, BOS, EOS, USER, VOCAB_SIZE

FILLER, GIVEN, ANSWER = 0, 1, 2  # kinds of target tokens: filler text, a record or question as given, an answer
_KEY, _DIGIT = -1, -2  # placeholders in templates
_CHAT_SHARE = 0.25
_PASSKEY_SHARE = 0.15  # records that are the passkey; at most one a sequence
_TAIL_SHARE = 0.4  # questions that come after all the filler


class Batch(NamedTuple):
    """tokens int64 [B, L]; targets int64 [B, L] (the next tokens); kind int8 [B, L] of the targets."""

    tokens: Tensor
    targets: Tensor
    kind: Tensor


@dataclass(frozen=True, slots=True)
class Template:
    """Token ids with placeholders (-1 the key word, -2 a digit) and the kind of each token."""

    ids: list[int]
    kinds: list[int]


def prepare(text_dir: Path, model_dir: Path, output: Path) -> None:
    """Tokenize train.txt and the templates; store them as one compressed file."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    vocab: dict[str, int] = tokenizer.get_vocab()
    digits = [vocab[str(d)] for d in range(10)]
    keys = [vocab[f"\u0120{word}"] for word in (*KEY_WORDS, PASSKEY)]

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def template(pieces: list[tuple[list[int], int]], key: int) -> list[list[int]]:
        ids = [_KEY if t == key else _DIGIT if t in digits else t for piece, _ in pieces for t in piece]
        kinds = [kind for piece, kind in pieces for _ in piece]
        assert ids.count(_KEY) >= 1 and ids.count(_DIGIT) == NUM_DIGITS
        return [ids, kinds]

    arrays: dict[str, np.ndarray] = {}
    for name, word, key in (("kv", KEY_WORDS[0], keys[0]), ("passkey", PASSKEY, keys[-1])):
        value = "01234"
        answer = ([*encode(value), EOS], ANSWER)
        chat = (encode(reply_text(word)), ANSWER)
        made: dict[str, list[tuple[list[int], int]]] = {
            "record": [(encode(record_text(word, value)), GIVEN)],
            "plain": [(encode(question_text(word)), GIVEN), answer],
            "chat": [(encode(ask_text(word)) + [ASSISTANT], GIVEN), chat, answer],
        }
        for form, pieces in made.items():
            arrays[f"{form}_{name}"] = np.array(template(pieces, key), dtype=np.int16)
    lines = (text_dir / "train.txt").read_text(encoding="utf-8").splitlines()
    order = np.random.default_rng(0).permutation(len(lines))  # mixes chapters with documentation
    encodings = tokenizer.encode_batch([lines[i] + "\n" for i in order], add_special_tokens=False)
    stream = [t for e in encodings for t in e.ids]
    ends = [tokenizer.token_to_id(t) for t in (".", "?", "\u010a")]
    assert not set(keys) & set(stream), "a key word occurs in the filler"
    arrays |= dict(
        corpus=np.array(stream, dtype=np.int16),
        sentence_ends=np.array(ends, dtype=np.int16),
        digits=np.array(digits, dtype=np.int16),
        keys=np.array(keys, dtype=np.int16),
    )
    np.savez_compressed(output, allow_pickle=False, **arrays)
    print(f"{len(stream) / 1e6:.2f} M tokens of filler -> {output}")


class TaskBatches:
    """Draws batches on one device, seeded."""

    def __init__(self, path: Path, device: torch.device, seed: int) -> None:
        data = np.load(path)
        self.device = device
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.corpus = torch.from_numpy(data["corpus"].astype(np.int64)).to(device)
        ends = np.isin(data["corpus"], data["sentence_ends"])
        at = np.where(ends, np.arange(len(ends)), len(ends))
        next_end = np.minimum.accumulate(at[::-1])[::-1]
        self.sentence_start = torch.from_numpy(np.minimum(next_end + 1, len(ends))).to(device)  # the next one
        self.keys = torch.from_numpy(data["keys"].astype(np.int64)).to(device)
        self.digits = torch.from_numpy(data["digits"].astype(np.int64)).to(device)
        record = data["record_kv"][0].tolist()
        self.hash = int(record[record.index(_DIGIT) - 1])  # the token before every value
        names = [f"{form}_{name}" for form in ("record", "plain", "chat") for name in ("kv", "passkey")]
        self.width = max(data[n].shape[1] for n in names)
        table = np.zeros((2, len(names), self.width), dtype=np.int64)
        for i, n in enumerate(names):
            table[:, i, : data[n].shape[1]] = data[n]
        self.template_ids, self.template_kinds = torch.from_numpy(table).to(device)
        sizes = [data[n].shape[1] for n in names]
        self.template_lengths = torch.tensor(sizes, device=device)
        self.longest_record, self.longest_question = max(sizes[:2]), max(sizes[2:])

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device)

    def statements(self, tokens: Tensor) -> Statements:
        """Where tokens [B, L] state a value."""
        is_key, is_digit = torch.zeros(2, VOCAB_SIZE, dtype=torch.bool, device=self.device)
        is_key[self.keys], is_digit[self.digits] = True, True
        return find_statements(tokens, hash_id=self.hash, is_key=is_key, is_digit=is_digit)

    def draw(self, batch: int, length: int, num_records: int, num_questions: int) -> Batch:
        """`batch` sequences of `length` tokens (and one more as the last target) with so many records and questions.

        A question comes after its record: in 40 % of the cases behind all the filler, else uniformly in between.
        """
        dev, b = self.device, batch
        needed = num_records * self.longest_record + num_questions * self.longest_question
        assert needed <= length, f"{needed} tokens of records and questions do not fit in {length}"
        order = self._uniform(b, len(self.keys) - 1).argsort(-1)[:, :num_records]
        has_passkey = self._uniform(b) < min(1.0, _PASSKEY_SHARE * num_records)
        order[:, 0] = torch.where(has_passkey, len(self.keys) - 1, order[:, 0])
        values = torch.randint(10, (b, num_records, NUM_DIGITS), generator=self.generator, device=dev)
        asked = self._uniform(b, num_records).argsort(-1).repeat(1, -(-num_questions // num_records))
        asked = asked[:, :num_questions]
        if num_questions > 1:  # the passkey is one record among many: ask for it often enough
            asked[:, 0] = torch.where(self._uniform(b) < 0.5, 0, asked[:, 0])
        record_at = self._uniform(b, num_records)
        start = record_at.gather(1, asked)
        question_at = start + (1 - start) * self._uniform(b, num_questions)
        tail = self._uniform(b, num_questions) < _TAIL_SHARE
        question_at = torch.where(tail, 1 + self._uniform(b, num_questions), question_at)

        which = torch.cat((torch.arange(num_records, device=dev).expand(b, -1), asked), 1)  # record of each item
        form = 2 + 2 * (self._uniform(b, num_questions) < _CHAT_SHARE).long()
        form = torch.cat((torch.zeros(b, num_records, dtype=torch.long, device=dev), form), 1)
        place, by_place = torch.cat((record_at, question_at), 1).sort(-1)
        which, form = which.gather(1, by_place), form.gather(1, by_place)
        key_index = order.gather(1, which)
        form = form + (key_index == len(self.keys) - 1)
        ids, kinds, lengths = self.template_ids[form], self.template_kinds[form], self.template_lengths[form]
        ids = torch.where(ids == _KEY, self.keys[key_index][..., None], ids)
        digit_rank = ((ids == _DIGIT).cumsum(-1) - 1).clamp(0, NUM_DIGITS - 1)
        item_values = self.digits[values.gather(1, which[..., None].expand(-1, -1, NUM_DIGITS))]
        ids = torch.where(ids == _DIGIT, item_values.gather(-1, digit_rank), ids)

        total = length + 1
        num_filler = total - 1 - lengths.sum(-1)  # [B]
        base = (self._uniform(b) * (len(self.corpus) - total)).long()
        base = torch.minimum(self.sentence_start[base], torch.tensor(len(self.corpus) - total, device=dev))
        cut = (place.clamp(max=1.0) * num_filler[:, None]).long()
        cut = torch.where(cut > 0, self.sentence_start[base[:, None] + cut - 1] - base[:, None], cut)
        cut = torch.minimum(cut, num_filler[:, None])
        before = lengths.cumsum(-1) - lengths
        starts = (1 + cut + before).contiguous()
        position = torch.arange(total, device=dev).expand(b, -1).contiguous()
        item = torch.searchsorted(starts, position, right=True) - 1
        inside = item.clamp(min=0)
        offset = position - starts.gather(1, inside)
        in_item = (item >= 0) & (offset < lengths.gather(1, inside))
        passed = torch.where(item >= 0, (before + lengths).gather(1, inside), 0)
        flat = inside * self.width + offset.clamp(0, self.width - 1)
        filler = self.corpus[(base[:, None] + position - 1 - passed).clamp(0, len(self.corpus) - 1)]
        tokens = torch.where(in_item, ids.flatten(1).gather(1, flat), filler)
        kind = torch.where(in_item, kinds.flatten(1).gather(1, flat), FILLER)
        tokens[:, 0] = BOS
        user = (self._uniform(b) < _CHAT_SHARE) & ~in_item[:, 1]
        tokens[:, 1] = torch.where(user, USER, tokens[:, 1])
        kind[:, 1] = torch.where(user, GIVEN, kind[:, 1])
        return Batch(tokens[:, :-1], tokens[:, 1:], kind[:, 1:].to(torch.int8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text_dir", type=Path)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    prepare(args.text_dir, args.model_dir, args.output)


if __name__ == "__main__":
    main()

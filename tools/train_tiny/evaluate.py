"""Measure an exported echo-tiny: exact answers by task and prompt length, on a GPU, over the dequantized fp8 weights.

    python -m tools.train_tiny.evaluate MODEL_DIR --filler heldout.txt --json accuracy.json

One forward pass over prompt and answer tells whether greedy decoding gives that answer: it does if every answer token
is the most likely one after those before it. Attention is written as an engine has it: absorbed, over rows of 576
values that each query gathers by its own top k. Modes:

    sparse      bf16 activations, selection by exact index scores
    dense       the same weights, attention over everything
    fp8         sparse, with fp8 activations, fp8 latent rows and fp8 index queries and keys after a Hadamard transform
    random      sparse, with the indexers' matrices drawn anew: what the indexer is worth
"""

import argparse
import copy
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from tools.train_tiny.attend import attend, causal_scores
from tools.train_tiny.export import read_exported
from tools.train_tiny.model import BLOCK, AttentionParts, IndexParts, Layer, TinyConfig, TinyModel, quantized_rows
from tools.train_tiny.tasks import BUNDLED_MODEL, SAMPLE_FILLER, TaskName, load_generator
from tools.train_tiny.tokenizer import EOS

Mode = Literal["sparse", "dense", "fp8", "random"]

EVAL_SEED = 77
_QUERY_CHUNK = 2048
_CHUNK_PROMPTS = 10


@dataclass(frozen=True, slots=True)
class Cell:
    """One (mode, task, length): the share of prompts with all five digits right, and with the end token too."""

    mode: str
    task: str
    tokens: int
    prompts: int
    exact: float
    exact_and_end: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Question:
    """ids of the prompt and the answer with its end token; `num_answer` of them are the answer."""

    ids: list[int]
    num_answer: int


def make_chunk(indices: range, *, task: TaskName, tokens: int, filler: Path, model_dir: Path) -> list[Question]:
    """Tokenized prompts of a cell. Runs in worker processes."""
    from tokenizers import Tokenizer

    generator = load_generator(seed=EVAL_SEED, filler=filler, model_dir=model_dir)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    questions: list[Question] = []
    for index in indices:
        made = generator.make(task, index, tokens)
        prompt: list[int] = tokenizer.encode(made.prompt).ids
        answer: list[int] = tokenizer.encode(made.answer, add_special_tokens=False).ids
        questions.append(Question([*prompt, *answer, EOS], len(answer) + 1))
    return questions


def hadamard(size: int, device: torch.device) -> Tensor:
    """Orthonormal Sylvester-Hadamard matrix [size, size] fp32."""
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return matrix * size**-0.5


def gather_attention(
    layer: Layer, parts: AttentionParts, index: IndexParts, rows: Tensor, queries: range, config: TinyConfig
) -> Tensor:
    """Attention of some queries of one sequence over their own selections: [n, H, v].

    rows [L, kv_lora + rope] are the cached rows: latent, then the rotated key.
    """
    nope, latent = config.qk_nope_head_dim, config.kv_lora_rank
    expand = layer.self_attn.kv_b_proj.matrix(rows.dtype).unflatten(0, (config.num_attention_heads, -1))
    out: list[Tensor] = []
    for lo in range(queries.start, queries.stop, _QUERY_CHUNK):
        hi = min(lo + _QUERY_CHUNK, queries.stop)
        scores = causal_scores(index.query[lo:hi], index.key[:hi], index.weights[lo:hi], lo)
        chosen = scores.topk(min(config.index_topk, hi), dim=-1, sorted=False).indices
        limit = torch.arange(lo, hi, device=rows.device)[:, None]
        picked = rows[chosen]
        query = parts.query[lo:hi]
        absorbed = torch.cat((torch.einsum("thn,hnc->thc", query[..., :nope], expand[:, :nope]), query[..., nope:]), -1)
        logits = torch.einsum("thc,tkc->thk", absorbed, picked).float() * config.softmax_scale
        weight = logits.masked_fill((chosen > limit)[:, None], float("-inf")).softmax(-1).to(rows.dtype)
        mixed = torch.einsum("thk,tkc->thc", weight, picked[..., :latent])
        out.append(torch.einsum("thc,hvc->thv", mixed, expand[:, nope:]))
    return torch.cat(out)


@torch.no_grad()
def answer_logits(model: TinyModel, tokens: Tensor, num_answer: int, mode: Mode, dtype: torch.dtype) -> Tensor:
    """Logits [num_answer, V] that predict the last `num_answer` tokens of one sequence [L]."""
    config = model.config
    length = tokens.shape[0]
    cos, sin = model.angles(torch.arange(length, device=tokens.device))
    stream = model.model.embed_tokens(tokens).float()
    for i, layer in enumerate(model.model.layers):
        assert isinstance(layer, Layer)
        parts = layer.before(stream, cos, sin, dtype)
        first = length - num_answer - 1 if i == config.num_hidden_layers - 1 else 0
        if mode == "dense":
            attended = attend(parts, length, config.softmax_scale)[first:]
        else:
            index = layer.self_attn.indexer(parts.hidden, parts.q_latent, cos, sin)
            if mode == "fp8":
                turn = hadamard(BLOCK, tokens.device)
                query, key = (quantized_rows((x.float() @ turn).to(dtype)) for x in index[:2])
                index = IndexParts(query, key, index.weights)
            rows = layer.self_attn.cache_rows(parts.hidden, cos, sin)
            attended = gather_attention(layer, parts, index, rows, range(first, length), config)
        stream, _ = layer.after(stream[first:], attended)
        stream = torch.cat((stream.new_zeros(first, stream.shape[1]), stream))
    return model.logits(stream[-num_answer - 1 : -1], dtype).float()


def randomize_indexer(model: TinyModel, seed: int) -> None:
    """Draw the indexers' matrices anew at the scale of the trained ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".indexer." in name and parameter.dim() == 2:
                noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
                parameter.copy_(noise * parameter.std())


def evaluate_cell(
    model: TinyModel, questions: Sequence[Question], mode: Mode, task: TaskName, tokens: int, dtype: torch.dtype
) -> Cell:
    """Run one cell."""
    device = next(model.parameters()).device
    right: list[Tensor] = []
    started = time.monotonic()
    model.set_round_fp8(mode == "fp8")
    for question in questions:
        ids = torch.tensor(question.ids, device=device)
        guess = answer_logits(model, ids, question.num_answer, mode, dtype).argmax(-1)
        right.append(guess == ids[-question.num_answer :])
    good = torch.stack(right).cpu()
    seconds = time.monotonic() - started
    exact, end = good[:, :-1].all(1).float().mean(), good.all(1).float().mean()
    return Cell(mode, task, tokens, len(good), round(float(exact), 4), round(float(end), 4), round(seconds, 1))


def evaluate(
    model_dir: Path, *, filler: Path, modes: Sequence[Mode], lengths: Sequence[int], count: int, workers: int
) -> Iterator[Cell]:
    """All cells of an exported model, length by length; every mode is asked the same questions.

    The random mode runs at the longest length only. Prompts are made ahead of their use, in worker processes.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tasks: tuple[TaskName, ...] = ("passkey", "kv")
    cells = [(tokens, task) for tokens in lengths for task in tasks]
    chunks = [range(lo, min(lo + _CHUNK_PROMPTS, count)) for lo in range(0, count, _CHUNK_PROMPTS)]
    with ProcessPoolExecutor(workers) as pool:
        asked = [
            pool.map(partial(make_chunk, task=task, tokens=tokens, filler=filler, model_dir=model_dir), chunks)
            for tokens, task in cells
        ]
        model = read_exported(model_dir, TinyConfig()).to(device)
        scrambled = copy.deepcopy(model)
        randomize_indexer(scrambled, 5)
        for (tokens, task), made in zip(cells, asked, strict=True):
            questions = list(chain.from_iterable(made))
            for mode in modes:
                if mode != "random" or tokens == max(lengths):
                    yield evaluate_cell(scrambled if mode == "random" else model, questions, mode, task, tokens, dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path, nargs="?", default=BUNDLED_MODEL)
    parser.add_argument("--filler", type=Path, default=SAMPLE_FILLER)
    parser.add_argument("--modes", default="sparse,dense,fp8,random")
    parser.add_argument("--lengths", default="2048,4096,8192,16384,32768")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cells: list[Cell] = []
    for cell in evaluate(
        args.model_dir,
        filler=args.filler,
        modes=args.modes.split(","),
        lengths=[int(n) for n in args.lengths.split(",")],
        count=args.count,
        workers=args.workers,
    ):
        cells.append(cell)
        print(
            f"{cell.mode:7} {cell.task:8} {cell.tokens:6} {cell.exact:7.1%} (and end {cell.exact_and_end:.1%})"
            f" of {cell.prompts}, {cell.seconds:.1f} s",
            flush=True,
        )
        if args.json is not None:
            args.json.write_text(json.dumps([asdict(c) for c in cells], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

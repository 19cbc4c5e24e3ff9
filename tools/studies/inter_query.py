"""How complete a selection from 256 bins is, with and without shifting the scores by a predicted k-th score.

    python -m tools.studies.inter_query [--tokens 8192] [--json out.json]

Real scores: prefill of the bundled model over held-out text. Synthetic ones: V3.2's k = 2,048 out of 98,304 normal
scores around the k-th scores that the paper reports for an early and a late layer. The prediction for a block of
queries is the k-th score of the last query before it, as in the paper. Printed per selection group, as medians over
queries: the size of the threshold bin and the share of the true top k that whole bins hold; with k = 256 or 2,048.
"""

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from echo_batch.cache.manager import make_cache
from echo_batch.cache.spec import CacheSpec
from echo_batch.engine.prefill import Prompt, prefill
from echo_batch.kernels.formats import BLOCK_SIZE, IndexFormat
from echo_batch.kernels.ops import reference_ops
from echo_batch.models.config import ModelConfig
from echo_batch.models.loader import load_model
from tools.studies.histogram import subset_by_histogram
from tools.train_tiny.tasks import BUNDLED_MODEL, SAMPLE_FILLER

QUERY_BLOCK = 64
DRIFT = 0.02  # of a standard deviation between the k-th scores of neighbouring synthetic query blocks


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the queries of one source of scores."""

    source: str
    k: int
    shifted: bool
    kth_score: float
    threshold_bin: float
    taken_share: float

    def line(self) -> str:
        return (
            f"{self.source:24} k={self.k:5} {'shifted' if self.shifted else 'plain':8} k-th {self.kth_score:8.3f}"
            f"  threshold bin {self.threshold_bin:8.0f}  taken {100 * self.taken_share:5.1f} %"
        )


def study(source: str, scores: Tensor, previous_kth: Tensor, k: int) -> list[Row]:
    """Both ways over `scores` fp32 [n, L] (-inf beyond a row's end); previous_kth fp32 [n]: the prediction."""
    kth = scores.topk(k, dim=1).values[:, -1]
    rows = []
    for shifted in (False, True):
        subset = subset_by_histogram(scores, previous_kth if shifted else torch.zeros_like(previous_kth), k)
        size, share = subset.threshold_bin.float().median(), subset.taken.float().median() / k
        rows.append(Row(source, k, shifted, float(kth.median()), float(size), float(share)))
    return rows


def model_scores(num_tokens: int) -> tuple[int, list[tuple[Tensor, Tensor]]]:
    """k, and per selection group the scores of the last queries and the k-th score before each one's block."""
    from tokenizers import Tokenizer

    config, found = ModelConfig.from_dir(BUNDLED_MODEL), list[Tensor]()

    def keep(query: Tensor, weights: Tensor, keys: Tensor, row_ends: Tensor, fmt: IndexFormat) -> Tensor:
        scores = ops.index_scores_contiguous(query, weights, keys, row_ends, fmt)
        if keys.shape[0] == num_tokens:
            beyond = torch.arange(num_tokens)[None, :] >= row_ends[:, None]
            found.append(scores.masked_fill(beyond, -torch.inf)[-8 * QUERY_BLOCK - 1 :].clone())
        return scores

    ops = reference_ops()
    model = load_model(
        config, BUNDLED_MODEL, device=torch.device("cpu"), dtype=torch.float32, row_kind="fp32",
        ops=replace(ops, index_scores_contiguous=keep),
    )  # fmt: skip
    text = SAMPLE_FILLER.read_text(encoding="utf-8")
    ids = Tokenizer.from_file(str(Path(BUNDLED_MODEL) / "tokenizer.json")).encode(text).ids[:num_tokens]
    spec = CacheSpec(
        group_layers=config.group_layers, row_format=model.row_format, index_format=model.index_format,
        index_topk=config.index_topk, host_tokens=num_tokens, gpu_tokens=num_tokens, offload=True,
    )  # fmt: skip
    cache = make_cache(spec, torch.device("cpu"), ops)
    prompt = Prompt(token_ids=ids, blocks=list(range(num_tokens // BLOCK_SIZE)))
    for _ in prefill(model, cache, model.ops, [prompt], chunk_tokens=1024, on_device=torch.device("cpu")):
        pass
    cache.close()
    return config.index_topk, [_with_prediction(s, config.index_topk) for s in found]


def _with_prediction(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Drop the first row; the others are whole query blocks, predicted by the row before each block."""
    before = scores[:-1:QUERY_BLOCK].topk(k, dim=1).values[:, -1]
    return scores[1:], before.repeat_interleave(QUERY_BLOCK)


def synthetic_scores(kth: float, *, k: int = 2048, length: int = 98_304, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Normal scores of which k are above about `kth`, and predictions that drift from query block to query block."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(64, length, generator=generator)
    scores += kth - scores.topk(k, dim=1).values[:, -1:].mean()
    exact = scores.topk(k, dim=1).values[:, -1]
    return scores, exact + DRIFT * torch.randn(64, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="a multiple of 64")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[Row] = []
    k, groups = model_scores(args.tokens)
    for number, (scores, previous) in enumerate(groups):
        rows += study(f"echo-tiny, layer {number}", scores, previous, k)
    for kth in (2.0, -3.5):
        rows += study(f"normal, k-th score {kth:g}", *synthetic_scores(kth), 2048)
    for row in rows:
        print(row.line())
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

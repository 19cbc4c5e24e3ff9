"""Record what the bundled model selects over a long text, step by step, through the engine's own decode path.

    python -m tools.trace.record OUT.npz [--rows 4] [--context 8192] [--steps 512] [--gpu-pool 4096]

Each row is a text with 32 key-value records in its first `context` tokens. After these, filler alternates with
questions about the records and their right answers. The first part is the prompt; the rest is fed to the engine token
by token in place of what it samples (teacher forcing), so the text is the same whatever the model says. Runs on the
CPU in float32.
"""

import argparse
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from echo_batch.cache.manager import OffloadedCache, make_cache
from echo_batch.config import CacheConfig, EngineConfig, RunConfig, Size
from echo_batch.engine.batch import BatchState
from echo_batch.engine.build import assemble_core
from echo_batch.engine.hardware import detect_hardware
from echo_batch.engine.plan import make_plan
from echo_batch.engine.runner import EagerRunner, PendingOutput, StepShape
from echo_batch.kernels.formats import BLOCK_SIZE
from echo_batch.kernels.ops import Ops, TopkOp, reference_ops
from echo_batch.kernels.reference.slots import positions_to_slots
from echo_batch.models.config import ModelConfig
from echo_batch.models.loader import load_model
from echo_batch.request import Request, SamplingParams
from tools.trace.trace import MARGINS, Trace, save_trace
from tools.train_tiny.tasks import BUNDLED_MODEL, SAMPLE_FILLER, load_generator, question_text, split_sentences

_FILLER_SENTENCES = (1, 5)


def long_text(index: int, *, context: int, total: int, seed: int = 5) -> list[int]:
    """At least `total` token ids: a key-value prompt of `context` tokens, then answers, filler and more questions."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    made = load_generator(seed=seed).make("kv", index, context)
    sentences = split_sentences(SAMPLE_FILLER.read_text(encoding="utf-8"))
    records = re.findall(r"The number of (\w+) is #(\d{5})\.", made.prompt)
    rng = random.Random(f"{seed}/{index}")
    pieces = [made.prompt, made.answer]
    while True:
        start = rng.randrange(len(sentences) - _FILLER_SENTENCES[1])
        key, value = rng.choice(records)
        pieces += [*sentences[start : start + rng.randint(*_FILLER_SENTENCES)], question_text(key), value]
        if len(pieces) % 16 == 0:
            ids: list[int] = tokenizer.encode("".join(pieces)).ids
            if len(ids) >= total:
                return ids[:total]


@dataclass(slots=True)
class SelectionRecorder:
    """Stands in for the op `topk_positions` of decode steps and keeps what passes; changes no result."""

    inner: TopkOp
    num_rows: int
    calls: list[tuple[Tensor, ...]] = field(default_factory=list)
    """positions, lengths, kth, predicted, spread, above of each call: one call a selection group and step."""

    def __call__(
        self,
        scores: Tensor,
        lengths: Tensor,
        k: int,
        predicted: Tensor | None = None,
        *,
        update: bool = False,
        block_table: Tensor | None = None,
        fallback_count: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if not update:  # of a prefill
            return self.inner(scores, lengths, k, predicted, block_table=block_table)
        assert predicted is not None
        expected = predicted.clone()
        positions, kth = self.inner(scores, lengths, k, predicted, update=True)
        rows = slice(0, self.num_rows)
        outside = torch.arange(scores.shape[1]) >= lengths[rows, None]
        spread = torch.stack([s[:n].std() for s, n in zip(scores[rows], lengths[rows].tolist(), strict=True)])
        bounds = expected[rows, None] - torch.tensor(MARGINS) * spread[:, None]
        candidates = scores[rows].masked_fill(outside, float("-inf"))
        above = (candidates[:, None] > bounds[..., None]).sum(-1)
        kept = (positions[rows], lengths[rows], kth[rows], expected[rows], spread, above)
        self.calls.append(tuple(x.clone() for x in kept))
        return (positions if block_table is None else positions_to_slots(positions, block_table)), kth


@dataclass(slots=True)
class ForcedRunner:
    """Launches steps as `inner` does, on the tokens of `texts` (by row id) in place of those that were sampled."""

    inner: EagerRunner
    cache: OffloadedCache
    texts: Sequence[Sequence[int]]
    warm: list[list[Tensor]] = field(default_factory=list)
    """Of each group and row: positions on the GPU before the first step."""
    row_ids: list[int] = field(default_factory=list)

    def launch(
        self, shape: StepShape, *, max_blocks: int, num_logprobs: int | None, checksums: bool = False
    ) -> PendingOutput:
        state = self.inner.state
        rows = state.active[: shape.bucket].nonzero()[:, 0].tolist()
        if not self.row_ids:
            self.row_ids = state.row_id[rows].tolist()
            groups = range(self.cache.spec.num_groups)
            self.warm = [[self._resident(state, group, row) for row in rows] for group in groups]
        ids = [self.texts[int(state.row_id[row])][int(state.positions[row])] for row in rows]
        state.force_tokens(rows, ids)
        return self.inner.launch(shape, max_blocks=max_blocks, num_logprobs=num_logprobs, checksums=checksums)

    def _resident(self, state: BatchState, group: int, row: int) -> Tensor:
        """Positions of a row that are on the GPU."""
        positions = torch.arange(int(state.positions[row]), dtype=torch.int32)
        slots = positions_to_slots(positions[None], state.block_table[row : row + 1])[0]
        return positions[self.cache.maps.host_to_gpu[group, slots] >= 0]


@torch.inference_mode()
def record(*, num_rows: int, context: int, num_steps: int, gpu_tokens: int) -> Trace:
    """Prefill `num_rows` texts of `context` tokens and decode `num_steps` of their next ones.

    The CPU stands for the GPU, with a pool of `gpu_tokens` (a multiple of 64, at least 257 a row).
    """
    texts = [long_text(row, context=context, total=context + num_steps + 1) for row in range(num_rows)]
    config = ModelConfig.from_dir(BUNDLED_MODEL)
    length = -(-(context + num_steps + 1) // BLOCK_SIZE) * BLOCK_SIZE
    pools = CacheConfig(
        host_pool=Size("tokens", num_rows * length),
        gpu_pool=Size("tokens", gpu_tokens),
        residency="off",
        prefetch="off",
    )
    engine = EngineConfig(
        device="cpu", max_num_seqs=num_rows, prefill_group_tokens=num_rows * length, lookahead_steps=0
    )
    plan = make_plan(config, RunConfig(cache=pools, engine=engine), detect_hardware("cpu"), None)
    plan.require_fit()
    plan = replace(plan, prefill_group_tokens=num_rows * length)  # one group: all rows start together
    plain: Ops = reference_ops()
    recorder = SelectionRecorder(plain.topk_positions, num_rows)
    ops = replace(plain, topk_positions=recorder)
    device = torch.device("cpu")
    model = load_model(config, BUNDLED_MODEL, device=device, dtype=torch.float32, row_kind="fp32", ops=ops)
    cache = make_cache(plan.cache, device, ops)
    assert isinstance(cache, OffloadedCache)
    core = assemble_core(model, cache, ops, plan, eos_token_ids=())
    assert isinstance(core.runner, EagerRunner)
    forced = ForcedRunner(core.runner, cache, texts)
    core.runner = forced  # type: ignore[assignment]
    sampling = SamplingParams(temperature=0.0, max_tokens=num_steps + 1, ignore_eos=True)
    requests = [Request(row_id=i, prompt_token_ids=t[:context], sampling=sampling) for i, t in enumerate(texts)]
    for done in core.run(requests):
        assert done is None or done.failure is None, done
    counters = cache.counters()
    core.close()
    groups = cache.spec.num_groups
    columns = [torch.stack(list(c)).unflatten(0, (-1, groups)) for c in zip(*recorder.calls, strict=True)]
    positions, lengths, *numbers = (c[:num_steps] for c in columns)
    assert positions.shape[0] == num_steps and bool((lengths > 0).all()), "the rows did not run together"
    selected = torch.zeros(*positions.shape[:3], length + 1, dtype=torch.bool)
    selected.scatter_(-1, torch.where(positions >= 0, positions, length).long(), True)
    warm = torch.zeros(groups, num_rows, length, dtype=torch.bool)
    for group, rows in enumerate(forced.warm):
        for row, resident in enumerate(rows):
            warm[group, row, resident.long()] = True
    kth, predicted, spread, above = numbers
    return Trace(
        selected=selected[..., :length].numpy(),
        lengths=lengths[:, 0].to(torch.int32).numpy(),
        kth=kth.numpy(),
        predicted=predicted.numpy(),
        spread=spread.numpy(),
        above=above.to(torch.int32).numpy(),
        warm=warm.numpy(),
        gpu_tokens=gpu_tokens,
        engine_selected=np.array(counters.selected_rows),
        engine_hits=np.array(counters.hit_rows),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--context", type=int, default=8192, help="tokens of the prompts")
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--gpu-pool", type=int, default=4096, help="tokens, a multiple of 64")
    args = parser.parse_args()
    started = time.monotonic()
    trace = record(num_rows=args.rows, context=args.context, num_steps=args.steps, gpu_tokens=args.gpu_pool)
    save_trace(trace, args.output)
    size = args.output.stat().st_size / 1e3
    rates = ", ".join(f"{h / s:.4f}" for h, s in zip(trace.engine_hits, trace.engine_selected, strict=True))
    print(f"{args.steps} steps in {time.monotonic() - started:.0f} s -> {args.output} ({size:.0f} kB)")
    print(f"hit rates of the engine by selection group: {rates}")


if __name__ == "__main__":
    main()

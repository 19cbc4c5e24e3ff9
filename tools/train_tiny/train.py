"""Train echo-tiny: dense attention at growing lengths, then the indexer alone, then sparse attention.

    python -m tools.train_tiny.train --data data.npz --out DIR [--resume DIR] [--time-limit SECONDS]

A phase ends when the smoothed loss on the first digits of answers is under its goal (after min_steps) or at max_steps.
The checkpoint holds the phase and step, so that a run cut by --time-limit goes on where it stopped; the optimizer's
moments are not kept (a resumed run warms up again).
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.train_tiny.attend import TokenwiseOps, forward, tokenwise_ops
from tools.train_tiny.data import ANSWER, FILLER, Batch, TaskBatches
from tools.train_tiny.model import Layer, MoeMlp, TinyConfig, TinyModel
from tools.train_tiny.optim import Optimizer

SHARD_BYTES = 15_000_000
SAVE_SECONDS = 60.0
WARMUP_STEPS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Training at one sequence length; the learning rate goes from `lr` to `end_lr` over max_steps (cosine)."""

    name: str
    mode: Literal["dense", "indexer", "sparse"]
    length: int
    batch: int
    min_steps: int
    max_steps: int
    lr: float
    end_lr: float
    goal: float = 0.0  # loss on first digits that ends the phase early; guessing costs 2.3
    worst: float = 1.0  # a higher loss on first digits at the end is a failed run
    max_records: int
    filler_weight: float = 0.2
    guide: float = 0.0  # weight of the attention supervision
    num_sampled: int = 256  # queries a sequence whose attention the indexer learns


PHASES: tuple[Phase, ...] = (
    Phase(name="dense-256", mode="dense", length=256, batch=64, min_steps=400, max_steps=2000, lr=3e-3, end_lr=2e-3,
          goal=0.10, max_records=4, guide=0.3),
    Phase(name="dense-512", mode="dense", length=512, batch=32, min_steps=200, max_steps=1000, lr=2e-3, end_lr=1.5e-3,
          goal=0.08, max_records=10, guide=0.3),
    Phase(name="dense-1k", mode="dense", length=1024, batch=16, min_steps=200, max_steps=1000, lr=2e-3, end_lr=1.5e-3,
          goal=0.06, max_records=20, guide=0.3),
    Phase(name="dense-2k", mode="dense", length=2048, batch=8, min_steps=200, max_steps=1500, lr=1e-3, end_lr=6e-4,
          goal=0.02, max_records=36, guide=0.1),
    Phase(name="dense-8k", mode="dense", length=8192, batch=8, min_steps=300, max_steps=300, lr=8e-4, end_lr=5e-4,
          max_records=64, guide=0.05),
    Phase(name="dense-32k", mode="dense", length=32768, batch=2, min_steps=240, max_steps=240, lr=5e-4, end_lr=1e-4,
          max_records=64, guide=0.03),
    Phase(name="indexer-8k", mode="indexer", length=8192, batch=8, min_steps=200, max_steps=200, lr=3e-3, end_lr=1e-3,
          max_records=64),
    Phase(name="indexer-32k", mode="indexer", length=32768, batch=2, min_steps=100, max_steps=100, lr=1e-3, end_lr=3e-4,
          max_records=64),
    Phase(name="sparse-8k", mode="sparse", length=8192, batch=4, min_steps=80, max_steps=80, lr=3e-4, end_lr=2e-4,
          max_records=64),
    Phase(name="sparse-32k", mode="sparse", length=32768, batch=1, min_steps=12, max_steps=12, lr=2e-4, end_lr=3e-5,
          max_records=64),
)  # fmt: skip


@dataclass(slots=True)
class Progress:
    """Where a run stands; what the checkpoint's state.json holds."""

    phase: int = 0
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    lookup_loss: float = 10.0


def save_checkpoint(model: TinyModel, progress: Progress, folder: Path) -> None:
    """Write the parameters as bf16 safetensors of at most SHARD_BYTES each, and state.json."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in model.state_dict().items():
        keep = tensor if tensor.dim() < 2 else tensor.bfloat16()
        size = keep.numel() * keep.element_size()
        if used + size > SHARD_BYTES:
            shards.append({})
            used = 0
        shards[-1][name] = keep.contiguous().cpu()
        used += size
    for i, shard in enumerate(shards):
        save_file(shard, folder / f"params-{i}.safetensors")
    (folder / "state.json").write_text(json.dumps(asdict(progress), indent=2) + "\n", encoding="utf-8")


def load_checkpoint(model: TinyModel, folder: Path) -> Progress:
    """Load what save_checkpoint wrote."""
    state: dict[str, Tensor] = {}
    for path in sorted(folder.glob("params-*.safetensors")):
        state.update(load_file(path))
    model.load_state_dict({k: v.float() for k, v in state.items()})
    return Progress(**json.loads((folder / "state.json").read_text(encoding="utf-8")))


class Trainer:
    """Runs phases on one device."""

    def __init__(
        self, model: TinyModel, data: TaskBatches, *, dtype: torch.dtype, ops: TokenwiseOps, seed: int
    ) -> None:
        self.model, self.data, self.dtype, self.ops = model, data, dtype, ops
        self.plain_ops = tokenwise_ops(compiled=False)
        self.rng = torch.Generator().manual_seed(seed)

    def make_optimizer(self, mode: str) -> Optimizer:
        """An optimizer over the indexers, or over all else, or over both."""
        wanted: dict[str, torch.nn.Parameter] = {}
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(mode == "sparse" or (".indexer." in name) == (mode == "indexer"))
            if parameter.requires_grad:
                wanted[name] = parameter
        return Optimizer(wanted)

    def draw(self, phase: Phase) -> Batch:
        """A batch with a random number of records up to the phase's."""
        few = bool(torch.rand((), generator=self.rng) < 0.15)
        top = max(1, phase.max_records // 8) if few else phase.max_records
        low = 1 if few else max(1, phase.max_records // 3)
        records = int(torch.randint(low, top + 1, (), generator=self.rng))
        questions = max(phase.max_records // 2, 1) if few else records
        return self.data.draw(phase.batch, phase.length, records, questions)

    def sample_queries(self, batch: Batch, count: int) -> Tensor:
        """[B, count] positions: up to half where answers are read, the rest anywhere."""
        answer = (batch.kind == ANSWER).float()
        noise = torch.rand(answer.shape, generator=self.data.generator, device=answer.device)
        n = min(count, answer.shape[1])
        first = (answer + noise).topk(n // 2, dim=-1).indices
        rest = noise.scatter(1, first, -1.0).topk(n - n // 2, dim=-1).indices
        return torch.cat((first, rest), 1)

    def step(self, phase: Phase, optimizer: Optimizer) -> tuple[Tensor, ...]:
        """One update. Returns the losses of first digits, answers, filler, indexer and guided heads, as scalars."""
        batch = self.draw(phase)
        dense = phase.mode == "dense"
        sampled = None if dense else self.sample_queries(batch, phase.num_sampled)
        with torch.set_grad_enabled(True):
            result = forward(
                self.model,
                batch.tokens,
                dtype=self.dtype,
                ops=self.ops if dense else self.plain_ops,
                sampled=sampled,
                sparse=phase.mode == "sparse",
                statements=self.data.statements(batch.tokens) if phase.guide else None,
            )
            ops = self.ops if dense else self.plain_ops
            losses = ops.token_losses(self.model, result.stream, batch.targets.flatten(), self.dtype)
            kind = batch.kind.flatten()
            answer, filler = (kind == ANSWER).float(), (kind == FILLER).float()
            lookup = answer * (batch.tokens.flatten() == self.data.hash)
            lookup_loss = (losses * lookup).sum() / lookup.sum()
            answer_loss = (losses * answer).sum() / answer.sum()
            filler_loss = (losses * filler).sum() / filler.sum().clamp(min=1)
            loss = result.index_loss + phase.guide * result.guide_loss
            if phase.mode != "indexer":
                loss = loss + answer_loss + phase.filler_weight * filler_loss
        loss.backward()
        optimizer.step()
        if phase.mode != "indexer":
            self.balance(result.loads)
        everything = (lookup_loss, answer_loss, filler_loss, result.index_loss, result.guide_loss)
        return tuple(x.detach() for x in everything)

    @torch.no_grad()
    def balance(self, loads: list[Tensor]) -> None:
        """Move each expert's selection bias against its load (auxiliary-loss-free balancing of DeepSeek-V3)."""
        for layer, load in zip(self.model.model.layers, loads, strict=True):
            if isinstance(layer, Layer) and isinstance(layer.mlp, MoeMlp):
                layer.mlp.gate.e_score_correction_bias -= 1e-3 * torch.sign(load - load.mean())

    def run_phase(self, phase: Phase, progress: Progress) -> Iterator[None]:
        """Train to the phase's end, keeping `progress` up to date; yields every 20 steps: time to save or stop."""
        self.model.set_round_fp8(phase.mode == "sparse")
        optimizer = self.make_optimizer(phase.mode)
        started = time.monotonic()
        base_seconds, resumed_at = progress.seconds, progress.step
        smooth: Tensor | None = None
        while progress.step < phase.max_steps:
            done = progress.step / phase.max_steps
            lr = phase.end_lr + (phase.lr - phase.end_lr) * 0.5 * (1 + math.cos(math.pi * done))
            lr *= min(1.0, (progress.step - resumed_at + 1) / min(WARMUP_STEPS, phase.max_steps // 5))
            optimizer.set_lr(lr)
            losses = torch.stack(self.step(phase, optimizer))
            smooth = losses if smooth is None else torch.lerp(smooth, losses, 0.05)
            progress.step += 1
            progress.tokens += phase.batch * phase.length
            if progress.step % 20 == 0 or progress.step == phase.max_steps:
                lookup, answer, filler, index, guide = smooth.tolist()
                progress.seconds = base_seconds + time.monotonic() - started
                progress.lookup_loss = lookup
                if progress.step % 200 == 0 or phase.length > 2048 or phase.batch <= 4:
                    rate = (progress.step - resumed_at) * phase.batch * phase.length / (time.monotonic() - started)
                    print(
                        f"{phase.name} {progress.step:5d} lookup {lookup:.4f} answer {answer:.4f} filler {filler:.3f}"
                        f" index {index:.4f} guide {guide:.4f}"
                        f" lr {lr:.1e} {progress.tokens / 1e6:.1f} Mtok {progress.seconds:.0f} s"
                        f" {rate / 1e3:.0f} ktok/s",
                        flush=True,
                    )
                if progress.step >= phase.min_steps and lookup < phase.goal:
                    break
                yield
        if progress.lookup_loss > phase.worst:
            raise RuntimeError(
                f"{phase.name} ended with a loss of {progress.lookup_loss:.2f} on first digits: not learned"
            )
        progress.phase, progress.step = progress.phase + 1, 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--time-limit", type=float, default=1e9, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--until", default="", help="stop before the phase of this name")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--small", action="store_true", help="a toy of the same shape, for a try on a CPU")
    args = parser.parse_args()
    deadline = time.monotonic() + args.time_limit
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    config, phases = TinyConfig(), PHASES
    if args.small:
        config, phases = small_run()
    model = TinyModel(config).to(device)
    progress = load_checkpoint(model, args.resume) if args.resume else Progress()
    data_seed = args.seed + 1000 * progress.phase + progress.step
    data = TaskBatches(args.data, device, data_seed)
    ops = tokenwise_ops(compiled=device.type == "cuda" and not args.no_compile)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    trainer = Trainer(model, data, dtype=dtype, ops=ops, seed=data_seed)
    saved = time.monotonic()
    while progress.phase < len(phases) and phases[progress.phase].name != args.until and saved < deadline:
        for _ in trainer.run_phase(phases[progress.phase], progress):
            if time.monotonic() > min(deadline, saved + SAVE_SECONDS):
                save_checkpoint(model, progress, args.out)
                saved = time.monotonic()
            if saved > deadline:
                break
        save_checkpoint(model, progress, args.out)
    print(f"stopped: {json.dumps(asdict(progress))}")


def small_run() -> tuple[TinyConfig, tuple[Phase, ...]]:
    """A quarter of the width and a few short phases: every code path in a minute on a CPU, no useful model."""
    config = TinyConfig(
        hidden_size=128, intermediate_size=256, num_attention_heads=4, q_lora_rank=128, kv_lora_rank=128,
        qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, index_n_heads=4, index_head_dim=64, index_topk=64,
    )  # fmt: skip
    lengths = {256: 128, 512: 256, 1024: 256, 2048: 256, 8192: 256, 32768: 512}
    phases = tuple(
        replace(p, length=lengths[p.length], batch=4, max_records=2, min_steps=2, max_steps=10, worst=100.0)
        for p in PHASES
    )
    return config, phases


if __name__ == "__main__":
    main()

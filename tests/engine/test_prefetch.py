"""Prefetch changes no bit: decode steps in every mode, on one schedule, with pools that evict."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from echo_batch.bench.workload import fill_contexts
from echo_batch.cache.manager import OffloadedCache, make_cache
from echo_batch.cache.prefetch import PrefetchCounters
from echo_batch.cache.spec import CacheSpec, PrefetchMode
from echo_batch.engine.batch import BatchState
from echo_batch.engine.decode import decode_step
from echo_batch.kernels.select import select_ops
from echo_batch.models.config import ModelConfig
from echo_batch.models.loader import load_model
from echo_batch.models.model import Model
from tests.models.oracle import CheckpointFixture

CPU = torch.device("cpu")
BATCH, BUCKET, CONTEXT, STEPS = 3, 4, 300, 6


@pytest.fixture(scope="module", params=["v32", "glm52"])
def model(request: pytest.FixtureRequest, tiny_checkpoint: CheckpointFixture) -> Model:
    path = tiny_checkpoint(request.param, "fp32") / "model"
    config = ModelConfig.from_dir(path)
    return load_model(config, path, device=CPU, dtype=torch.float32, row_kind="fp32", ops=select_ops(CPU))


def steps(
    model: Model, mode: PrefetchMode, gpu_tokens: int, *, break_step: int | None = None
) -> Iterator[tuple[Tensor, OffloadedCache]]:
    """Logits of each teacher-forced step; rules are checked after each. Prefetched rows go bad at `break_step`."""
    spec = CacheSpec(
        group_layers=model.config.group_layers,
        row_format=model.row_format,
        index_format=model.index_format,
        index_topk=model.config.index_topk,
        host_tokens=2048,
        gpu_tokens=gpu_tokens,
        prefetch=mode,
    )
    cache = make_cache(spec, CPU, model.ops, poison=True)
    assert isinstance(cache, OffloadedCache)
    state = BatchState.allocate(BUCKET, CONTEXT + STEPS + 1, spec.num_groups, CPU)
    fill_contexts(model, cache, model.ops, state, batch=BATCH, context=CONTEXT, room=STEPS + 1, seed=3)
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(2, model.config.vocab_size, (STEPS, BUCKET), generator=generator)
    try:
        for number in range(STEPS):
            state.token_ids.copy_(tokens[number])
            if number == break_step:
                break_prefetch(cache)
            step = decode_step(
                model, cache, model.ops, state, bucket=BUCKET, max_blocks=state.block_table.shape[1], greedy_only=True
            )
            if break_step is None:
                cache.check_invariants()
            yield step.logits[:BATCH].clone(), cache
    finally:
        cache.close()


def break_prefetch(cache: OffloadedCache) -> None:
    """From now on prefetch copies one row for another."""
    prefetcher = cache._prefetcher
    assert prefetcher is not None
    prefetcher._host_rows = prefetcher._host_rows.roll(1, dims=1)


def counters_after(model: Model, mode: PrefetchMode, gpu_tokens: int, expected: list[Tensor]) -> PrefetchCounters:
    found = None
    for number, (logits, cache) in enumerate(steps(model, mode, gpu_tokens)):
        assert torch.equal(logits, expected[number]), f"step {number}"
        found = cache.prefetch_counters()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def expected(model: Model) -> list[Tensor]:
    """Without prefetch; the pool's size changes no bit (tests/engine/test_core_oracle.py)."""
    return [logits for logits, _ in steps(model, "off", 1024)]


@pytest.mark.parametrize("mode", ["branch", "fused"])
@pytest.mark.parametrize("gpu_tokens", [256, 1024])
def test_prefetch_changes_no_bit(model: Model, mode: PrefetchMode, gpu_tokens: int, expected: list[Tensor]):
    counters = counters_after(model, mode, gpu_tokens, expected)
    assert all(n > 0 for n in counters.prefetched), counters
    assert all(w >= 0 for w in counters.wasted) and sum(counters.used) > 0
    assert sum(counters.candidates) >= sum(counters.prefetched) + sum(counters.dropped)


def test_prefetch_brings_what_resolve_then_need_not(model: Model):
    recalled = {}
    for mode in ("off", "fused"):
        for _, cache in steps(model, mode, 1024):
            recalled[mode] = sum(cache.counters().recalled_rows)
    assert recalled["fused"] < recalled["off"]


def test_a_wrong_prefetched_row_would_be_seen(model: Model, expected: list[Tensor]):
    found = [logits for logits, _ in steps(model, "fused", 1024, break_step=2)]
    assert all(map(torch.equal, expected[:2], found[:2])) and not all(map(torch.equal, expected[2:], found[2:]))


def test_without_prefetch_there_is_nothing_to_count(model: Model):
    _, cache = next(steps(model, "off", 256))
    assert cache.prefetch_counters() is None

"""Decode on the card: graph replays against eager steps, offloading against none, on one schedule, bit by bit."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from echo_batch.bench.workload import fill_contexts
from echo_batch.cache.manager import KVCache, OffloadedCache, make_cache
from echo_batch.cache.spec import CacheSpec, PrefetchMode
from echo_batch.engine.batch import BatchState
from echo_batch.engine.build import assemble_core
from echo_batch.engine.decode import decode_step
from echo_batch.engine.runner import GraphRunner, StepShape
from echo_batch.kernels.branch import Branch
from echo_batch.kernels.select import select_ops
from echo_batch.models.config import ModelConfig
from echo_batch.models.loader import load_model
from echo_batch.models.model import Model
from echo_batch.request import SamplingParams
from tests.engine.engines import make_requests, run_all, tiny_plan, tokens_of
from tests.models.oracle import CheckpointFixture

pytestmark = pytest.mark.gpu

BATCH, CONTEXT, STEPS, EAGER_STEPS = 3, 300, 200, 100
SHAPE = StepShape(bucket=4, greedy_only=True)
BLOCKS = -(-(CONTEXT + STEPS + 1) // 64)
"""Of each row."""


@pytest.fixture(scope="module", params=["v32", "glm52"])
def model(request: pytest.FixtureRequest, tiny_checkpoint: CheckpointFixture) -> Model:
    path: Path = tiny_checkpoint(request.param, "fp8") / "model"
    device = torch.device("cuda")
    return load_model(
        ModelConfig.from_dir(path),
        path,
        device=device,
        dtype=torch.bfloat16,
        row_kind="fp8",
        ops=select_ops(device),
    )


def spec_of(
    model: Model,
    *,
    gpu_tokens: int,
    offload: bool = True,
    prefetch: PrefetchMode = "off",
    host_tokens: int = 4096,
) -> CacheSpec:
    return CacheSpec(
        group_layers=model.config.group_layers,
        row_format=model.row_format,
        index_format=model.index_format,
        index_topk=model.config.index_topk,
        host_tokens=host_tokens,
        gpu_tokens=gpu_tokens if offload else host_tokens,
        offload=offload,
        prefetch=prefetch,
    )


def forced_tokens(model: Model) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(2, model.config.vocab_size, (STEPS, SHAPE.bucket), generator=generator).cuda()


def run(
    model: Model,
    spec: CacheSpec,
    *,
    graph: bool,
    poison: bool = False,
    corrupt_at: int | None = None,
    residency: bool = False,
    leave_at: int | None = None,
    keep: bool = True,
    context: int = CONTEXT,
    room: int = STEPS,
    steps: int = STEPS,
) -> Iterator[tuple[Tensor, KVCache]]:
    """Teacher-forced steps on synthetic contexts; yields each step's logits of the active rows.

    `residency`: begin resident; before step `leave_at` that ends, with the rows kept on the GPU or with none of them.
    Eager steps with offloading have a branch, as those of a runner; those without it are the oracle and have none.
    """
    device = torch.device("cuda")
    cache = make_cache(spec, device, model.ops, poison=poison, residency=residency)
    try:
        state = BatchState.allocate(SHAPE.bucket, context + room + 1, spec.num_groups, device)
        runner = GraphRunner(model, cache, model.ops, state, depth=1)
        branch = Branch(device) if spec.offload else None
        if graph:
            runner.capture([SHAPE, replace(SHAPE, resident=True)] if residency else [SHAPE])
        fill_contexts(model, cache, model.ops, state, batch=BATCH, context=context, room=room + 1, seed=3)
        max_blocks = state.block_table.shape[1]
        for step, tokens in enumerate(forced_tokens(model)[:steps]):
            state.token_ids.copy_(tokens)
            if step == corrupt_at:
                assert isinstance(cache, OffloadedCache)
                corrupt_evicted_row(cache)
            if step == leave_at:
                assert isinstance(cache, OffloadedCache) and cache.resident
                written = [state.written_slots(row, BLOCKS) for row in range(BATCH if keep else 0)]
                cache.leave_residency(BATCH * BLOCKS, torch.cat([torch.tensor([-1], device=device).int(), *written]))
            shape = replace(SHAPE, resident=residency and cache.resident)
            if graph:
                runner.launch(shape, max_blocks=max_blocks, num_logprobs=None).read()
                logits = runner.logits(shape)
            else:
                view = cache.for_step(shape.resident)
                logits = decode_step(
                    model,
                    view,
                    model.ops,
                    state,
                    bucket=SHAPE.bucket,
                    max_blocks=max_blocks,
                    greedy_only=True,
                    branch=branch,
                ).logits
            yield logits[:BATCH].clone(), cache
    finally:
        cache.close()


def corrupt_evicted_row(cache: OffloadedCache) -> None:
    """Change every host row of layer 0 that is not resident: whatever is recalled next is wrong."""
    torch.cuda.synchronize()
    absent = (cache.maps.host_to_gpu[0] < 0).cpu()
    rows = cache.host_rows(0)
    rows[absent, :64] = 0x38  # 1.0 in e4m3


def all_logits(model: Model, spec: CacheSpec, **options: object) -> Tensor:
    return torch.stack([logits for logits, _ in run(model, spec, **options)])  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def expected(model: Model) -> Tensor:
    """Everything resident, no offloading, eager."""
    logits = all_logits(model, spec_of(model, gpu_tokens=4096, offload=False), graph=False)
    assert torch.isfinite(logits).all()
    return logits


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("gpu_tokens", [128, 320, 4096])
def test_offloading_changes_no_bit(model: Model, expected: Tensor, gpu_tokens: int, graph: bool) -> None:
    steps, num_steps = [], STEPS if graph else EAGER_STEPS
    spec = spec_of(model, gpu_tokens=gpu_tokens)
    for logits, cache in run(model, spec, graph=graph, poison=True, steps=num_steps):
        steps.append(logits)
        if len(steps) % 50 == 0:
            cache.check_invariants()
        counters = cache.counters() if len(steps) == num_steps else None
    assert torch.equal(torch.stack(steps), expected[:num_steps])
    assert counters is not None and sum(counters.offloaded_rows) == num_steps * BATCH * len(model.config.group_layers)
    assert (sum(counters.evicted_rows) > num_steps) == (gpu_tokens < 4096)


@pytest.fixture(params=[False, True], ids=["no lists", "lists"])
def with_lists(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the fused indexer lists likely scores for the top-k."""
    monkeypatch.setattr("echo_batch.kernels.gpu_prefetch.LISTS", request.param)
    return bool(request.param)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("mode", ["branch", "fused"])
def test_prefetch_changes_no_bit(
    model: Model, expected: Tensor, mode: PrefetchMode, graph: bool, with_lists: bool
) -> None:
    if mode == "branch" and with_lists:
        pytest.skip("lists are of the fused indexer")
    steps, num_steps = [], STEPS if graph else EAGER_STEPS
    spec = spec_of(model, gpu_tokens=512, prefetch=mode)
    for logits, cache in run(model, spec, graph=graph, poison=True, steps=num_steps):
        steps.append(logits)
        if len(steps) % 50 == 0:
            cache.check_invariants()
        counters = cache.prefetch_counters() if len(steps) == num_steps else None
    assert torch.equal(torch.stack(steps), expected[:num_steps])
    assert counters is not None and sum(counters.candidates) > 0
    # In a context of a few pages the fused kernel has scored everything before it could copy a row.
    assert mode == "fused" or sum(counters.used) > 0


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("mode", ["branch", "fused"])
def test_prefetch_in_long_contexts_changes_no_bit(
    model: Model, mode: PrefetchMode, graph: bool, with_lists: bool
) -> None:
    """Long enough that rows arrive while others are scored."""
    if mode == "branch" and with_lists:
        pytest.skip("lists are of the fused indexer")
    context, num_steps = 50_000, 24
    sizes = dict(host_tokens=-(-(context + num_steps + 1) // 64) * 64 * BATCH)
    plain = spec_of(model, gpu_tokens=0, offload=False, **sizes)
    lengths = dict(context=context, room=num_steps, steps=num_steps)
    expected = all_logits(model, plain, graph=False, **lengths)
    steps = []
    spec = spec_of(model, gpu_tokens=2048, prefetch=mode, **sizes)
    for logits, cache in run(model, spec, graph=graph, poison=True, **lengths):  # type: ignore[arg-type]
        steps.append(logits)
        cache.check_invariants()
        counters = cache.prefetch_counters() if len(steps) == num_steps else None
    assert torch.equal(torch.stack(steps), expected)
    assert counters is not None and sum(counters.used) > num_steps


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(("leave_at", "keep"), [(None, True), (70, True), (70, False)])
def test_residency_changes_no_bit(
    model: Model, expected: Tensor, leave_at: int | None, keep: bool, graph: bool
) -> None:
    spec = spec_of(model, gpu_tokens=BATCH * BLOCKS * 64)
    steps, num_steps = [], STEPS if graph else EAGER_STEPS
    options = dict(residency=True, leave_at=leave_at, keep=keep, steps=num_steps)
    for logits, cache in run(model, spec, graph=graph, poison=True, **options):  # type: ignore[arg-type]
        steps.append(logits)
        if len(steps) in (60, 71, num_steps):
            cache.check_invariants(range(BATCH * BLOCKS))
        counters = cache.counters() if len(steps) == num_steps else None
    assert torch.equal(torch.stack(steps), expected[:num_steps])
    assert counters is not None
    managed_steps = 0 if leave_at is None else num_steps - leave_at
    assert sum(counters.offloaded_rows) == managed_steps * BATCH * spec.num_groups
    # Rows that stay are hits; with none of them every selected row came from what leaving copied to the host.
    assert (sum(counters.recalled_rows) > 0) == (not keep)


def test_an_engine_leaves_residency_with_replays_in_flight(model: Model) -> None:
    device = torch.device("cuda")
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    limits = (50, 20, 40, 40, 30)
    rows = [
        replace(row, sampling=replace(greedy, max_tokens=limit))
        for row, limit in zip(make_requests(greedy, lengths=(70, 90, 20, 200, 80)), limits, strict=True)
    ]
    results = []
    for residency in (True, False):
        spec = spec_of(model, gpu_tokens=320)
        plan = replace(tiny_plan(model, seqs=3, group=256, lookahead=2), device="cuda", cache=spec)
        cache = make_cache(spec, device, model.ops, poison=True, residency=residency)
        core = assemble_core(model, cache, model.ops, plan, eos_token_ids=())
        try:
            results.append((tokens_of(run_all(core, rows)), core.stats))
        finally:
            core.close()
    (tokens, stats), (expected, stats_off) = results
    assert tokens == expected and [len(tokens[row]) for row in range(5)] == list(limits)
    # The second row ends first; the fourth, which takes its place, does not fit beside the others.
    assert stats_off.resident_steps == 0 < stats.resident_steps < 40 < stats.decode_steps == stats_off.decode_steps


def test_graph_without_offloading_equals_eager(model: Model, expected: Tensor) -> None:
    assert torch.equal(all_logits(model, spec_of(model, gpu_tokens=0, offload=False), graph=True), expected)


def test_a_corrupted_recall_is_seen(model: Model, expected: Tensor) -> None:
    logits = all_logits(model, spec_of(model, gpu_tokens=128), graph=True, corrupt_at=100)
    assert torch.equal(logits[:100], expected[:100])
    assert not torch.equal(logits[100:], expected[100:])


def test_host_rows_after_replays_hold_the_new_tokens(model: Model) -> None:
    """New rows must reach the host pool in every replay, not only in the captured step."""
    offloaded, resident = [], []
    for options, found in ((dict(gpu_tokens=128), offloaded), (dict(gpu_tokens=0, offload=False), resident)):
        spec = spec_of(model, **options)  # type: ignore[arg-type]
        for step, (_, cache) in enumerate(run(model, spec, graph=True)):
            if step == STEPS - 1:
                blocks = -(-(CONTEXT + STEPS + 1) // 64)
                for row in range(BATCH):
                    slots = torch.arange(CONTEXT, CONTEXT + STEPS, dtype=torch.int32, device="cuda") + row * blocks * 64
                    found.append(torch.stack([cache.read_host(layer, slots) for layer in range(spec.num_layers)]))
    # Same schedule, same bytes, whichever pool they lie in; and they are not what the pools were filled with.
    assert all(torch.equal(a, b) for a, b in zip(offloaded, resident, strict=True))
    assert (offloaded[0] != 0).any(dim=-1).all()

"""Decode on the card: graph replays against eager steps, offloading against none, on one schedule, bit by bit."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from echo_batch.bench.workload import fill_contexts
from echo_batch.cache.manager import KVCache, OffloadedCache, make_cache
from echo_batch.cache.spec import CacheSpec
from echo_batch.engine.batch import BatchState
from echo_batch.engine.decode import decode_step
from echo_batch.engine.runner import GraphRunner, StepShape
from echo_batch.kernels.select import select_ops
from echo_batch.models.config import ModelConfig
from echo_batch.models.loader import load_model
from echo_batch.models.model import Model
from tests.models.oracle import CheckpointFixture

pytestmark = pytest.mark.gpu

BATCH, CONTEXT, STEPS = 3, 300, 200
SHAPE = StepShape(bucket=4, greedy_only=True)


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


def spec_of(model: Model, *, gpu_tokens: int, offload: bool = True) -> CacheSpec:
    return CacheSpec(
        group_layers=model.config.group_layers,
        row_format=model.row_format,
        index_format=model.index_format,
        index_topk=model.config.index_topk,
        host_tokens=4096,
        gpu_tokens=gpu_tokens if offload else 4096,
        offload=offload,
    )


def forced_tokens(model: Model) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(2, model.config.vocab_size, (STEPS, SHAPE.bucket), generator=generator).cuda()


def run(
    model: Model, spec: CacheSpec, *, graph: bool, poison: bool = False, corrupt_at: int | None = None
) -> Iterator[tuple[Tensor, KVCache]]:
    """Teacher-forced steps on synthetic contexts; yields each step's logits of the active rows."""
    device = torch.device("cuda")
    cache = make_cache(spec, device, model.ops, poison=poison)
    try:
        state = BatchState.allocate(SHAPE.bucket, CONTEXT + STEPS + 1, spec.num_groups, device)
        runner = GraphRunner(model, cache, model.ops, state, depth=1)
        if graph:
            runner.capture([SHAPE])
        fill_contexts(model, cache, model.ops, state, batch=BATCH, context=CONTEXT, room=STEPS + 1, seed=3)
        max_blocks = state.block_table.shape[1]
        for step, tokens in enumerate(forced_tokens(model)):
            state.token_ids.copy_(tokens)
            if step == corrupt_at:
                assert isinstance(cache, OffloadedCache)
                corrupt_evicted_row(cache)
            if graph:
                runner.launch(SHAPE, max_blocks=max_blocks, num_logprobs=None).read()
                logits = runner.logits(SHAPE)
            else:
                logits = decode_step(
                    model, cache, model.ops, state, bucket=SHAPE.bucket, max_blocks=max_blocks, greedy_only=True
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
    steps = []
    for logits, cache in run(model, spec_of(model, gpu_tokens=gpu_tokens), graph=graph, poison=True):
        steps.append(logits)
        if len(steps) % 50 == 0:
            cache.check_invariants()
        counters = cache.counters() if len(steps) == STEPS else None
    assert torch.equal(torch.stack(steps), expected)
    assert counters is not None and sum(counters.offloaded_rows) == STEPS * BATCH * len(model.config.group_layers)
    assert (sum(counters.evicted_rows) > STEPS) == (gpu_tokens < 4096)


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

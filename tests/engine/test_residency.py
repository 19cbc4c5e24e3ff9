"""Residency until pressure changes where rows are, and no bit of what is computed."""

import dataclasses
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from echo_batch.cache.manager import OffloadedCache, make_cache
from echo_batch.engine.build import assemble_core, step_shapes
from echo_batch.engine.core import EngineCore
from echo_batch.engine.plan import InputStats, Plan
from echo_batch.engine.residency import resident_buckets, stays_resident
from echo_batch.kernels.cache_ops import CacheOps, reference_cache_ops
from echo_batch.kernels.ops import reference_ops
from echo_batch.models.dsa import Projected
from echo_batch.models.model import Model, Stream
from echo_batch.request import Request, SamplingParams
from tests.checkpoints import Family
from tests.engine.engines import cached_model, make_core, make_requests, run_all, tiny_plan, tokens_of
from tests.models.oracle import CheckpointFixture, random_ids

CPU = torch.device("cpu")


class Recorded(Model):
    """A model that keeps every KV row and every logit it computes."""

    def __init__(self, model: Model) -> None:
        super().__init__(
            model.config, model.weights, model.ops, row_format=model.row_format, index_format=model.index_format
        )
        self.seen: list[Tensor] = []

    def project(self, layer: int, stream: Stream, angles: Any) -> tuple[Stream, Projected]:
        stream, projected = super().project(layer, stream, angles)
        self.seen.append(projected.latents.kv_row.clone())
        return stream, projected

    def logits(self, stream: Stream) -> Tensor:
        self.seen.append(super().logits(stream).clone())
        return self.seen[-1]


def recorded_core(
    model: Model, plan: Plan, *, residency: bool, cache_ops: CacheOps | None = None
) -> tuple[EngineCore, list[Tensor]]:
    """An engine and the list that its KV rows, logits and selections go to, in order."""
    recorded = Recorded(model)
    ops = reference_ops()

    def topk(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        positions, score = ops.topk_positions(*args, **kwargs)
        recorded.seen.append(positions.clone())
        return positions, score

    spied = dataclasses.replace(ops, topk_positions=topk)
    cache = make_cache(plan.cache, CPU, spied, poison=True, residency=residency, cache_ops=cache_ops)
    return assemble_core(recorded, cache, spied, plan, eos_token_ids=()), recorded.seen


def request(row_id: int, prompt: list[int], max_tokens: int) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Request(row_id=row_id, prompt_token_ids=prompt, sampling=sampling)


def ids(length: int, seed: int) -> list[int]:
    return random_ids(length, seed=seed).tolist()


BOOK = ids(64, 1)
REQUESTS = [
    request(0, BOOK + ids(20, 2), 44),  # two blocks, runs while the others come and go
    request(1, BOOK + ids(10, 3), 4),
    request(2, ids(30, 4), 8),  # reuses a block while everything is resident
    request(3, ids(210, 5), 30),  # four blocks: pressure, with row 0 in the middle of its answer
    request(4, BOOK + ids(9, 6), 30),  # its prefix was written while everything was resident
    request(5, ids(120, 7), 30),
]


@pytest.mark.parametrize(("family", "lookahead"), [("v32", 0), ("glm52", 2)])
def test_leaving_in_the_middle_of_decode_changes_no_bit(
    tiny_checkpoint: CheckpointFixture, family: Family, lookahead: int
) -> None:
    model = cached_model(tiny_checkpoint(family, "fp32") / "model")
    plan = tiny_plan(model, host=768, gpu=256, seqs=2, group=250, chunk=100, lookahead=lookahead)
    results = []
    for residency in (False, True):
        core, seen = recorded_core(model, plan, residency=residency)
        modes: list[bool] = []
        done = {}
        for completion in core.run(REQUESTS):
            if completion is None:
                core.cache.check_invariants()
                modes.append(core.cache.resident)
            else:
                done[completion.row_id] = completion
        core.cache.check_invariants(live_blocks=[])
        results.append((core, seen, tokens_of(done), modes))
    (off, seen_off, tokens_off, modes_off), (on, seen_on, tokens_on, modes_on) = results
    assert tokens_on == tokens_off
    assert len(seen_on) == len(seen_off) > 500
    assert all(torch.equal(a, b) for a, b in zip(seen_on, seen_off, strict=True))
    assert not any(modes_off) and off.stats.resident_steps == 0
    # Resident at first, left once, for good.
    assert modes_on == sorted(modes_on, reverse=True) and {True, False} == set(modes_on)
    assert on.stats.decode_steps == off.stats.decode_steps and 10 < on.stats.resident_steps < on.stats.decode_steps - 10
    assert on.stats.cached_tokens == off.stats.cached_tokens == 128
    assert all(n > 0 for n in on.cache.counters().recalled_rows)


def test_with_everything_resident_the_manager_does_nothing(tiny_checkpoint: CheckpointFixture) -> None:
    """The cost of offloading while it is not needed: none of the manager's operations is even launched."""

    def unwanted(*args: object) -> NoReturn:
        raise AssertionError("a cache operation while everything is resident")

    model = cached_model(tiny_checkpoint("v32", "fp32") / "model")
    plan = tiny_plan(model, host=1024, gpu=512, seqs=4)
    rows = make_requests(SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), lengths=(40, 100, 60, 20, 30))
    refused = dict.fromkeys(("begin_step", "append", "resolve", "warm", "release", "write_rows"), unwanted)
    cache_ops = dataclasses.replace(reference_cache_ops(), **refused)  # type: ignore[arg-type]
    core, seen = recorded_core(model, plan, residency=True, cache_ops=cache_ops)
    tokens = tokens_of(run_all(core, rows))
    assert core.stats.resident_steps == core.stats.decode_steps > 0
    assert sum(core.cache.counters().selected_rows) == 0
    without, seen_without = recorded_core(model, tiny_plan(model, host=1024, seqs=4, offload=False), residency=True)
    assert tokens_of(run_all(without, rows)) == tokens
    assert all(torch.equal(a, b) for a, b in zip(seen, seen_without, strict=True))
    # The same operations are called as soon as residency is off: the spies can fail.
    managed, _ = recorded_core(model, plan, residency=False, cache_ops=cache_ops)
    with pytest.raises(AssertionError, match="everything is resident"):
        run_all(managed, rows[:1])


def test_an_empty_cache_is_resident_again(tiny_checkpoint: CheckpointFixture) -> None:
    model = cached_model(tiny_checkpoint("v32", "fp32") / "model")
    core = make_core(model, tiny_plan(model, host=512, gpu=128, seqs=1))
    long, short = request(0, ids(150, 1), 6), request(1, ids(40, 2), 6)
    alone = {r.row_id: run_all(make_core(model), [r])[r.row_id].token_ids for r in (long, short)}
    assert tokens_of(run_all(core, [long, short])) == alone
    # One row after the other: the second finds nothing in the cache.
    assert core.stats.resident_steps == 5 and core.stats.decode_steps == 10
    assert tokens_of(run_all(core, [short, long])) == alone and core.stats.resident_steps == 10
    assert isinstance(core.cache, OffloadedCache) and not core.cache.resident


def test_a_shared_prefix_alone_keeps_the_cache_from_being_empty(tiny_checkpoint: CheckpointFixture) -> None:
    """A row whose prefix was written while the cache was managed must not find it forgotten."""
    model = cached_model(tiny_checkpoint("v32", "fp32") / "model")
    core = make_core(model, tiny_plan(model, host=512, gpu=128, seqs=1))
    rows = [request(0, BOOK + ids(90, 8), 4), request(1, BOOK + ids(20, 9), 4)]
    alone = {r.row_id: run_all(make_core(model), [r])[r.row_id].token_ids for r in rows}
    out = run_all(core, rows)
    assert tokens_of(out) == alone and out[1].num_cached_tokens == 64
    assert core.stats.resident_steps == 0


def test_shapes_that_are_captured_at_the_start(tiny_checkpoint: CheckpointFixture) -> None:
    model = cached_model(tiny_checkpoint("v32", "fp32") / "model")
    plan = tiny_plan(model, host=2048, gpu=512, seqs=8)
    assert plan.decode_buckets == (1, 2, 3, 4, 6, 8) and not stays_resident(plan)

    def shapes(plan: Plan, residency: bool = True) -> tuple[list[int], list[int]]:
        found = step_shapes(plan, residency=residency, greedy_only=True)
        return [s.bucket for s in found if not s.resident], [s.bucket for s in found if s.resident]

    def with_input(num_rows: int, tokens: int) -> Plan:
        stats = InputStats(
            num_rows=num_rows, num_bad_rows=0, prompt_tokens=1, longest_prompt_tokens=1, longest_row_tokens=1,
            total_row_tokens=tokens,
        )  # fmt: skip
        return dataclasses.replace(plan, input=stats)

    everything = list(plan.decode_buckets)
    assert shapes(plan, residency=False) == (everything, [])
    assert shapes(with_input(100, 100 * 256)) == (everything, [1, 2])  # two rows of 256 tokens fit 512
    assert shapes(with_input(2, 512)) == ([], everything)
    assert shapes(with_input(2, 576)) == (everything, [1])
    assert shapes(tiny_plan(model, host=512, gpu=512, seqs=8)) == ([], everything)
    assert shapes(tiny_plan(model, host=512, offload=False, seqs=8)) == ([], everything)
    assert resident_buckets(dataclasses.replace(plan, input=None)) == tuple(everything)  # rows of index_topk tokens

"""Prefill in any chunks, slices and scoring steps gives what it gives whole; prefixes are read whole or as selected."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from echo_batch.cache.manager import KVCache, make_cache, slots_of_blocks
from echo_batch.cache.spec import CacheSpec
from echo_batch.engine.prefill import Prompt, prefill
from echo_batch.engine.prefill_layout import cut, make_layout
from echo_batch.models.model import Model
from tests.engine.engines import GREEDY, cached_model, make_core, make_requests, run_all, tiny_plan
from tests.models.oracle import CheckpointFixture, random_ids

CPU = torch.device("cpu")
LENGTHS = (1, 63, 64, 65, 32, 33, 200, 128)
"""Around a block (64) and around index_topk (32)."""


@given(
    lengths=st.lists(st.tuples(st.integers(1, 200), st.integers(0, 2)), min_size=1, max_size=8),
    chunk=st.integers(1, 300),
    slice_=st.integers(1, 300),
)
@settings(max_examples=100, deadline=None)
def test_slices_and_segments_cover_every_token_once(lengths: list[tuple[int, int]], chunk: int, slice_: int) -> None:
    prompts = []
    for number, (length, shared) in enumerate(lengths):
        num_cached = 64 * shared
        own = range(100 * (number + 1), 100 * (number + 1) + 8)
        prompts.append(
            Prompt(token_ids=range(num_cached + length), blocks=[*range(shared), *own], num_cached=num_cached)
        )
    starts = make_layout(prompts).starts
    at, lasts = 0, []
    for parts in cut(prompts, starts, chunk, slice_):
        assert 0 < parts[-1].hi - parts[0].lo <= chunk
        for part in parts:
            assert part.lo == at and 0 < part.hi - part.lo <= slice_
            assert part.longest == max(s.end for s in part.segments)
            for segment in part.segments:
                prompt = prompts[segment.prompt]
                assert segment.lo == at and starts[segment.prompt] <= at < segment.hi <= starts[segment.prompt + 1]
                assert segment.end == prompt.num_cached + segment.hi - starts[segment.prompt]
                assert segment.is_last == (segment.end == len(prompt.token_ids))
                lasts += [segment.prompt] * segment.is_last
                at = segment.hi
            assert at == part.hi
    assert at == starts[-1] and lasts == list(range(len(prompts)))


@pytest.fixture
def model(tiny_checkpoint: CheckpointFixture) -> Model:
    return cached_model(tiny_checkpoint("glm52", "fp32") / "model")


def make(model: Model) -> KVCache:
    spec = CacheSpec(
        group_layers=model.config.group_layers,
        row_format=model.row_format,
        index_format=model.index_format,
        index_topk=model.config.index_topk,
        host_tokens=32 * 64,
        gpu_tokens=32 * 64,
    )
    return make_cache(spec, CPU, model.ops, poison=True)


def run(model: Model, cache: KVCache, prompts: list[Prompt], **options: Any) -> tuple[Tensor, Tensor]:
    """Logits of a group and the k-th scores of its last tokens."""
    predicted = torch.zeros(cache.spec.num_groups, len(prompts))
    options = dict(chunk_tokens=4096, slice_tokens=4096) | options
    steps = prefill(model, cache, model.ops, prompts, predicted=predicted, on_device=CPU, **options)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value, predicted


def prompts_of(lengths: tuple[int, ...] = LENGTHS) -> list[Prompt]:
    prompts, block = [], 31
    for number, length in enumerate(lengths):
        blocks = [block - i for i in range(-(-length // 64))]
        block -= len(blocks)
        prompts.append(Prompt(token_ids=random_ids(length, seed=number).tolist(), blocks=blocks))
    return prompts


@pytest.mark.parametrize("options", [dict(chunk_tokens=150, slice_tokens=40), dict(chunk_tokens=4096, slice_tokens=64)])
def test_chunks_slices_and_scoring_steps_change_nothing(model: Model, options: dict[str, int]) -> None:
    prompts = prompts_of()
    whole, cuts = make(model), make(model)
    expected, expected_kth = run(model, whole, prompts)
    # Scores of seven tokens of the longest prompt at once.
    logits, kth = run(model, cuts, prompts, score_bytes=4 * 7 * 200, **options)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(kth, expected_kth, atol=1e-4, rtol=0, equal_nan=True)
    assert torch.equal(kth.isnan(), (torch.tensor(LENGTHS) <= model.config.index_topk).expand_as(kth))
    slots = torch.cat([slots_of_blocks(torch.tensor(p.blocks, dtype=torch.int32))[: len(p.token_ids)] for p in prompts])
    for layer in range(whole.spec.num_layers):
        a, b = (c.read_host(layer, slots).view(torch.float32) for c in (cuts, whole))
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
    cuts.check_invariants(live_blocks=[b for p in prompts for b in p.blocks])


def test_the_kth_score_is_that_of_the_last_token(model: Model) -> None:
    """Against the scores themselves, sorted."""
    k, found = model.config.index_topk, []

    def spy(scores: Tensor, lengths: Tensor, out: Tensor, *, first: int = 0) -> Tensor:
        found.append(scores[-1, : int(lengths[-1])].sort(descending=True).values[k - 1])
        return model.ops.topk_rows(scores, lengths, out, first=first)

    spied = Model(
        model.config,
        model.weights,
        replace(model.ops, topk_rows=spy),
        row_format=model.row_format,
        index_format=model.index_format,
    )
    _, predicted = run(spied, make(model), prompts_of((150,)))
    assert torch.equal(predicted[:, 0], torch.stack(found))


def test_prediction_starts_where_prefill_ends(model: Model) -> None:
    core = make_core(model, tiny_plan(model))
    requests = [replace(r, sampling=replace(GREEDY, max_tokens=1)) for r in make_requests(lengths=(90, 20))]
    run_all(core, requests)
    assert core.stats.decode_steps == 0
    assert bool(core.state.predicted[:, 0].isfinite().all()) and bool(core.state.predicted[:, 1].isnan().all())


def counting(cache: KVCache, read: list[int]) -> Callable[[int, Tensor], Tensor]:
    """`read_host` that notes how many rows are asked for."""
    read_host = cache.read_host

    def counted(layer: int, slots: Tensor) -> Tensor:
        read.append(int((slots >= 0).sum()))
        return read_host(layer, slots)

    return counted


def test_only_what_is_selected_of_a_long_prefix_is_read(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short suffix reads few rows and gives, bit for bit, what it gives with the whole prefix in place."""
    book, question = random_ids(640, seed=1).tolist(), random_ids(3, seed=2).tolist()
    suffix = Prompt(token_ids=book + question, blocks=[*range(10), 20], num_cached=640)
    outcomes = []
    for streamed in (float("inf"), 213.0, 214.0):  # 640 prefix tokens on 3 computed ones: 213.3
        cache = make(model)
        run(model, cache, [Prompt(token_ids=book, blocks=range(10))])
        read: list[int] = []
        monkeypatch.setattr(cache, "read_host", counting(cache, read))
        outcomes.append((*run(model, cache, [suffix], streamed_per_token=streamed), read))
    (logits, kth, whole), (selected_logits, selected_kth, selected), (_, _, also_whole) = outcomes
    layers, k = model.config.num_layers, model.config.index_topk
    assert whole == also_whole == [640] * layers
    assert len(selected) == layers and all(k - 3 <= n <= 3 * k for n in selected)
    assert torch.equal(selected_logits, logits) and torch.equal(selected_kth, kth)


def test_a_prefix_is_read_whole_when_the_suffix_takes_several_slices(model: Model) -> None:
    book, question = random_ids(640, seed=1).tolist(), random_ids(50, seed=2).tolist()
    suffix = Prompt(token_ids=book + question, blocks=[*range(10), 20], num_cached=640)
    logits = []
    for options in (dict(streamed_per_token=0.0, slice_tokens=20), dict()):
        cache = make(model)
        run(model, cache, [Prompt(token_ids=book, blocks=range(10))])
        logits.append(run(model, cache, [suffix], **options)[0])
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=0)

"""The whole engine against transformers in fp32: same greedy tokens, same logits, whatever the schedule and the pools.

Contexts are longer than index_topk (32), up to 64 tokens are generated, poison (NaN in freed and evicted rows) is on.
"""

from dataclasses import replace

import pytest
import torch

from echo_batch.engine.decode import decode_logits
from echo_batch.engine.prefill import Prompt, prefill
from tests.checkpoints import FAMILIES, Family, Kind
from tests.engine.engines import (
    GREEDY,
    assert_greedy,
    cached_model,
    make_core,
    make_requests,
    oracle_logits,
    run_all,
    tiny_plan,
    tokens_of,
)
from tests.models.oracle import CheckpointFixture, random_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_schedules_and_pools_never_change_the_oracle_s_tokens(
    tiny_checkpoint: CheckpointFixture, family: Family
) -> None:
    directory = tiny_checkpoint(family, "fp32")
    model = cached_model(directory / "model")
    requests = make_requests()
    # A mixed batch of 8, prompts whole, in pools with room for all but evictions in every step.
    core = make_core(model, tiny_plan(model, chunk=1024))
    expected = tokens_of(run_all(core, requests))
    assert core.stats.effective_batch == 8 and sum(core.cache.counters().evicted_rows) > 1000
    for request in requests[::2]:
        assert_greedy(directory, request.prompt_token_ids, expected[request.row_id])

    # Chunks that cut prompts anywhere, results read two steps late.
    chunked = make_core(model, tiny_plan(model, chunk=37, lookahead=2))
    few = replace(GREEDY, max_tokens=20)
    some = [replace(request, sampling=few) for request in requests[:2]]
    assert tokens_of(run_all(chunked, some)) == {i: expected[i][:20] for i in range(2)}

    # Pools of seven blocks and of one: rows wait for each other, and nearly every selection is recalled.
    some = [some[1], replace(requests[0], sampling=replace(GREEDY, max_tokens=8))]
    core = make_core(model, tiny_plan(model, host=448, gpu=64, chunk=37, lookahead=2))
    assert tokens_of(run_all(core, some)) == {0: expected[0][:8], 1: expected[1][:20]}
    assert core.stats.max_waiting >= 1 and core.stats.max_running == 1
    counters = core.cache.counters()
    assert all(n > 64 for n in counters.recalled_rows) and all(n > 64 for n in counters.evicted_rows)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_and_fp8_files_computed_in_float32(tiny_checkpoint: CheckpointFixture, family: Family, kind: Kind) -> None:
    directory = tiny_checkpoint(family, kind)
    model = cached_model(directory / "model")
    requests = make_requests(replace(GREEDY, max_tokens=40), lengths=(50,))
    out = tokens_of(run_all(make_core(model, tiny_plan(model, gpu=64)), requests))
    assert len(out[0]) == 40
    assert_greedy(directory, requests[0].prompt_token_ids, out[0])


@pytest.mark.parametrize("settings", [dict(offload=False), dict(seqs=1)], ids=["offload off", "batch of 1"])
def test_further_settings(tiny_checkpoint: CheckpointFixture, settings: dict[str, int]) -> None:
    directory = tiny_checkpoint("glm52", "fp32")
    model = cached_model(directory / "model")
    requests = make_requests(replace(GREEDY, max_tokens=32), lengths=(96, 40))
    core = make_core(model, tiny_plan(model, **settings))
    out = tokens_of(run_all(core, requests))
    for request in requests:
        assert_greedy(directory, request.prompt_token_ids, out[request.row_id])


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_prefill_and_decode(tiny_checkpoint: CheckpointFixture, family: Family) -> None:
    """Teacher forced, in a GPU pool that holds one selection: every step evicts and recalls."""
    directory = tiny_checkpoint(family, "fp32")
    model = cached_model(directory / "model")
    core = make_core(model, tiny_plan(model, host=256, gpu=64), residency=False)
    cache, ops = core.cache, core.ops
    prompt, forced = random_ids(100, seed=7).tolist(), random_ids(40, seed=8).tolist()
    whole = [Prompt(token_ids=prompt, blocks=[1, 2])]  # block 0 stays unused
    steps = prefill(model, cache, ops, whole, chunk_tokens=37, on_device=torch.device("cpu"))
    logits = []
    while not logits:
        try:
            next(steps)
        except StopIteration as end:
            logits.append(end.value[0])
    table = torch.tensor([[-1, -1, -1], [1, 2, 3]], dtype=torch.int32)  # row 0 is padding
    for i, token in enumerate(forced[:-1]):
        with torch.inference_mode():
            step, has_block = decode_logits(
                model,
                cache,
                ops,
                token_ids=torch.tensor([0, token]),
                positions=torch.tensor([0, 100 + i], dtype=torch.int32),
                active=torch.tensor([False, True]),
                block_table=table,
                predicted=torch.full((cache.spec.num_groups, 2), float("nan")),
            )
        assert has_block.tolist() == [True, True]
        cache.check_invariants(live_blocks=[1, 2, 3])
        logits.append(step[1])
    assert sum(cache.counters().evicted_rows) > 0
    torch.testing.assert_close(torch.stack(logits), oracle_logits(directory, prompt, forced), atol=1e-4, rtol=0)

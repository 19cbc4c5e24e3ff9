"""Engines over tiny checkpoints for the tests, and transformers as their judge."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echo_batch.cache.manager import OffloadedCache, make_cache
from echo_batch.config import CacheConfig, EngineConfig, RunConfig, Size
from echo_batch.engine.build import assemble_core
from echo_batch.engine.core import EngineCore
from echo_batch.engine.hardware import Hardware
from echo_batch.engine.plan import Plan, make_plan
from echo_batch.engine.stops import Detokenizer
from echo_batch.kernels.ops import reference_ops
from echo_batch.models.model import Model
from echo_batch.request import Completion, Request, SamplingParams
from tests.models.oracle import load_fp32, load_oracle, random_ids

CPU = Hardware(kind="cpu", name="cpu", num_devices=1, host_bytes=8 * 10**9)
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)

LENGTHS = (96, 130, 64, 10, 200, 63, 1, 90)
"""Prompts below, at and above a block and index_topk (32)."""


def tiny_plan(
    model: Model,
    *,
    host: int = 4096,
    gpu: int = 320,
    seqs: int = 8,
    chunk: int = 256,
    group: int = 1024,
    lookahead: int = 0,
    offload: bool = True,
) -> Plan:
    """The plan of a CPU run in float32 with these pools (tokens) and batch limits."""
    config = RunConfig(
        cache=CacheConfig(
            host_pool=Size("tokens", host), gpu_pool=Size("tokens", gpu if offload else host), offload=offload
        ),
        engine=EngineConfig(
            device="cpu",
            max_num_seqs=seqs,
            prefill_chunk_tokens=chunk,
            prefill_group_tokens=group,
            lookahead_steps=lookahead,
        ),
    )
    plan = make_plan(model.config, config, CPU, None)
    # Without an input the plan sets the prefill group to hold the longest possible prompt: smaller ones test more.
    return replace(plan, prefill_group_tokens=group)


def make_core(
    model: Model,
    plan: Plan | None = None,
    *,
    poison: bool = True,
    residency: bool = True,
    eos: tuple[int, ...] = (),
    make_detokenizer: Callable[[], Detokenizer] | None = None,
) -> EngineCore:
    """An engine on the reference ops; poison fills every freed and evicted row with NaN."""
    plan = plan or tiny_plan(model)
    ops = reference_ops()
    cache = make_cache(plan.cache, torch.device(plan.device), ops, poison=poison, residency=residency)
    return assemble_core(model, cache, ops, plan, eos_token_ids=eos, make_detokenizer=make_detokenizer)


def make_requests(
    sampling: SamplingParams = GREEDY, lengths: Sequence[int] = LENGTHS, first_row: int = 0
) -> list[Request]:
    """Random prompts of these lengths; row i is always the same prompt."""
    return [
        Request(row_id=i, prompt_token_ids=random_ids(n, seed=100 + i).tolist(), sampling=sampling)
        for i, n in enumerate(lengths, start=first_row)
    ]


def run_all(core: EngineCore, requests: Iterable[Request]) -> dict[int, Completion]:
    """Completions by row; each row exactly once, nothing left behind in the cache."""
    done: dict[int, Completion] = {}
    for completion in core.run(requests):
        if completion is not None:
            assert completion.row_id not in done
            done[completion.row_id] = completion
    core.cache.check_invariants(live_blocks=[])
    if isinstance(core.cache, OffloadedCache):
        assert not bool((core.cache.maps.gpu_to_host >= 0).any()), "rows of finished requests are resident"
    return done


def tokens_of(completions: dict[int, Completion]) -> dict[int, tuple[int, ...]]:
    """Token ids by row, of rows that all ended well."""
    assert [c.failure for c in completions.values() if c.failure is not None] == []
    return {row: completions[row].token_ids for row in sorted(completions)}


@lru_cache(maxsize=4)
def cached_model(path: Path) -> Model:
    return load_fp32(path)


@lru_cache(maxsize=2)
def cached_oracle(path: Path) -> Any:
    return load_oracle(path)


def oracle_logits(directory: Path, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """transformers' fp32 logits [n, V] from which each of `tokens` would be chosen, given those before it."""
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits: Tensor = cached_oracle(directory / "oracle")(ids[:, :-1], use_cache=False).logits[0].float()
    return logits[len(prompt) - 1 :]


def assert_greedy(directory: Path, prompt: Sequence[int], tokens: Sequence[int]) -> None:
    """Each token is the oracle's argmax after those before it: by induction it generates the same tokens."""
    logits = oracle_logits(directory, prompt, tokens)
    assert logits.argmax(-1).tolist() == list(tokens)

"""Prompts with shared prefixes give what they give alone, in any schedule and pools, and compute each prefix once.

That requests alone give what transformers gives is tested in test_core_oracle.py.

Poison (NaN in every freed and evicted row) is on, and every cache rule is checked after each step.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from echo_batch.cache.blocks import BlockAllocator
from echo_batch.cache.manager import KVCache, make_cache, slots_of_blocks
from echo_batch.cache.spec import CacheSpec
from echo_batch.engine import core as core_module
from echo_batch.engine.core import EngineCore
from echo_batch.engine.prefill import Prompt, make_layout, prefill
from echo_batch.kernels.ops import reference_ops
from echo_batch.models.config import ModelConfig
from echo_batch.models.loader import load_model
from echo_batch.models.model import Model
from echo_batch.request import Completion, Request, SamplingParams
from tests.checkpoints import FAMILIES, Family
from tests.engine.engines import cached_model, make_core, run_all, tiny_plan, tokens_of
from tests.models.oracle import CheckpointFixture, random_ids

CPU = torch.device("cpu")
BOOK = random_ids(200, seed=1).tolist()  # three blocks and a bit
LONG = BOOK + random_ids(91, seed=2).tolist()


def ask(length: int, seed: int) -> list[int]:
    return random_ids(length, seed=seed).tolist()


PROMPTS = [
    BOOK + ask(10, 3),
    BOOK + ask(31, 4),
    BOOK[:64] + ask(40, 5),
    BOOK[:192],  # ends with a block: its last token is computed all the same
    BOOK[:192],
    ask(70, 6),
    LONG,
    LONG[:260] + ask(20, 7),
]
CACHED = [0, 192, 64, 128, 128, 0, 192, 256]
"""Tokens that each finds there if nothing is evicted before it comes."""


def requests(max_tokens: int = 3) -> list[Request]:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [Request(row_id=i, prompt_token_ids=p, sampling=sampling) for i, p in enumerate(PROMPTS)]


def run_checked(core: EngineCore, rows: list[Request], monkeypatch: pytest.MonkeyPatch) -> dict[int, Completion]:
    """All rows together; between any two steps the cache's rules hold and freed blocks are not resident."""
    made: list[BlockAllocator] = []

    def allocator(num_blocks: int) -> BlockAllocator:
        made.append(BlockAllocator(num_blocks))
        return made[-1]

    monkeypatch.setattr(core_module, "BlockAllocator", allocator)
    done = {}
    for completion in core.run(rows):
        if completion is not None:
            done[completion.row_id] = completion
        else:
            core.cache.check_invariants(live_blocks=made[0].live_blocks())
    assert made[0].num_free == made[0].num_blocks
    core.cache.check_invariants(live_blocks=[])
    return done


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_runs_equal_runs_alone(
    tiny_checkpoint: CheckpointFixture, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = cached_model(tiny_checkpoint(family, "fp32") / "model")
    rows = requests()[: len(PROMPTS) if family == "glm52" else 4]
    alone = make_core(model, tiny_plan(model, chunk=1024))
    expected = {r.row_id: run_all(alone, [r])[r.row_id].token_ids for r in rows}
    assert alone.stats.cached_tokens == 0
    # Small groups: prefixes come back from the host pool.
    settings: list[dict[str, Any]] = [dict(group=120, chunk=100, lookahead=2)]
    if family == "glm52":
        settings += [
            dict(group=2048, chunk=50),  # one group: prefixes are computed beside those that need them
            dict(group=300, offload=False, seqs=2),
        ]
    for setting in settings:
        core = make_core(model, tiny_plan(model, **setting))
        done = run_checked(core, rows, monkeypatch)
        assert tokens_of(done) == expected, setting
        assert [done[r.row_id].num_cached_tokens for r in rows] == CACHED[: len(rows)], setting
        assert core.stats.prompt_tokens == sum(len(r.prompt_token_ids) for r in rows)
        assert core.stats.cached_tokens == sum(CACHED[: len(rows)])
    if family != "glm52":
        return
    # Pools of eight blocks: idle prefixes make room for others and are computed again.
    tight = make_core(model, tiny_plan(model, host=512, gpu=128, group=300, chunk=64, lookahead=1))
    done = run_checked(tight, rows, monkeypatch)
    assert tokens_of(done) == expected
    assert 0 < tight.stats.cached_tokens < sum(CACHED) and tight.stats.max_waiting > 0
    counters = tight.cache.counters()
    assert all(n > 0 for n in counters.recalled_rows) and all(n > 0 for n in counters.evicted_rows)


def test_only_what_is_not_cached_goes_through_the_model(tiny_checkpoint: CheckpointFixture) -> None:
    model = cached_model(tiny_checkpoint("v32", "fp32") / "model")
    embedded = []

    class Spy(Model):
        def embed(self, token_ids: Tensor) -> Any:
            embedded.append(token_ids.shape[0])
            return super().embed(token_ids)

    spy = Spy(model.config, model.weights, model.ops, row_format=model.row_format, index_format=model.index_format)
    run_all(make_core(spy, tiny_plan(model, group=300)), requests(max_tokens=1))
    assert sum(embedded) == sum(map(len, PROMPTS)) - sum(CACHED)


def test_a_corrupted_prefix_is_seen(tiny_checkpoint: CheckpointFixture) -> None:
    """A suffix really reads the host rows of its prefix: the mutation that must change what comes out."""
    model = cached_model(tiny_checkpoint("glm52", "fp32") / "model")
    first, second = requests()[:2]
    results = []
    for corrupt in (False, True):
        core = make_core(model, tiny_plan(model, seqs=1))
        for completion in core.run([first, second]):
            if completion is not None and completion.row_id == 0 and corrupt:
                slots = slots_of_blocks(torch.tensor([1], dtype=torch.int32))
                row_bytes = core.cache.spec.row_format.row_bytes
                for layer in range(core.cache.spec.num_layers):
                    core.cache.write_host(layer, slots, torch.zeros((64, row_bytes), dtype=torch.uint8))
            if completion is not None and completion.row_id == 1:
                assert completion.num_cached_tokens == 192
                results.append(completion.token_ids)
    assert results[0] != results[1]


def test_a_closed_run_leaves_nothing_behind(tiny_checkpoint: CheckpointFixture) -> None:
    model = cached_model(tiny_checkpoint("v32", "fp32") / "model")
    core = make_core(model, tiny_plan(model, group=300, chunk=64))
    for steps in (1, 9):
        run = core.run(requests())
        for _ in range(steps):
            next(run)
        run.close()
        core.cache.check_invariants(live_blocks=[])
    rows = requests()[:2]
    assert tokens_of(run_all(core, rows)) == tokens_of(run_all(make_core(model, tiny_plan(model)), rows))


def test_layout_places_each_shared_block_once() -> None:
    prompts = [
        Prompt(token_ids=range(150), blocks=[7, 8, 2, 99]),
        Prompt(token_ids=range(200), blocks=[4, 5, 6, 3], num_cached=128),  # from an earlier group
        Prompt(token_ids=range(130), blocks=[7, 8, 1], num_cached=128),  # beside the first
        Prompt(token_ids=range(100), blocks=[4, 9], num_cached=64),
    ]
    layout = make_layout(prompts)
    assert layout.starts == [0, 150, 222, 224, 260] and layout.loaded_blocks == [4, 5]
    packed = 128
    assert layout.block_rows == [
        [packed, packed + 64, packed + 128],
        [0, 64, packed + 150, packed + 214],
        [packed, packed + 64, packed + 222],
        [0, packed + 224],
    ]
    with pytest.raises(AssertionError, match="after its use"):
        make_layout(prompts[::-1])


def run_prefill(model: Model, cache: KVCache, prompts: list[Prompt], chunk: int) -> tuple[Tensor, int]:
    """Logits of a group, and the tokens times layers that it said it did."""
    steps, done = prefill(model, cache, model.ops, prompts, chunk_tokens=chunk, on_device=CPU), 0
    while True:
        try:
            done += next(steps)
        except StopIteration as end:
            return end.value, done


FORMATS = [
    (torch.float32, "fp32", 1e-9),
    (torch.float32, "bf16", 1e-4),
    (torch.bfloat16, "fp8", 2e-2),
]


@pytest.mark.parametrize(("dtype", "rows", "tolerance"), FORMATS, ids=["fp32", "bf16 rows", "bf16 with fp8 rows"])
def test_prefill_of_suffixes_equals_whole_prefill(
    tiny_checkpoint: CheckpointFixture, dtype: torch.dtype, rows: Any, tolerance: float
) -> None:
    path = tiny_checkpoint("glm52" if dtype == torch.float32 else "v32", "fp32") / "model"
    config = ModelConfig.from_dir(path, latent_eps=1e-6)
    model = load_model(config, path, device=CPU, dtype=dtype, row_kind=rows, ops=reference_ops())
    spec = CacheSpec(
        group_layers=config.group_layers,
        row_format=model.row_format,
        index_format=model.index_format,
        index_topk=config.index_topk,
        host_tokens=16 * 64,
        gpu_tokens=16 * 64,
    )

    def table(whole: bool) -> list[Prompt]:
        if whole:  # the same prompts in blocks of their own
            return [Prompt(token_ids=LONG, blocks=range(5)), Prompt(token_ids=PROMPTS[1], blocks=range(5, 9))]
        return [
            Prompt(token_ids=LONG, blocks=[9, 10, 2, 3, 4], num_cached=128),
            Prompt(token_ids=PROMPTS[1], blocks=[9, 10, 2, 8], num_cached=192),  # block 2 is the first one's
        ]

    caches = [make_cache(spec, CPU, model.ops, poison=True) for _ in range(2)]
    expected, whole_work = run_prefill(model, caches[0], table(True), chunk=1024)
    run_prefill(model, caches[1], [Prompt(token_ids=BOOK, blocks=[9, 10, 11, 12])], chunk=77)
    logits, work = run_prefill(model, caches[1], table(False), chunk=50)
    assert (whole_work, work) == (config.num_layers * (291 + 231), config.num_layers * (163 + 39))
    x, y = logits.double(), expected.double()
    assert float(1 - 2 * (x * y).sum() / (x * x + y * y).sum()) < tolerance
    if dtype == torch.float32 and rows == "fp32":
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        own = slots_of_blocks(torch.tensor([2, 3, 4, 8], dtype=torch.int32))[: 3 * 64 + 39]
        own = own[torch.cat([torch.arange(163), torch.arange(192, 231)])]
        for layer in range(spec.num_layers):
            a, b = (c.read_host(layer, own).view(torch.float32) for c in caches)
            torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
    caches[1].check_invariants(live_blocks=[9, 10, 11, 12, 2, 3, 4, 8])

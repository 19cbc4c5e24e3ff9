"""Prefill on the card: against the references on the same weights, whole against cut, packed and shared, and decode
after it. Prompts of one token, around a block, around index_topk, and long ones.

Two runs that cut prompts differently multiply matrices of other shapes, so last bits differ, and a near tie of index
scores may fall the other way. What must agree is what comes out, as a whole: 1 - 2<x,y> / (<x,x> + <y,y>).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from echo_batch.cache.manager import KVCache, make_cache, slots_of_blocks
from echo_batch.cache.spec import CacheSpec
from echo_batch.engine.batch import BatchState
from echo_batch.engine.decode import decode_step
from echo_batch.engine.prefill import Prompt, prefill
from echo_batch.kernels.cache_ops import reference_cache_ops
from echo_batch.kernels.ops import reference_ops
from echo_batch.kernels.reference.rows import unpack_kv_values
from echo_batch.kernels.select import select_ops
from echo_batch.models.config import ModelConfig
from echo_batch.models.layers import ModelWeights
from echo_batch.models.loader import load_model
from echo_batch.models.model import Model
from tests.models.oracle import CheckpointFixture

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
TOPK = 32
LENGTHS = (1, 63, 64, 65, TOPK, TOPK + 1, 300, 128, 517)
LAYER_0, DEEP, LOGITS = 1e-4, 2e-2, 2e-2
"""Tolerances between ways to cut prompts: rows of the first layer (no selection before it), of all layers, logits."""
EXACT = 1e-8
"""Between ways to cut prompts in float32, where one token in some thousand selects another of two that nearly tie."""
MARGIN = 1.5
"""How much farther from the exact result the fast versions may be than the references at the same precision."""


@pytest.fixture(scope="module", params=["v32", "glm52", "wide"])
def model(
    request: pytest.FixtureRequest, tiny_checkpoint: CheckpointFixture, tmp_path_factory: pytest.TempPathFactory
) -> Model:
    """Tiny V3.2 and GLM-5.2, and a V3.2 of 64 heads, which FlashMLA serves."""
    wide = request.param == "wide"
    path: Path = tiny_checkpoint("v32" if wide else request.param, "fp8") / "model"
    if wide:
        config = json.loads((path / "config.json").read_text()) | dict(num_attention_heads=64, num_key_value_heads=64)
        path = tmp_path_factory.mktemp("wide")
        (path / "config.json").write_text(json.dumps(config))
    return load_model(
        ModelConfig.from_dir(path),
        path,
        device=CUDA,
        dtype=torch.bfloat16,
        row_kind="fp8",
        ops=select_ops(CUDA),
        load_format="dummy" if wide else "safetensors",
    )


@pytest.fixture(scope="module", params=["v32", "glm52"])
def float32_model(request: pytest.FixtureRequest, tiny_checkpoint: CheckpointFixture) -> Model:
    """Nothing is rounded to fewer bits: weights, rows, index keys."""
    path: Path = tiny_checkpoint(request.param, "fp32") / "model"
    config = ModelConfig.from_dir(path)
    return load_model(config, path, device=CUDA, dtype=torch.float32, row_kind="fp32", ops=select_ops(CUDA))


def spec_of(model: Model, *, offload: bool = True) -> CacheSpec:
    return CacheSpec(
        group_layers=model.config.group_layers,
        row_format=model.row_format,
        index_format=model.index_format,
        index_topk=model.config.index_topk,
        host_tokens=4096,
        gpu_tokens=1024 if offload else 4096,
        offload=offload,
    )


def tokens_of(model: Model, length: int, seed: int) -> list[int]:
    return torch.randint(2, model.config.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def prompts_of(model: Model, lengths: Sequence[int] = LENGTHS) -> list[Prompt]:
    """One prompt of each length, in blocks of its own that are not in order."""
    prompts, block = [], 60
    for number, length in enumerate(lengths):
        blocks = [block - i for i in range(-(-length // 64))]
        block -= len(blocks)
        prompts.append(Prompt(token_ids=tokens_of(model, length, seed=number), blocks=blocks))
    return prompts


@dataclass
class Outcome:
    """What a prefill leaves: logits of all prompts, KV rows as numbers and keys as bytes, by layer and group."""

    logits: Tensor
    rows: list[Tensor]
    keys: list[Tensor]
    predicted: Tensor
    cache: KVCache = field(repr=False)


def run(
    model: Model,
    groups: Sequence[Sequence[Prompt]],
    *,
    chunk: int,
    slice_: int,
    cache: KVCache | None = None,
    slots: Tensor | None = None,
    score_bytes: int = 1 << 30,
    streamed: float = float("inf"),
) -> Outcome:
    spec = spec_of(model)
    cache = cache or make_cache(spec, CUDA, model.ops, poison=True)
    logits, predicted = [], []
    for group in groups:
        predicted.append(torch.zeros(spec.num_groups, len(group), device=CUDA))
        steps = prefill(
            model,
            cache,
            model.ops,
            group,
            chunk_tokens=chunk,
            slice_tokens=slice_,
            score_bytes=score_bytes,
            streamed_per_token=streamed,
            predicted=predicted[-1],
            on_device=CUDA,
        )
        while True:
            try:
                next(steps)
            except StopIteration as end:
                logits.append(end.value)
                break
    if slots is None:
        slots = slots_in_order([p for group in groups for p in group])
    rows = [unpack_kv_values(cache.read_host(layer, slots), spec.row_format) for layer in range(spec.num_layers)]
    keys = [model.ops.read_index_keys(cache.index_pages(g), slots, spec.index_format) for g in range(spec.num_groups)]
    return Outcome(torch.cat(logits), rows, keys, torch.cat(predicted, 1), cache)


def slots_in_order(prompts: Sequence[Prompt]) -> Tensor:
    slots = [slots_of_blocks(torch.tensor(p.blocks, dtype=torch.int32))[: len(p.token_ids)] for p in prompts]
    return torch.cat(slots).to(CUDA)


def distance(x: Tensor, y: Tensor) -> float:
    x, y = x.double().flatten(), y.double().flatten()
    assert bool(torch.isfinite(x).all()) and bool(torch.isfinite(y).all())
    return float(1 - 2 * (x @ y) / (x @ x + y @ y))


def assert_close(got: Outcome, expected: Outcome) -> None:
    """In all but the order in which sums are added up; in float32 the same tokens come out."""
    if got.cache.spec.row_format.kind == "fp32":
        distances = [distance(a, b) for a, b in zip([*got.rows, got.logits], [*expected.rows, expected.logits])]
        print(f"rows and logits {[f'{d:.1e}' for d in distances]}")
        assert max(distances) < EXACT
        assert torch.equal(got.logits.argmax(-1), expected.logits.argmax(-1))
        torch.testing.assert_close(got.predicted, expected.predicted, rtol=1e-3, atol=1e-3, equal_nan=True)
        return
    distances = [distance(a, b) for a, b in zip(got.rows, expected.rows, strict=True)]
    logits = distance(got.logits, expected.logits)
    print(f"rows {[f'{d:.1e}' for d in distances]} logits {logits:.1e}")
    assert distances[0] < LAYER_0 and max(distances) < DEEP and logits < LOGITS
    assert distance(got.predicted.nan_to_num(nan=0.0), expected.predicted.nan_to_num(nan=0.0)) < DEEP
    assert torch.equal(got.predicted.isnan(), expected.predicted.isnan())


@pytest.fixture(scope="module")
def whole(model: Model) -> Outcome:
    """Each prompt alone, in one piece."""
    return run(model, [[p] for p in prompts_of(model)], chunk=4096, slice_=4096)


def in_float32(part: Any) -> Any:
    """A part of a model's weights with float32 for bfloat16."""
    if isinstance(part, Tensor):
        return part.float() if part.dtype == torch.bfloat16 else part
    if isinstance(part, tuple | list):
        return type(part)(map(in_float32, part))
    if is_dataclass(part):
        return replace(part, **{f.name: in_float32(getattr(part, f.name)) for f in fields(part)})  # type: ignore[type-var]
    return part


def by_references(model: Model, prompts: Sequence[Prompt], weights: ModelWeights) -> Outcome:
    slow = Model(model.config, weights, reference_ops(), row_format=model.row_format, index_format=model.index_format)
    cache = make_cache(spec_of(model, offload=False), CUDA, slow.ops, cache_ops=reference_cache_ops())
    return run(slow, [[p] for p in prompts], chunk=4096, slice_=4096, cache=cache)


@dataclass
class Yardstick:
    """The references in float32, and how far off they are in bfloat16: rows of each layer, then logits.

    Random weights turn a last bit into another expert or another selected token, so distances grow layer by layer to a
    tenth (the same on a CPU). Fast versions must do no worse than the references at their precision.
    """

    exact: Outcome
    rows: list[float]
    logits: float

    def check(self, rows: Sequence[Tensor], logits: Tensor) -> None:
        found = [distance(a, b) for a, b in zip(rows, self.exact.rows)]
        print(f"rows {[f'{d:.1e}' for d in found]} of {[f'{d:.1e}' for d in self.rows]}")
        print(f"logits {distance(logits, self.exact.logits):.1e} of {self.logits:.1e}")
        assert all(d <= MARGIN * most + LAYER_0 for d, most in zip(found, self.rows))
        assert distance(logits, self.exact.logits) <= MARGIN * self.logits + LAYER_0


def yardstick(model: Model, prompts: Sequence[Prompt]) -> Yardstick:
    exact = by_references(model, prompts, in_float32(model.weights))
    rounded = by_references(model, prompts, model.weights)
    rows = [distance(a, b) for a, b in zip(rounded.rows, exact.rows, strict=True)]
    return Yardstick(exact, rows, distance(rounded.logits, exact.logits))


def test_whole_is_as_good_as_the_references(model: Model, whole: Outcome) -> None:
    expected = yardstick(model, prompts_of(model))
    expected.check(whole.rows, whole.logits)
    # Nothing but rounding stands between the two in the first layer.
    assert distance(whole.rows[0], by_references(model, prompts_of(model), model.weights).rows[0]) < LAYER_0
    # Only prompts longer than index_topk have a k-th score.
    long = torch.tensor([n > model.config.index_topk for n in LENGTHS])
    assert torch.equal(~whole.predicted[0].isnan().cpu(), long)
    assert torch.equal(whole.predicted.isnan(), expected.exact.predicted.isnan())


@pytest.mark.parametrize(("chunk", "slice_"), [(4096, 4096), (100, 100), (300, 70), (512, 64)])
def test_packed_and_chunked_equal_whole(model: Model, whole: Outcome, chunk: int, slice_: int) -> None:
    check_packed_and_chunked(model, whole, chunk, slice_)


def check_packed_and_chunked(model: Model, whole: Outcome, chunk: int, slice_: int) -> None:
    got = run(model, [prompts_of(model)], chunk=chunk, slice_=slice_, score_bytes=4 * 517 * 50)
    assert_close(got, whole)
    got.cache.check_invariants(live_blocks=range(61))


def test_float32_prefill_is_the_same_however_it_is_cut(float32_model: Model) -> None:
    """Whole, packed, chunked and by the references; the shared ones are the next test's."""
    model = float32_model
    whole = run(model, [[p] for p in prompts_of(model)], chunk=4096, slice_=4096)
    for chunk, slice_ in ((4096, 4096), (100, 100), (300, 70)):
        check_packed_and_chunked(model, whole, chunk, slice_)
    assert_close(by_references(model, prompts_of(model), model.weights), whole)


def test_float32_shared_prefixes_equal_whole_prompts(float32_model: Model) -> None:
    check_shared_prefixes(float32_model)


def test_shared_prefixes_equal_whole_prompts(model: Model) -> None:
    check_shared_prefixes(model)


def check_shared_prefixes(model: Model) -> None:
    book = tokens_of(model, 400, seed=50)
    texts = [book + tokens_of(model, n, seed=60 + n) for n in (1, 40, 100)]
    expected = run(model, [[Prompt(token_ids=t, blocks=range(i * 8, i * 8 + 8))] for i, t in enumerate(texts)],
                   chunk=4096, slice_=4096)  # fmt: skip
    first = Prompt(token_ids=texts[0], blocks=range(8))
    rest = [
        Prompt(token_ids=t, blocks=[*range(6), *range(i * 8, i * 8 + 2)], num_cached=384)
        for i, t in enumerate(texts[1:], start=1)
    ]
    outcomes = []
    for groups, streamed in (([[first, *rest]], float("inf")), ([[first], rest], float("inf")), ([[first], rest], 0.0)):
        outcomes.append(run(model, groups, chunk=4096, slice_=4096, streamed=streamed))
        assert_close_suffixes(outcomes[-1], expected)
    # Rows that no token selects need not be there: what is read back changes no bit.
    assert torch.equal(outcomes[1].logits, outcomes[2].logits)
    assert all(torch.equal(a, b) for a, b in zip(outcomes[1].rows, outcomes[2].rows, strict=True))


def assert_close_suffixes(got: Outcome, expected: Outcome) -> None:
    exact = got.cache.spec.row_format.kind == "fp32"
    print(f"logits {distance(got.logits, expected.logits):.1e}")
    assert distance(got.logits, expected.logits) < (EXACT if exact else LOGITS)
    assert max(distance(a, b) for a, b in zip(got.rows, expected.rows, strict=True)) < (EXACT if exact else DEEP)


def test_decode_goes_on_where_prefill_ends(model: Model) -> None:
    """A token decoded after a prefill has the logits that it has at the end of a longer prompt."""
    longer, logits = decode_one(model)
    expected = yardstick(model, longer)
    rounded = by_references(model, longer, model.weights).logits
    # Of six rows one or two may meet another expert and be far off, in the references too: the middle tells.
    found, usual = ([distance(a, b) for a, b in zip(x, expected.exact.logits)] for x in (logits, rounded))
    print(f"logits {[f'{d:.1e}' for d in found]} of {[f'{d:.1e}' for d in usual]}")
    assert sorted(found)[len(found) // 2] <= 2 * MARGIN * sorted(usual)[len(usual) // 2] + LAYER_0
    assert max(found) <= max(0.5, MARGIN * max(usual))  # unrelated logits: 1


def test_float32_decode_goes_on_where_prefill_ends(float32_model: Model) -> None:
    longer, logits = decode_one(float32_model)
    expected = run(float32_model, [longer], chunk=4096, slice_=4096).logits
    assert distance(logits, expected) < EXACT
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def decode_one(model: Model) -> tuple[list[Prompt], Tensor]:
    """Prompts whose last token is decoded after a prefill of the others, and the logits of that."""
    lengths = (1, 63, 64, 65, TOPK, 300)
    prompts = prompts_of(model, lengths)
    longer = [Prompt(token_ids=[*p.token_ids, 5], blocks=[*p.blocks, i]) for i, p in enumerate(prompts)]
    cache = run(model, [[Prompt(token_ids=p.token_ids[:-1], blocks=p.blocks) for p in longer]], chunk=4096,
                slice_=4096).cache  # fmt: skip
    state = BatchState.allocate(len(lengths), 512, cache.spec.num_groups, CUDA)
    for row, prompt in enumerate(longer):
        state.active[row] = True
        state.block_table[row, : len(prompt.blocks)] = torch.tensor(list(prompt.blocks), dtype=torch.int32)
        state.positions[row] = len(prompt.token_ids) - 1
        state.last_position[row] = 511
        state.token_ids[row] = 5
    with torch.inference_mode():
        step = decode_step(model, cache, model.ops, state, bucket=len(lengths), max_blocks=8, greedy_only=True)
    assert torch.equal(step.output.codes.cpu(), torch.zeros(len(lengths), dtype=step.output.codes.dtype))
    return longer, step.logits

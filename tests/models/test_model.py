"""Model's own promises: rounding in bf16, padding, slices, independence of how a prompt is cut."""

import pytest
import torch
from torch import Tensor

from echo_batch.kernels.ops import reference_ops
from echo_batch.kernels.reference.norm import add_rms_norm
from echo_batch.kernels.reference.rows import unpack_index_keys, unpack_kv_rows
from echo_batch.kernels.weights import QuantizedWeight, dequantize, rows_of
from echo_batch.models.config import ModelConfig
from echo_batch.models.loader import load_model
from echo_batch.models.model import Model, Stream
from tests.checkpoints import FAMILIES, Family
from tests.models.forward import reference_forward
from tests.models.oracle import CheckpointFixture, load_fp32, random_ids


@pytest.fixture(scope="module")
def bf16_model(tiny_checkpoint: CheckpointFixture) -> Model:
    path = tiny_checkpoint("v32", "bf16") / "model"
    return load_model(
        ModelConfig.from_dir(path),
        path,
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        row_kind="fp8",
        ops=reference_ops(),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_equals_whole(tiny_checkpoint: CheckpointFixture, family: Family) -> None:
    model = load_fp32(tiny_checkpoint(family, "fp32") / "model")
    ids = random_ids(96, seed=5)
    whole = reference_forward(model, ids)
    chunked = chunked_forward(model, ids, (0, 7, 40, 41, 90, 96))
    torch.testing.assert_close(chunked, whole, atol=1e-4, rtol=0)


def chunked_forward(model: Model, ids: Tensor, cuts: tuple[int, ...]) -> Tensor:
    """Layer by layer, chunk by chunk; keys and rows of earlier chunks are read back from packed bytes."""
    ops, topk = model.ops, model.config.index_topk
    chunks = list(zip(cuts[:-1], cuts[1:], strict=True))
    positions = torch.arange(ids.shape[0], dtype=torch.int32)
    hidden = model.sum(model.embed(ids))
    selected: dict[tuple[int, int], Tensor] = {}
    for layer in range(model.config.num_layers):
        keys, rows, outputs = [], [], []
        for low, high in chunks:
            part = Stream(hidden[low:high], None)
            part, inputs = model.attention_inputs(layer, part, model.angles(positions[low:high]))
            rows.append(inputs.kv_row)
            if inputs.index_query is not None and inputs.index_weights is not None and inputs.index_key is not None:
                keys.append(inputs.index_key)
                ends = positions[low:high] + 1
                scores = ops.index_scores_contiguous(
                    inputs.index_query, inputs.index_weights, torch.cat(keys), ends, model.index_format
                )
                selected[low, high] = ops.topk_positions(scores, ends, topk)[0]
            latent = ops.sparse_mla(
                inputs.query, torch.cat(rows), selected[low, high], model.config.softmax_scale, model.row_format
            )
            outputs.append(model.sum(model.ffn(layer, model.attention_output(layer, part, latent))))
        hidden = torch.cat(outputs)
    return model.logits(Stream(hidden, None))


def test_padded_tokens_reach_no_expert_and_change_nothing(tiny_checkpoint: CheckpointFixture) -> None:
    model = load_fp32(tiny_checkpoint("v32", "fp32") / "model")
    stream = model.embed(random_ids(6, seed=6))
    valid = torch.tensor([True, True, False, True, False, True])
    poisoned = Stream(stream.hidden.clone(), None)
    poisoned.hidden[~valid] = float("nan")
    out = model.sum(model.ffn(1, poisoned, valid))
    expected = model.sum(model.ffn(1, stream, None))
    torch.testing.assert_close(out[valid], expected[valid])


def test_bf16_residual_is_added_in_fp32_and_the_norm_sees_the_unrounded_sum(bf16_model: Model) -> None:
    hidden = torch.full((1, 256), 256.0, dtype=torch.bfloat16)
    delta = torch.full((1, 256), 1.0, dtype=torch.bfloat16)
    delta[0, ::2] = 3.0
    # 257 and 259 round to 256 and 260 in bf16: a norm of the rounded sum would see 256 and 260.
    _, normed = add_rms_norm(hidden, delta, torch.full((256,), 256.0), 1e-6)
    exact = hidden.double() + delta.double()
    expected = 256.0 * exact / exact.square().mean().sqrt()
    assert torch.equal(normed, expected.to(torch.bfloat16))
    assert bf16_model.sum(Stream(hidden, delta))[0, :2].tolist() == [260.0, 256.0]


def test_bf16_formats_and_dtypes(bf16_model: Model) -> None:
    stream = bf16_model.embed(random_ids(5, seed=7))
    _, inputs = bf16_model.attention_inputs(0, stream, bf16_model.angles(torch.arange(5)))
    assert inputs.query.dtype == torch.bfloat16 and inputs.query.shape == (5, 4, 576)
    assert inputs.kv_row.dtype == torch.uint8 and inputs.kv_row.shape == (5, 656)
    assert inputs.index_query is not None and inputs.index_query.dtype == torch.float8_e4m3fn
    assert inputs.index_weights is not None and inputs.index_weights.dtype == torch.float32
    assert inputs.index_key is not None and inputs.index_key.shape == (5, 132)
    latent = torch.zeros(5, 4, 512, dtype=torch.bfloat16)
    stream = bf16_model.ffn(0, bf16_model.attention_output(0, stream, latent))
    assert stream.hidden.dtype == torch.bfloat16
    assert bf16_model.logits(stream).dtype == torch.float32


def test_bf16_rows_and_scores_are_close_to_fp32(tiny_checkpoint: CheckpointFixture, bf16_model: Model) -> None:
    """One layer, the same input: rounding only (Hadamard must cancel between query and key)."""
    exact = load_fp32(tiny_checkpoint("v32", "bf16") / "model")
    ids, positions = random_ids(96, seed=8), torch.arange(96, dtype=torch.int32)
    _, ours = bf16_model.attention_inputs(0, bf16_model.embed(ids), bf16_model.angles(positions))
    _, theirs = exact.attention_inputs(0, exact.embed(ids), exact.angles(positions))
    latent, rope = unpack_kv_rows(ours.kv_row, bf16_model.row_format)
    latent32, rope32 = unpack_kv_rows(theirs.kv_row, exact.row_format)
    assert difference(latent, latent32) < 1e-3 and difference(rope, rope32) < 1e-4
    assert difference(ours.query.float(), theirs.query) < 1e-4
    scores = []
    for model, inputs in ((bf16_model, ours), (exact, theirs)):
        assert inputs.index_query is not None and inputs.index_weights is not None and inputs.index_key is not None
        ends = torch.full((96,), 96, dtype=torch.int32)
        fmt = model.index_format
        scores.append(
            model.ops.index_scores_contiguous(inputs.index_query, inputs.index_weights, inputs.index_key, ends, fmt)
        )
    assert difference(scores[0], scores[1]) < 2e-3
    assert theirs.index_key is not None and ours.index_key is not None
    key32, _ = unpack_index_keys(theirs.index_key, exact.index_format)
    key8, _ = unpack_index_keys(ours.index_key, bf16_model.index_format)
    # Without the rotation these would be almost the same direction.
    assert torch.nn.functional.cosine_similarity(key32, key8, -1).abs().mean() < 0.5


@pytest.mark.parametrize("variant", ["fp8", "fp32"])
def test_queries_apart_are_those_of_one_product(variant: str, tiny_checkpoint: CheckpointFixture) -> None:
    model = load_fp32(tiny_checkpoint("v32", variant) / "model")
    angles = model.angles(torch.arange(7))
    stream = model.embed(random_ids(7, seed=12))
    _, together = model.attention_inputs(0, stream, angles)
    _, projected = model.project(0, stream, angles)
    torch.testing.assert_close(model.absorb_query(0, model.project_query(0, projected, angles), angles), together.query)
    assert together.index_query is not None and together.index_weights is not None
    query, weights = model.index_query(0, projected, angles)
    torch.testing.assert_close(query, together.index_query)
    torch.testing.assert_close(weights, together.index_weights)


def test_rows_of_a_quantized_weight() -> None:
    data = torch.randn(320, 256).to(torch.float8_e4m3fn)
    weight = QuantizedWeight(data, torch.rand(3, 2), True)
    for start, end in ((0, 128), (128, 320), (256, 320)):
        part = rows_of(weight, start, end)
        assert torch.equal(dequantize(part, torch.float32), dequantize(weight, torch.float32)[start:end])
    with pytest.raises(AssertionError):
        rows_of(weight, 0, 100)


def difference(x: Tensor, y: Tensor) -> float:
    """1 - 2<x, y> / (<x, x> + <y, y>) in float64."""
    x, y = x.double(), y.double()
    return (1 - 2 * (x * y).sum() / (x.square().sum() + y.square().sum())).item()


def test_fp32_mode_rounds_nothing(tiny_checkpoint: CheckpointFixture) -> None:
    model = load_fp32(tiny_checkpoint("v32", "fp8") / "model")
    assert model.row_format.row_bytes == 2304 and model.index_format.row_bytes == 512
    _, inputs = model.attention_inputs(0, model.embed(random_ids(3, seed=9)), model.angles(torch.arange(3)))
    assert inputs.index_query is not None and inputs.index_query.dtype == torch.float32
    assert inputs.query.dtype == torch.float32


def test_shared_layers_have_no_indexer(tiny_checkpoint: CheckpointFixture) -> None:
    model = load_fp32(tiny_checkpoint("glm52", "fp32") / "model")
    stream = model.embed(random_ids(3, seed=10))
    _, inputs = model.attention_inputs(3, stream, model.angles(torch.arange(3)))
    assert inputs.index_query is None and inputs.index_weights is None and inputs.index_key is None

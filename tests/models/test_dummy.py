"""Random weights from a config: repeatable, finite through many layers, of the sizes that the plan expects."""

from dataclasses import fields, is_dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from echo_batch.kernels.ops import reference_ops
from echo_batch.kernels.weights import QuantizedWeight
from echo_batch.models.config import ModelConfig
from echo_batch.models.dummy import DummySource
from echo_batch.models.layers import MoeWeights
from echo_batch.models.loader import WeightBuilder, load_model
from echo_batch.models.model import Model
from echo_batch.models.sizes import weight_bytes
from tests.checkpoints import FAMILIES, Family, hf_config
from tests.models.forward import reference_forward

CPU = torch.device("cpu")
QUANT = dict(quant_method="fp8", weight_block_size=[128, 128], scale_fmt="ue8m0")


def dummy_model(config: ModelConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Model:
    row_kind: Literal["fp32", "fp8"] = "fp32" if dtype == torch.float32 else "fp8"
    return load_model(
        config,
        None,
        device=CPU,
        dtype=dtype,
        row_kind=row_kind,
        ops=reference_ops(),
        load_format="dummy",
        seed=seed,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_stay_finite_and_of_sane_size(dtype: torch.dtype) -> None:
    config = ModelConfig.from_hf_dict(hf_config("glm52", num_hidden_layers=24, n_routed_experts=4))
    logits = reference_forward(dummy_model(config, dtype=dtype), torch.arange(80))
    assert logits.isfinite().all()
    assert 0.1 < logits.std() < 10


def test_seeded() -> None:
    config = ModelConfig.from_hf_dict(hf_config("v32"))
    ids = torch.arange(40)
    logits = reference_forward(dummy_model(config, seed=3), ids)
    assert torch.equal(logits, reference_forward(dummy_model(config, seed=3), ids))
    assert not torch.equal(logits, reference_forward(dummy_model(config, seed=4), ids))


def test_tensors_of_one_layer_differ() -> None:
    weights = dummy_model(ModelConfig.from_hf_dict(hf_config("v32"))).weights
    mlp = weights.layers[1].mlp
    assert isinstance(mlp, MoeWeights) and isinstance(mlp.experts.down, Tensor)
    assert not torch.equal(mlp.experts.down[0], mlp.experts.down[1])
    first, second = weights.layers[1].attention.key_up, weights.layers[2].attention.key_up
    assert not torch.equal(first, second)


def stored_bytes(weights: Any) -> int:
    """Bytes of all tensors in nested dataclasses and tuples."""
    if isinstance(weights, Tensor):
        return weights.numel() * weights.element_size()
    if isinstance(weights, tuple):
        return sum(stored_bytes(item) for item in weights)
    if is_dataclass(weights):
        return sum(stored_bytes(getattr(weights, field.name)) for field in fields(weights))
    return 0


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_those_of_the_loaded_weights(family: Family, quantized: bool) -> None:
    config = ModelConfig.from_hf_dict(hf_config(family, quantization_config=QUANT))
    source = DummySource(config, CPU, dtype=torch.bfloat16, quantized=quantized, seed=0)
    weights = WeightBuilder(config, source, CPU, torch.bfloat16, keep_quantized=quantized).model()
    assert isinstance(weights.layers[0].attention.o, QuantizedWeight) == quantized
    assert weight_bytes(config, dtype="bfloat16", quantized=quantized).total == stored_bytes(weights)
    if not quantized:
        fp32 = dummy_model(config).weights
        assert weight_bytes(config, dtype="float32", quantized=False).total == stored_bytes(fp32)


def test_size_of_the_real_v32() -> None:
    values = hf_config(
        "v32",
        hidden_size=7168,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        vocab_size=129280,
        num_hidden_layers=61,
        first_k_dense_replace=3,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        num_attention_heads=128,
        q_lora_rank=1536,
        index_n_heads=64,
        index_topk=2048,
    )
    size = weight_bytes(ModelConfig.from_hf_dict(values), dtype="bfloat16", quantized=True)
    # 671B parameters without the MTP layer, and the indexers.
    assert size.num_parameters == pytest.approx(671.9e9, rel=2e-3)
    assert size.by_component["experts"] == pytest.approx(58 * 256 * 3 * 2048 * 7168, rel=1e-3)

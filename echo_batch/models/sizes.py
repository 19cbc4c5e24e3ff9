"""Bytes that a model's weights take once loaded, from its config alone. No torch."""

from dataclasses import dataclass
from typing import Literal

from echo_batch.models.config import ModelConfig
from echo_batch.models.tensors import Component, TensorSpec, expected_tensors

QUANT_BLOCK = 128


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of each component; `num_parameters` counts the values of the checkpoint."""

    by_component: dict[Component, int]
    num_parameters: int

    @property
    def total(self) -> int:
        return sum(self.by_component.values())


def weight_bytes(config: ModelConfig, *, dtype: Literal["float32", "bfloat16"], quantized: bool) -> WeightBytes:
    """Bytes of the loaded weights in compute dtype `dtype`; `quantized`: linears stay in fp8 with block scales.

    Assumes sizes that are whole numbers of 128-blocks where matrices are merged, as those of all released models are.
    """
    dtype_bytes = 4 if dtype == "float32" else 2
    by_component: dict[Component, int] = {}
    num_parameters = 0
    for spec in expected_tensors(config):
        size = _tensor_bytes(spec, dtype_bytes, quantized)
        by_component[spec.component] = by_component.get(spec.component, 0) + size
        num_parameters += spec.num_elements
    return WeightBytes(by_component, num_parameters)


def _tensor_bytes(spec: TensorSpec, dtype_bytes: int, quantized: bool) -> int:
    if spec.role == "fp32":
        return 4 * spec.num_elements
    # kv_b is split per head, which cuts through blocks: it is kept dequantized.
    if spec.role == "linear" and quantized and not spec.name.endswith("kv_b_proj.weight"):
        row_blocks, column_blocks = (-(-size // QUANT_BLOCK) for size in spec.shape)
        return spec.num_elements + 4 * row_blocks * column_blocks
    return dtype_bytes * spec.num_elements


def prefill_flops(config: ModelConfig, start: int, end: int) -> float:
    """Floating-point operations of prefilling positions start..end of a prompt: GEMMs, index scores and attention.

    Two for a multiply and add; routed experts as often as they are chosen; MLA absorbed, over min(index_topk, past)
    tokens. Embedding, output head and whatever is not a product of matrices are left out.
    """
    linear = 0.0
    for spec in expected_tensors(config):
        if spec.role == "fp32" or spec.component == "embedding":
            continue
        share = config.num_experts_per_tok / config.n_routed_experts if spec.component == "experts" else 1.0
        linear += share * spec.num_elements
    tokens = end - start
    seen = (start + 1 + end) * tokens / 2
    k = config.index_topk
    short = max(0, min(end, k) - start)
    attended = short * (start + 1 + min(end, k)) / 2 + (tokens - short) * k
    latent = config.num_attention_heads * (2 * config.kv_lora_rank + config.qk_rope_head_dim)
    indexer = config.index_n_heads * config.index_head_dim
    return 2 * (linear * tokens + config.num_layers * latent * attended + len(config.group_layers) * indexer * seen)

"""DeepSeek sparse attention around the cache: what comes before (projections, indexer) and after it (output).

Equations: spec sections 3.1, 3.3 and 3.5. Knows no cache, no batch, no selection.
"""

from typing import NamedTuple

from torch import Tensor

from echo_batch.kernels.activation import Activation, quantization_for
from echo_batch.kernels.formats import IndexFormat, RowFormat
from echo_batch.kernels.ops import Ops
from echo_batch.models.config import ModelConfig
from echo_batch.models.layers import AttentionWeights

INDEX_KEY_NORM_EPS = 1e-6
"""Of the indexer's LayerNorm, whatever rms_norm_eps is (spec section 1)."""


class AttentionInputs(NamedTuple):
    """What one layer hands to cache and attention for T new tokens. The index fields are None on shared layers."""

    query: Tensor
    """[T, H, 576] in the compute dtype: absorbed latent part, then rope part, as in a KV row"""
    kv_row: Tensor
    """uint8 [T, row_bytes]"""
    index_query: Tensor | None
    """[T, Hi, 128]: e4m3, or fp32 when the index format is fp32"""
    index_weights: Tensor | None
    """fp32 [T, Hi]: head weights with both constants and the query scale folded in"""
    index_key: Tensor | None
    """uint8 [T, index row_bytes]"""


class Angles(NamedTuple):
    """RoPE angles of some positions: MLA and indexer share their frequencies, so they are made once a step."""

    cos: Tensor
    sin: Tensor
    """fp32 [T, 32]"""


def attention_inputs(
    ops: Ops,
    config: ModelConfig,
    weights: AttentionWeights,
    normed: Activation,
    angles: Angles,
    row_format: RowFormat,
    index_format: IndexFormat,
) -> AttentionInputs:
    """normed [T, D] (after input_layernorm) -> AttentionInputs."""
    indexer = weights.indexer
    first = ops.latent_inputs(
        ops.linear(normed, weights.fused_a),
        angles.cos,
        angles.sin,
        weights.q_a_norm,
        weights.kv_a_norm,
        None if indexer is None else indexer.k_norm,
        None if indexer is None else indexer.k_norm_bias,
        eps=config.latent_rms_norm_eps,
        key_eps=INDEX_KEY_NORM_EPS,
        interleaved=config.rope.interleaved,
        index_interleaved=config.index_rope.interleaved,
        row_format=row_format,
        index_format=index_format,
        ue8m0=quantization_for(weights.q_b),
    )
    absorbed, index_query, index_weights = ops.attention_queries(
        ops.linear(first.query, weights.q_b),
        weights.key_up,
        angles.cos,
        angles.sin,
        None if indexer is None else ops.linear_fp32_parts(normed.values, indexer.weights_proj),
        num_index_heads=config.index_n_heads,
        interleaved=config.rope.interleaved,
        index_interleaved=config.index_rope.interleaved,
        index_format=index_format,
    )
    return AttentionInputs(absorbed, first.kv_row, index_query, index_weights, first.index_key)


def attention_output(ops: Ops, weights: AttentionWeights, latent: Tensor) -> Tensor:
    """Attended latent [T, H, 512] -> per-head values -> output projection [T, D]."""
    return ops.linear(ops.head_values(latent, weights.value_up, quantization_for(weights.o)), weights.o)

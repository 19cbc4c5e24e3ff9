"""DeepSeek sparse attention around the cache: what comes before (projections, indexer) and after it (output).

Equations: spec sections 3.1, 3.3 and 3.5. Knows no cache, no batch, no selection.
"""

from typing import NamedTuple

from torch import Tensor

from echo_batch.kernels.activation import Activation, quantization_for
from echo_batch.kernels.formats import IndexFormat, RowFormat
from echo_batch.kernels.ops import Ops
from echo_batch.kernels.parts import Result
from echo_batch.kernels.reference.fused import LatentInputs
from echo_batch.kernels.weights import rows_of
from echo_batch.models.config import ModelConfig
from echo_batch.models.layers import AttentionWeights

INDEX_KEY_NORM_EPS = 1e-6
"""Of the indexer's LayerNorm, whatever rms_norm_eps is (spec section 1)."""


class Projected(NamedTuple):
    """What one layer makes of T new tokens before any query: what the cache keeps, and what queries are made of."""

    latents: LatentInputs
    """query rank, KV rows, index keys"""
    head_logits: Tensor | None
    """parts fp32 [S, T, Hi] of the indexer's head weights; None on layers without an indexer"""


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


def project(
    ops: Ops,
    config: ModelConfig,
    weights: AttentionWeights,
    normed: Activation,
    angles: Angles,
    row_format: RowFormat,
    index_format: IndexFormat,
) -> Projected:
    """normed [T, D] (after input_layernorm) -> Projected."""
    indexer, head_logits = weights.indexer, None
    if indexer is None:
        first = ops.linear_parts(normed, weights.fused_a)
    else:
        first, head_logits = ops.linear_pair(normed, weights.fused_a, indexer.weights_proj)
    latents = ops.latent_inputs(
        first,
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
    return Projected(latents, head_logits)


def all_queries(
    ops: Ops,
    config: ModelConfig,
    weights: AttentionWeights,
    projected: Projected,
    angles: Angles,
    index_format: IndexFormat,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Queries of attention and, on layers that select, of the indexer with its head weights: one product for both."""
    query = ops.linear(projected.latents.query, weights.q_b)
    return _queries(ops, config, weights, query, projected.head_logits, angles, index_format)


def project_query(ops: Ops, weights: AttentionWeights, projected: Projected, angles: Angles) -> Tensor:
    """Attention's query before rotation and absorption, [T, H * (nope + rope)]."""
    return ops.linear(projected.latents.query, rows_of(weights.q_b, 0, _query_columns(weights, angles)))


def absorb_query(
    ops: Ops, config: ModelConfig, weights: AttentionWeights, query: Tensor, angles: Angles, index_format: IndexFormat
) -> Tensor:
    """What `project_query` made -> attention's query [T, H, 576]."""
    return _queries(ops, config, weights, query, None, angles, index_format)[0]


def index_query(
    ops: Ops,
    config: ModelConfig,
    weights: AttentionWeights,
    projected: Projected,
    angles: Angles,
    index_format: IndexFormat,
) -> tuple[Tensor, Tensor]:
    """The indexer's query [T, Hi, 128] and head weights fp32 [T, Hi] alone, of a layer that selects."""
    assert projected.head_logits is not None
    own = rows_of(weights.q_b, _query_columns(weights, angles), weights.q_b.shape[0])
    return ops.index_query(
        ops.linear(projected.latents.query, own).unflatten(1, (config.index_n_heads, -1)),
        angles.cos,
        angles.sin,
        projected.head_logits,
        interleaved=config.index_rope.interleaved,
        index_format=index_format,
    )


def _query_columns(weights: AttentionWeights, angles: Angles) -> int:
    """Outputs of q_b that are attention's; the indexer's come behind them."""
    num_heads, nope = weights.key_up.shape[:2]
    return num_heads * (nope + 2 * angles.cos.shape[1])


def _queries(
    ops: Ops,
    config: ModelConfig,
    weights: AttentionWeights,
    query: Tensor,
    head_logits: Tensor | None,
    angles: Angles,
    index_format: IndexFormat,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return ops.attention_queries(
        query,
        weights.key_up,
        angles.cos,
        angles.sin,
        head_logits,
        num_index_heads=config.index_n_heads,
        interleaved=config.rope.interleaved,
        index_interleaved=config.index_rope.interleaved,
        index_format=index_format,
    )


def attention_output(ops: Ops, weights: AttentionWeights, latent: Tensor) -> Result:
    """Attended latent [T, H, 512] -> per-head values -> output projection [T, D], added up or not."""
    return ops.linear_parts(ops.head_values(latent, weights.value_up, quantization_for(weights.o)), weights.o)

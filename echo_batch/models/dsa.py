"""DeepSeek sparse attention around the cache: what comes before (projections, indexer) and after it (output).

Equations: spec sections 3.1, 3.3 and 3.5. Knows no cache, no batch, no selection.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from echo_batch.kernels.formats import IndexFormat, RowFormat
from echo_batch.kernels.ops import Ops
from echo_batch.models.config import ModelConfig
from echo_batch.models.layers import AttentionWeights, IndexerWeights

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


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConstants:
    """Constant tensors and formats that all layers share."""

    inverse_frequencies: Tensor
    """fp32 [32]; MLA and indexer have the same ones"""
    hadamard: Tensor
    """+-1, fp32 [128, 128]"""
    row_format: RowFormat
    index_format: IndexFormat


def attention_inputs(
    ops: Ops,
    config: ModelConfig,
    constants: AttentionConstants,
    weights: AttentionWeights,
    normed: Tensor,
    positions: Tensor,
) -> AttentionInputs:
    """normed [T, D] (after input_layernorm), positions int [T] -> AttentionInputs."""
    num_tokens, heads = normed.shape[0], config.num_attention_heads
    nope, rope, latent = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
    cos, sin = ops.rope_angles(positions, constants.inverse_frequencies)

    index_dim = 0 if weights.indexer is None else config.index_head_dim
    fused = ops.linear(normed, weights.fused_a)
    q_a, index_k, kv_a, k_rope = fused.split((config.q_lora_rank, index_dim, latent, rope), dim=-1)

    q_rank_normed = ops.rms_norm(q_a, weights.q_a_norm, config.latent_rms_norm_eps)
    query = ops.linear(q_rank_normed, weights.q_b).view(num_tokens, heads, nope + rope)
    query_nope, query_rope = query.split((nope, rope), dim=-1)
    query_latent = torch.bmm(query_nope.transpose(0, 1), weights.key_up).transpose(0, 1)
    query_rope = ops.apply_rope(query_rope, cos, sin, config.rope.interleaved)

    kv_latent = ops.rms_norm(kv_a, weights.kv_a_norm, config.latent_rms_norm_eps)
    k_rope = ops.apply_rope(k_rope, cos, sin, config.rope.interleaved)
    kv_row = ops.pack_kv_rows(kv_latent, k_rope, constants.row_format)

    absorbed = torch.cat((query_latent, query_rope), dim=-1)
    if weights.indexer is None:
        return AttentionInputs(absorbed, kv_row, None, None, None)
    index = _index_inputs(ops, config, constants, weights.indexer, normed, q_rank_normed, index_k, cos, sin)
    return AttentionInputs(absorbed, kv_row, *index)


def _index_inputs(
    ops: Ops,
    config: ModelConfig,
    constants: AttentionConstants,
    weights: IndexerWeights,
    normed: Tensor,
    q_rank_normed: Tensor,
    index_k: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Indexer query [T, Hi, 128], head weights fp32 [T, Hi] and packed key uint8 [T, row_bytes]."""
    heads, dim, rope = config.index_n_heads, config.index_head_dim, config.qk_rope_head_dim
    interleaved = config.index_rope.interleaved
    # The rope part comes first here; in MLA it comes last.
    query = ops.linear(q_rank_normed, weights.wq_b).view(-1, heads, dim)
    query = torch.cat((ops.apply_rope(query[..., :rope], cos, sin, interleaved), query[..., rope:]), dim=-1)
    key = ops.layer_norm(index_k, weights.k_norm, weights.k_norm_bias, INDEX_KEY_NORM_EPS)
    key = torch.cat((ops.apply_rope(key[..., :rope], cos, sin, interleaved), key[..., rope:]), dim=-1)
    head_weights = ops.linear_fp32(normed, weights.weights_proj) * (heads**-0.5 * dim**-0.5)
    if constants.index_format.kind == "fp8":
        # Orthogonal, so it changes the rounding only; on both sides or on none.
        query, key = ops.hadamard(query, constants.hadamard), ops.hadamard(key, constants.hadamard)
        query, query_scale = ops.quantize_index_query(query, True)
        head_weights = head_weights * query_scale
    else:
        query = query.float()
    return query, head_weights, ops.pack_index_keys(key, constants.index_format, True)


def attention_output(ops: Ops, weights: AttentionWeights, latent: Tensor) -> Tensor:
    """Attended latent [T, H, 512] -> per-head values -> output projection [T, D]."""
    values = torch.bmm(latent.transpose(0, 1), weights.value_up.transpose(1, 2))
    return ops.linear(values.transpose(0, 1).flatten(1), weights.o)

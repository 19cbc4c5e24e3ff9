"""Reference of the steps between a layer's GEMMs; fast versions run each in one launch.

`ue8m0` None: the result meets plain weights and is not quantized.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from echo_batch.kernels.activation import Activation
from echo_batch.kernels.formats import IndexFormat, RowFormat
from echo_batch.kernels.parts import Parts, Result
from echo_batch.kernels.reference.hadamard import hadamard, hadamard_matrix
from echo_batch.kernels.reference.norm import add_rms_norm, layer_norm, rms_norm
from echo_batch.kernels.reference.parts import add_parts, sum_parts
from echo_batch.kernels.reference.quant import quantize_groups
from echo_batch.kernels.reference.rope import apply_rope
from echo_batch.kernels.reference.rows import pack_index_keys, pack_kv_rows, quantize_index_query


class LatentInputs(NamedTuple):
    """What `latent_inputs` makes of a layer's first projection."""

    query: Activation
    """normed query rank [T, q_rank]"""
    kv_row: Tensor
    """uint8 [T, row_bytes]"""
    index_key: Tensor | None
    """uint8 [T, index row_bytes]; None on layers without an indexer"""


def norm_activation(
    hidden: Tensor,
    delta: Result | None,
    weight: Tensor,
    eps: float,
    ue8m0: bool | None,
    out: Activation | None = None,
) -> tuple[Tensor, Activation]:
    """(hidden [T, D], delta [T, D] | None, weight fp32 [D]) -> (their sum rounded, norm of the fp32 sum).

    `out`: where the norm is to be written, such as the first rows of a batch that others fill too.
    """
    total, normed = add_rms_norm(hidden, None if delta is None else add_parts(delta), weight, eps)
    activation = _activation(normed, ue8m0)
    if out is None:
        return total, activation
    for target, part in zip(out, activation, strict=True):
        if target is not None and part is not None:
            target.copy_(part)
    return total, out


def latent_inputs(
    a: Tensor | Parts,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    key_weight: Tensor | None,
    key_bias: Tensor | None,
    *,
    eps: float,
    key_eps: float,
    interleaved: bool,
    index_interleaved: bool,
    row_format: RowFormat,
    index_format: IndexFormat,
    ue8m0: bool | None,
) -> LatentInputs:
    """After the first projection: norms, rotation and packing (spec sections 3.1, 3.3).

    a [T, q_rank + (128 with an indexer) + 512 + 64]: q_a, index key, latent, rope part. cos, sin fp32 [T, 32];
    q_weight fp32 [q_rank], kv_weight fp32 [512]; key_weight, key_bias fp32 [128] of the index key's LayerNorm, None
    without an indexer.
    """
    has_indexer = key_weight is not None
    index_dim = index_format.head_dim if has_indexer else 0
    widths = (q_weight.shape[0], index_dim, row_format.latent_dim, row_format.rope_dim)
    q_a, index_k, kv_a, k_rope = add_parts(a).split(widths, dim=-1)
    query = rms_norm(q_a, q_weight, eps)
    latent = rms_norm(kv_a, kv_weight, eps)
    kv_row = pack_kv_rows(latent, apply_rope(k_rope, cos, sin, interleaved), row_format)
    index_key = None
    if key_weight is not None:
        assert key_bias is not None
        key = layer_norm(index_k, key_weight, key_bias, key_eps)
        key = _rotate_first(key, cos, sin, index_interleaved)
        if index_format.kind == "fp8":
            key = hadamard(key, hadamard_matrix(index_format.head_dim, key.device))
        index_key = pack_index_keys(key, index_format, True)
    return LatentInputs(_activation(query, ue8m0), kv_row, index_key)


def index_query(
    query: Tensor, cos: Tensor, sin: Tensor, head_logits: Tensor, *, interleaved: bool, index_format: IndexFormat
) -> tuple[Tensor, Tensor]:
    """Indexer query and head weights (spec section 3.3).

    query [T, Hi, 128] as projected, head_logits fp32 [T, Hi] or their parts [S, T, Hi] (`linear_fp32_parts`) -> (e4m3,
    or fp32 with an fp32 index format, [T, Hi, 128]; fp32 [T, Hi] with both constants and the query's scale folded in).
    """
    heads, dim = query.shape[1:]
    head_logits = sum_parts(head_logits)
    query = _rotate_first(query, cos, sin, interleaved)
    weights = head_logits * (heads**-0.5 * dim**-0.5)
    if index_format.kind == "fp32":
        return query.float(), weights
    # The rotation is orthogonal, so it changes the rounding only; on both sides or on none.
    values, scale = quantize_index_query(hadamard(query, hadamard_matrix(dim, query.device)), True)
    return values, weights * scale


def absorbed_query(query: Tensor, key_up: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """query [T, H, nope + rope], key_up [H, nope, 512] -> [T, H, 512 + rope], as in a KV row (spec section 3.5)."""
    nope = key_up.shape[1]
    latent = torch.bmm(query[..., :nope].transpose(0, 1), key_up).transpose(0, 1)
    return torch.cat((latent, apply_rope(query[..., nope:], cos, sin, interleaved)), dim=-1)


def attention_queries(
    projected: Tensor,
    key_up: Tensor,
    cos: Tensor,
    sin: Tensor,
    head_logits: Tensor | None,
    *,
    num_index_heads: int,
    interleaved: bool,
    index_interleaved: bool,
    index_format: IndexFormat,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`absorbed_query` and `index_query` of one projection [T, H * (nope + rope) + Hi * 128], side by side.

    Returns the absorbed query [T, H, 512 + rope], and index query and head weights (None without head_logits; then the
    projection has no columns for the indexer).
    """
    num_heads, nope = key_up.shape[:2]
    split = num_heads * (nope + 2 * cos.shape[1])
    absorbed = absorbed_query(projected[:, :split].unflatten(1, (num_heads, -1)), key_up, cos, sin, interleaved)
    if head_logits is None:
        return absorbed, None, None
    query = projected[:, split:].unflatten(1, (num_index_heads, -1))
    return absorbed, *index_query(
        query, cos, sin, head_logits, interleaved=index_interleaved, index_format=index_format
    )


def head_values(latent: Tensor, value_up: Tensor, ue8m0: bool | None) -> Activation:
    """Attended latent [T, H, 512], value_up [H, v, 512] -> the heads' values side by side [T, H * v], rounded to the
    compute dtype; with `ue8m0` not None also quantized.
    """
    values = torch.bmm(latent.transpose(0, 1), value_up.transpose(1, 2)).transpose(0, 1)
    return _activation(values.flatten(1), ue8m0)


def _rotate_first(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """RoPE on the first dimensions: in the indexer the rope part stands first, in MLA last."""
    rope = 2 * cos.shape[-1]
    return torch.cat((apply_rope(x[..., :rope], cos, sin, interleaved), x[..., rope:]), dim=-1)


def _activation(values: Tensor, ue8m0: bool | None) -> Activation:
    if ue8m0 is None:
        return Activation(values)
    return Activation(values, *quantize_groups(values, ue8m0=ue8m0))

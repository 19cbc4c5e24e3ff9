"""Reference sparse multi-latent attention in its absorbed (multi-query) form (spec section 3.5)."""

import torch
from torch import Tensor

from echo_batch.kernels.formats import RowFormat
from echo_batch.kernels.reference.rows import unpack_kv_values
from echo_batch.kernels.reference.slices import row_slices


def sparse_mla(query: Tensor, rows: Tensor, indices: Tensor, softmax_scale: float, fmt: RowFormat) -> Tensor:
    """Attention of each token over its own list of KV rows.

    query [T, H, 576] (absorbed latent 512, then rope 64), rows uint8 [N, row_bytes], indices int32 [T, k] (-1 = none;
    any other value must be a row) -> [T, H, 512] in query's dtype. Rows that are not selected are never looked at; a
    token with no valid index gets zeros. Scores and softmax in fp32.
    """
    num_tokens, num_heads, _ = query.shape
    out = torch.zeros(num_tokens, num_heads, fmt.latent_dim, dtype=query.dtype, device=query.device)
    valid_columns = (indices != -1).any(0).nonzero()
    if valid_columns.numel() == 0:
        return out
    indices = indices[:, : int(valid_columns[-1]) + 1]
    width = indices.shape[1]
    row_dim = fmt.latent_dim + fmt.rope_dim
    # Many reads of few rows: unpack each row once. Few reads of many rows: gather the packed bytes, then unpack.
    unpack_first = num_tokens * width >= rows.shape[0]
    table = unpack_kv_values(rows, fmt) if unpack_first else rows
    for part in row_slices(num_tokens, width * row_dim, query.device):
        missing = indices[part] == -1
        picked = table.index_select(0, indices[part].clamp(min=0).flatten())
        values = (picked if unpack_first else unpack_kv_values(picked, fmt)).view(-1, width, row_dim)
        if bool(missing.any()):
            # Not just masked scores: 0 * NaN of a foreign row would reach the output through the weighted sum.
            values.masked_fill_(missing.unsqueeze(-1), 0.0)
        scores = torch.bmm(query[part].float(), values.transpose(1, 2)).mul_(softmax_scale)
        scores.masked_fill_(missing.unsqueeze(1), float("-inf"))
        weights = scores.softmax(-1).masked_fill_(missing.all(1)[:, None, None], 0.0)
        out[part] = torch.bmm(weights, values[..., : fmt.latent_dim]).to(query.dtype)
    return out

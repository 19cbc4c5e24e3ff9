"""Reference indexer scores (spec section 3.3).

I[t, u] = key_scale[u] * sum_h weight[t, h] * relu(query[t, h] . key[u]).
"""

import torch
from torch import Tensor

from echo_batch.kernels.formats import BLOCK_SIZE, IndexFormat
from echo_batch.kernels.reference.rows import read_index_keys, unpack_index_keys
from echo_batch.kernels.reference.slices import row_slices

_KEYS_PER_TILE = 1024
"""Keys scored at once: the per-head products of a tile stay in a CPU's cache."""


def _scores(query: Tensor, weights: Tensor, values: Tensor, scale: Tensor | None) -> Tensor:
    """query fp32 [T, Hi, 128], weights fp32 [T, Hi], values fp32 [S, 128], scale fp32 [S] | None -> fp32 [T, S]."""
    num_tokens, num_heads, head_dim = query.shape
    dots = (query.reshape(-1, head_dim) @ values.T).relu_().view(num_tokens, num_heads, -1)
    scores = torch.bmm(weights.unsqueeze(1), dots).squeeze(1)
    return scores if scale is None else scores.mul_(scale)


def index_schedule(seq_lens: Tensor) -> Tensor | None:
    """What fast versions of `index_scores_paged` compute of seq_lens (int32 [B]) once a step; None: nothing."""
    return None


def index_scores_paged(
    query: Tensor,
    weights: Tensor,
    pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt: IndexFormat,
    schedule: Tensor | None = None,
) -> Tensor:
    """Decode: score every cached token of each row.

    query [B, Hi, 128] (fp32, or e4m3 with its scale folded into weights), weights fp32 [B, Hi], pages uint8
    [num_blocks, page_bytes], block_table int32 [B, max_blocks] (-1 padded), seq_lens int32 [B] (0: nothing to score)
    -> fp32 [B, max_blocks * 64], -inf at and past seq_lens. `schedule` comes from `index_schedule` and changes nothing.
    """
    num_rows, max_blocks = block_table.shape
    scores = torch.full((num_rows, max_blocks * BLOCK_SIZE), float("-inf"), device=query.device)
    # One row at a time: a row's scores then do not depend on the rest of the batch, to the last bit.
    for row, length in enumerate(seq_lens.tolist()):
        if length == 0:
            continue
        positions = torch.arange(length, device=query.device)
        slots = block_table[row, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        values, scale = unpack_index_keys(read_index_keys(pages, slots, fmt), fmt)
        scores[row, :length] = _scores(query[row : row + 1].float(), weights[row : row + 1], values, scale)[0]
    return scores


def index_scores_contiguous(query: Tensor, weights: Tensor, keys: Tensor, row_ends: Tensor, fmt: IndexFormat) -> Tensor:
    """Prefill: score the keys before row_ends[t] for each token t.

    query [T, Hi, 128] (fp32, or e4m3 with its scale folded into weights), weights fp32 [T, Hi], keys uint8
    [S, row_bytes] (rows past every row_end are never looked at), row_ends int32 [T] -> fp32 [T, S], -inf at and past
    row_ends.
    """
    num_tokens, num_heads, _ = query.shape
    scores = torch.full((num_tokens, keys.shape[0]), float("-inf"), device=query.device)
    if num_tokens == 0:
        return scores
    values, scale = unpack_index_keys(keys[: int(row_ends.max())], fmt)
    positions = torch.arange(values.shape[0], device=query.device)
    for part in row_slices(num_tokens, num_heads * min(_KEYS_PER_TILE, values.shape[0]), query.device):
        part_query, part_weights = query[part].float(), weights[part]
        part_ends = row_ends[part]
        longest = int(part_ends.max())
        for start in range(0, longest, _KEYS_PER_TILE):
            tile = slice(start, min(start + _KEYS_PER_TILE, longest))
            tile_scores = _scores(part_query, part_weights, values[tile], None if scale is None else scale[tile])
            scores[part, tile] = tile_scores.masked_fill_(positions[tile] >= part_ends.unsqueeze(1), float("-inf"))
    return scores

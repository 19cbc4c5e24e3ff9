"""Reference selection for many rows at once (prefill): `topk_positions` into the rows of a larger tensor."""

import torch
from torch import Tensor

from echo_batch.kernels.reference.topk import topk_positions


def topk_rows(scores: Tensor, lengths: Tensor, out: Tensor, *, first: int = 0) -> Tensor:
    """Fill `out` with the positions that `topk_positions` selects, each plus `first`; padding stays -1.

    scores fp32 [T, S], lengths int32 [T], out int32 [T, k] -> kth fp32 [T], as that of `topk_positions`.
    """
    positions, kth = topk_positions(scores, lengths, out.shape[1])
    out.copy_(positions if first == 0 else torch.where(positions >= 0, positions + first, -1))
    return kth

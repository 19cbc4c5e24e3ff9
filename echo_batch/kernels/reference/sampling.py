"""Sampler: logits to next tokens. The reference is plain torch in fp32 and the CPU backend.

Every random number is Philox-4x32-10 of (seed, row id, position, token id): a row's tokens never depend on the batch
that it runs in, on the order of rows or on how often the job was restarted.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_PHILOX_KEY = (0x9E3779B9, 0xBB67AE85)
_PHILOX_MUL = (0xD2511F53, 0xCD9E8D57)
_MASK32 = 0xFFFFFFFF


class SamplingTensors(NamedTuple):
    """Sampling parameters of a batch, one value a row, all `[B]`.

    temperature fp32 (0: greedy), top_p fp32 (1: off), top_k int32 (0: off), min_p fp32 (0: off), seed int64, row_id
    int64, position int32 (absolute position of the token to be sampled).
    """

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    seed: Tensor
    row_id: Tensor
    position: Tensor


def _mul_hi_lo(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the 64-bit product of a constant and uint32 values held in int64 tensors."""
    # int64 would overflow on the full product: split b into 16-bit halves.
    low = a * (b & 0xFFFF)
    high = a * (b >> 16)
    lo = (low + ((high & 0xFFFF) << 16)) & _MASK32
    carry = (low >> 16) + (high & 0xFFFF)
    hi = ((high >> 16) + (carry >> 16)) & _MASK32
    return hi, lo


def philox(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox-4x32-10 block function (Salmon et al., SC'11) on broadcastable int64 tensors holding uint32 values.

    `seed` int64 gives the two key words. Returns four tensors of uint32 values in int64.
    """
    k0, k1 = seed & _MASK32, (seed >> 32) & _MASK32
    for _ in range(10):
        hi0, lo0 = _mul_hi_lo(_PHILOX_MUL[0], c0)
        hi1, lo1 = _mul_hi_lo(_PHILOX_MUL[1], c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0 = (k0 + _PHILOX_KEY[0]) & _MASK32
        k1 = (k1 + _PHILOX_KEY[1]) & _MASK32
    return c0, c1, c2, c3


def gumbel_noise(params: SamplingTensors, vocab_size: int) -> Tensor:
    """Standard Gumbel noise fp32 `[B, vocab_size]`; token v uses lane v % 4 of counter (v // 4, position, row id)."""
    device = params.seed.device
    quads = torch.arange((vocab_size + 3) // 4, device=device, dtype=torch.int64)[None, :]
    position = params.position.to(torch.int64)[:, None]
    row_lo = (params.row_id & _MASK32)[:, None]
    row_hi = ((params.row_id >> 32) & _MASK32)[:, None]
    words = torch.stack(torch.broadcast_tensors(*philox(params.seed[:, None], quads, position, row_lo, row_hi)), dim=-1)
    words = words.flatten(1)[:, :vocab_size]
    # 23 random bits at the centre of their interval, exact in fp32: u is never 0 or 1, both logarithms are finite.
    uniform = ((words >> 9).to(torch.float32) + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def filter_logits(logits: Tensor, params: SamplingTensors) -> Tensor:
    """Scale by temperature, then cut to top-k, then top-p, then min-p; removed tokens get -inf. `[B, V]` fp32.

    Ties are broken by the smaller token id. Top-p keeps the smallest set whose probability (after top-k) reaches
    `top_p`; min-p removes tokens below `min_p` times the largest probability. At least one token remains. Probabilities
    are relative to the largest one and are added up in float64: the fast version sums them in fixed point.
    """
    largest = torch.finfo(torch.float32).max
    scaled = (logits / params.temperature.clamp(min=1e-5)[:, None]).clamp(-largest, largest)
    values, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    rank = torch.arange(values.shape[1], device=values.device)[None, :]
    top_k = torch.where(params.top_k > 0, params.top_k, values.shape[1])[:, None]
    values = values.masked_fill(rank >= top_k, float("-inf"))
    relative = (values - values[:, :1]).exp()
    weights = relative.double()
    total = weights.cumsum(dim=-1)
    # What rounds to top_p in fp32 has reached it: a probability of 0.4 is enough for 0.4.
    below = torch.nextafter(params.top_p, torch.zeros_like(params.top_p))
    limit = (params.top_p.double() + below.double())[:, None] * 0.5
    keep = (total - weights < limit * total[:, -1:]) | (params.top_p[:, None] >= 1)
    keep &= relative >= params.min_p[:, None]
    keep |= rank == 0
    values = values.masked_fill(~keep, float("-inf"))
    return torch.empty_like(scaled).scatter_(1, order, values)


def greedy_sample(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Likeliest token of each row, the smaller id among equals, and whether all its logits are finite.

    logits fp32 `[B, V]` -> int64 `[B]`, bool `[B]`. A row that is not finite gets any token
    of the vocabulary.
    """
    return argmax_first(logits), torch.isfinite(logits).all(dim=-1)


def sample(logits: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
    """Choose one token a row: argmax where temperature is 0, else by the Gumbel-max rule among filtered tokens.

    logits fp32 `[B, V]`, returns int64 `[B]`, and bool `[B]`: all of its logits are finite (a row that is not gets
    any token of the vocabulary). Greedy ties go to the smaller id.
    """
    finite = torch.isfinite(logits).all(dim=-1)
    logits = torch.where(finite[:, None], logits, 0.0)
    noisy = filter_logits(logits, params) + gumbel_noise(params, logits.shape[1])
    return torch.where(params.temperature > 0, argmax_first(noisy), argmax_first(logits)), finite


RUNNING, STOPPED, LENGTH, NON_FINITE, NO_BLOCK = 0, 1, 2, 3, 4
"""Finish codes of a row. NON_FINITE and NO_BLOCK fail the row alone."""


def advance_rows(
    tokens: Tensor,
    finite: Tensor,
    has_block: Tensor,
    *,
    token_ids: Tensor,
    positions: Tensor,
    active: Tensor,
    stop_ids: Tensor,
    last_position: Tensor,
) -> tuple[Tensor, Tensor]:
    """Feed the sampled tokens back and find the rows that have finished.

    tokens int64, finite bool (of the row's logits) and has_block bool (for the step's own token), all `[B]`. The state,
    changed in place for active rows: token_ids int64, positions int32 (of the last known token; plus one), active bool
    (cleared at the end of a row). stop_ids int64 `[B, S]`, last_position int32 `[B]`. Returns what the host is told:
    tokens int64 `[B]` (-1: inactive) and finish codes int32 `[B]`.
    """
    next_positions = positions + 1
    codes = torch.where(next_positions >= last_position, LENGTH, torch.zeros_like(positions))
    codes = torch.where((tokens[:, None] == stop_ids).any(dim=1), STOPPED, codes)
    codes = torch.where(finite, codes, NON_FINITE)
    codes = torch.where(has_block, codes, NO_BLOCK)
    told = torch.where(active, tokens, -1), torch.where(active, codes, RUNNING).to(torch.int32)
    token_ids.copy_(torch.where(active, tokens, token_ids))
    positions.copy_(torch.where(active, next_positions, positions))
    active.logical_and_(codes == RUNNING)
    return told


def argmax_first(values: Tensor) -> Tensor:
    """Index of the largest value of each row, the first one among equals. `[B, V]` -> int64 `[B]`."""
    largest = values.amax(dim=-1, keepdim=True)
    positions = torch.arange(values.shape[1], device=values.device)[None, :]
    # A row of NaN has no position equal to its maximum: keep the result in range, the caller flags such rows.
    return positions.where(values == largest, values.shape[1] - 1).amin(dim=-1)


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities before temperature and filters.

    logits fp32 `[B, V]`, tokens int64 `[B]`; returns (chosen fp32 `[B]`, top values fp32 `[B, num_top]`, top ids int64
    `[B, num_top]`), likeliest first, ties by the smaller id.
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    values, ids = torch.sort(logprobs, dim=-1, descending=True, stable=True)
    return chosen, values[:, :num_top], ids[:, :num_top]

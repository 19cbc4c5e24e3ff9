"""Greedy sampling and the rows' next state. Contracts: reference/sampling.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from echo_batch.kernels.reference.sampling import LENGTH, NO_BLOCK, NON_FINITE, RUNNING, STOPPED

_CHUNK = 4096


@triton.jit(do_not_specialize=["vocab", "num_chunks"])
def _chunk_kernel(logits_ptr, best_ptr, index_ptr, finite_ptr, vocab, num_chunks, stride, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0), tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = column < vocab
    values = tl.load(logits_ptr + row.to(tl.int64) * stride + column, mask=inside, other=0.0)
    finite = tl.sum(tl.where(inside & ((values - values) != 0.0), 1, 0), 0) == 0
    values = tl.where(inside & (values == values), values, float("-inf"))
    best = tl.max(values, 0)
    index = tl.min(tl.where(values == best, column, vocab - 1), 0)
    at = row * num_chunks + chunk
    tl.store(best_ptr + at, best)
    tl.store(index_ptr + at, index)
    tl.store(finite_ptr + at, finite.to(tl.int32))


@triton.jit(do_not_specialize=["vocab", "num_chunks"])
def _join_kernel(
    best_ptr, index_ptr, finite_ptr, token_ptr, all_finite_ptr, vocab, num_chunks, CHUNKS_P2: tl.constexpr
):
    row = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS_P2)
    inside = chunk < num_chunks
    best = tl.load(best_ptr + row * num_chunks + chunk, mask=inside, other=float("-inf"))
    index = tl.load(index_ptr + row * num_chunks + chunk, mask=inside, other=vocab - 1)
    finite = tl.load(finite_ptr + row * num_chunks + chunk, mask=inside, other=1)
    largest = tl.max(best, 0)
    tl.store(token_ptr + row, tl.min(tl.where(best == largest, index, vocab - 1), 0).to(tl.int64))
    tl.store(all_finite_ptr + row, tl.min(finite, 0) == 1)


def greedy_sample(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits fp32 [B, V] -> likeliest token int64 [B] (smaller id among equals), all finite bool [B]."""
    num_rows, vocab = logits.shape
    num_chunks = triton.cdiv(vocab, _CHUNK)
    device = logits.device
    best = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=device)
    index = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)
    finite = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    all_finite = torch.empty(num_rows, dtype=torch.bool, device=device)
    if num_rows:
        assert logits.stride(1) == 1 and logits.dtype == torch.float32
        _chunk_kernel[(num_rows, num_chunks)](
            logits, best, index, finite, vocab, num_chunks, logits.stride(0), CHUNK=_CHUNK, num_warps=8
        )
        _join_kernel[(num_rows,)](
            best,
            index,
            finite,
            tokens,
            all_finite,
            vocab,
            num_chunks,
            CHUNKS_P2=triton.next_power_of_2(num_chunks),
            num_warps=1,
        )
    return tokens, all_finite


@triton.jit
def _advance_kernel(
    tokens_ptr,
    finite_ptr,
    has_block_ptr,
    token_ids_ptr,
    positions_ptr,
    active_ptr,
    stop_ids_ptr,
    last_position_ptr,
    told_ptr,
    codes_ptr,
    num_stops,
    STOPS_P2: tl.constexpr,
    IS_RUNNING: tl.constexpr,
    IS_STOPPED: tl.constexpr,
    IS_LENGTH: tl.constexpr,
    IS_NON_FINITE: tl.constexpr,
    IS_NO_BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    token = tl.load(tokens_ptr + row)
    position = tl.load(positions_ptr + row)
    active = tl.load(active_ptr + row) != 0
    stop = tl.arange(0, STOPS_P2)
    stops = tl.load(stop_ids_ptr + row * num_stops + stop, mask=stop < num_stops, other=-1)
    is_stop = tl.max(tl.where((stops == token) & (stop < num_stops), 1, 0), 0) == 1
    code = tl.where(position + 1 >= tl.load(last_position_ptr + row), IS_LENGTH, IS_RUNNING)
    code = tl.where(is_stop, IS_STOPPED, code)
    code = tl.where(tl.load(finite_ptr + row) != 0, code, IS_NON_FINITE)
    code = tl.where(tl.load(has_block_ptr + row) != 0, code, IS_NO_BLOCK)
    tl.store(told_ptr + row, tl.where(active, token, -1))
    tl.store(codes_ptr + row, tl.where(active, code, IS_RUNNING))
    if active:
        tl.store(token_ids_ptr + row, token)
        tl.store(positions_ptr + row, position + 1)
        tl.store(active_ptr + row, code == IS_RUNNING)


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
    """As reference.sampling.advance_rows: the state changes in place; returns tokens int64 [B] and codes int32 [B]."""
    num_rows, num_stops = stop_ids.shape
    told = torch.empty(num_rows, dtype=torch.int64, device=tokens.device)
    codes = torch.empty(num_rows, dtype=torch.int32, device=tokens.device)
    if num_rows:
        assert stop_ids.is_contiguous()
        _advance_kernel[(num_rows,)](
            tokens,
            finite,
            has_block,
            token_ids,
            positions,
            active,
            stop_ids,
            last_position,
            told,
            codes,
            num_stops,
            STOPS_P2=triton.next_power_of_2(num_stops),
            IS_RUNNING=RUNNING,
            IS_STOPPED=STOPPED,
            IS_LENGTH=LENGTH,
            IS_NON_FINITE=NON_FINITE,
            IS_NO_BLOCK=NO_BLOCK,
            num_warps=1,
        )
    return told, codes

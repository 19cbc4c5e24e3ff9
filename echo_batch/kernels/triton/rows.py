# mypy: allow-untyped-defs, allow-incomplete-defs
"""Packing of KV rows and index keys in Triton, bitwise equal to reference.rows; layouts in kernels/formats.py.

The wide elements of a packed row (fp32 scales, bf16 rope) are stored through pointers of their own type: every part of
a row starts on a multiple of its element size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from echo_batch.kernels.formats import BLOCK_SIZE, IndexFormat, RowFormat
from echo_batch.kernels.triton.quant import group_scale, quantize_last, to_fp8


@triton.jit
def store_kv_row(row_ptr, latent, rope, valid, FORMAT: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr):
    """Store fp32 latent [LATENT] and rope [ROPE] as one packed row at row_ptr (uint8). FORMAT: fp8, bf16 or fp32."""
    column = tl.arange(0, LATENT)
    rope_column = tl.arange(0, ROPE)
    if FORMAT == "fp8":
        grouped = tl.reshape(latent, (LATENT // 128, 128))
        scale = group_scale(tl.max(tl.abs(grouped), 1), False)
        values = to_fp8(grouped, tl.broadcast_to(scale[:, None], grouped.shape), False)
        as_bytes = tl.reshape(values, (LATENT,)).to(tl.uint8, bitcast=True)
        tl.store(row_ptr + column, as_bytes, mask=column < tl.where(valid, LATENT, 0))
        group = tl.arange(0, LATENT // 128)
        scale_ptr = (row_ptr + LATENT).to(tl.pointer_type(tl.float32))
        tl.store(scale_ptr + group, scale, mask=group < tl.where(valid, LATENT // 128, 0))
        rope_ptr = (row_ptr + LATENT + 4 * (LATENT // 128)).to(tl.pointer_type(tl.bfloat16))
        tl.store(rope_ptr + rope_column, rope.to(tl.bfloat16), mask=rope_column < tl.where(valid, ROPE, 0))
    elif FORMAT == "bf16":
        typed_ptr = row_ptr.to(tl.pointer_type(tl.bfloat16))
        tl.store(typed_ptr + column, latent.to(tl.bfloat16), mask=column < tl.where(valid, LATENT, 0))
        tl.store(typed_ptr + LATENT + rope_column, rope.to(tl.bfloat16), mask=rope_column < tl.where(valid, ROPE, 0))
    else:
        typed_ptr = row_ptr.to(tl.pointer_type(tl.float32))
        tl.store(typed_ptr + column, latent, mask=column < tl.where(valid, LATENT, 0))
        tl.store(typed_ptr + LATENT + rope_column, rope, mask=rope_column < tl.where(valid, ROPE, 0))


@triton.jit
def _pack_kv_kernel(
    latent_ptr,
    rope_ptr,
    rows_ptr,
    latent_stride,
    rope_stride,
    row_bytes,
    FORMAT: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    latent = tl.load(latent_ptr + token * latent_stride + tl.arange(0, LATENT)).to(tl.float32)
    rope = tl.load(rope_ptr + token * rope_stride + tl.arange(0, ROPE)).to(tl.float32)
    store_kv_row(rows_ptr + token * row_bytes, latent, rope, True, FORMAT, LATENT, ROPE)


def pack_kv_rows(latent: Tensor, rope: Tensor, fmt: RowFormat) -> Tensor:
    """latent [T, 512] (after its norm), rope [T, 64] (rotated) -> uint8 [T, row_bytes]."""
    assert latent.stride(1) == 1 and rope.stride(1) == 1
    rows = torch.empty(latent.shape[0], fmt.row_bytes, dtype=torch.uint8, device=latent.device)
    if rows.shape[0]:
        _pack_kv_kernel[(rows.shape[0],)](
            latent,
            rope,
            rows,
            latent.stride(0),
            rope.stride(0),
            fmt.row_bytes,
            FORMAT=fmt.kind,
            LATENT=fmt.latent_dim,
            ROPE=fmt.rope_dim,
            num_warps=4,
        )
    return rows


@triton.jit
def _dequantize_kernel(
    rows_ptr, out_ptr, num_rows, row_stride, ROWS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (row < num_rows)[:, None]
    column = tl.arange(0, LATENT)[None, :]
    rope_column = tl.arange(0, ROPE)[None, :]
    row_ptrs = rows_ptr + row * row_stride
    values = tl.load(row_ptrs.to(tl.pointer_type(tl.float8e4nv))[:, None] + column, mask=inside, other=0.0)
    scale_ptrs = (row_ptrs + LATENT).to(tl.pointer_type(tl.float32))[:, None]
    scale = tl.load(scale_ptrs + tl.arange(0, LATENT // 128)[None, :], mask=inside, other=0.0)
    latent = tl.reshape(values.to(tl.float32), (ROWS, LATENT // 128, 128)) * scale[:, :, None]
    latent = tl.reshape(latent, (ROWS, LATENT))
    rope_ptrs = (row_ptrs + LATENT + 4 * (LATENT // 128)).to(tl.pointer_type(tl.bfloat16))[:, None] + rope_column
    out_ptrs = out_ptr + row[:, None] * (LATENT + ROPE)
    tl.store(out_ptrs + column, latent.to(tl.bfloat16), mask=inside)
    tl.store(out_ptrs + LATENT + rope_column, tl.load(rope_ptrs, mask=inside), mask=inside)


def dequantize_kv_rows(rows: Tensor, fmt: RowFormat, out: Tensor | None = None) -> Tensor:
    """fp8 rows uint8 [N, row_bytes] -> bf16 [N, 576], latent then rope; into `out` (contiguous) if given."""
    assert fmt.kind == "fp8" and rows.stride(1) == 1
    num_rows, width = rows.shape[0], fmt.latent_dim + fmt.rope_dim
    if out is None:
        out = torch.empty(num_rows, width, dtype=torch.bfloat16, device=rows.device)
    assert out.is_contiguous() and out.shape == (num_rows, width) and out.dtype == torch.bfloat16, out.shape
    if num_rows:
        _dequantize_kernel[(triton.cdiv(num_rows, 8),)](
            rows, out, num_rows, rows.stride(0), ROWS=8, LATENT=fmt.latent_dim, ROPE=fmt.rope_dim, num_warps=4
        )
    return out


def convert_kv_rows(rows: Tensor, fmt: RowFormat, out: Tensor) -> None:
    """As reference.rows.convert_kv_rows, for fp8 rows."""
    dequantize_kv_rows(rows, fmt, out.view(torch.bfloat16))


@triton.jit
def _pack_keys_kernel(
    key_ptr, out_ptr, num_rows, key_stride, row_bytes, UE8M0: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, DIM)
    inside = (row < num_rows)[:, None]
    key = tl.load(key_ptr + row[:, None] * key_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    values, scale = quantize_last(key, UE8M0)
    tl.store(out_ptr + row[:, None] * row_bytes + column[None, :], values.to(tl.uint8, bitcast=True), mask=inside)
    scale_ptr = (out_ptr + row * row_bytes + DIM).to(tl.pointer_type(tl.float32))
    tl.store(scale_ptr, scale, mask=row < num_rows)


def pack_index_keys(key: Tensor, fmt: IndexFormat, ue8m0: bool) -> Tensor:
    """key [T, 128] (rotated, with Hadamard for fp8) -> uint8 [T, row_bytes]: values, then (fp8) one scale."""
    if fmt.kind == "fp32":
        return key.float().contiguous().view(torch.uint8)
    assert key.stride(1) == 1
    num_rows = key.shape[0]
    out = torch.empty(num_rows, fmt.row_bytes, dtype=torch.uint8, device=key.device)
    if num_rows:
        _pack_keys_kernel[(triton.cdiv(num_rows, 4),)](
            key, out, num_rows, key.stride(0), fmt.row_bytes, UE8M0=ue8m0, ROWS=4, DIM=fmt.head_dim, num_warps=4
        )
    return out


@triton.jit
def _quantize_query_kernel(
    x_ptr, values_ptr, scale_ptr, num_rows, UE8M0: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    at = row[:, None] * DIM + tl.arange(0, DIM)[None, :]
    inside = (row < num_rows)[:, None]
    values, scale = quantize_last(tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32), UE8M0)
    tl.store(values_ptr + at, values, mask=inside)
    tl.store(scale_ptr + row, scale, mask=row < num_rows)


def quantize_index_query(query: Tensor, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """query [T, Hi, 128] -> e4m3 [T, Hi, 128] and scales fp32 [T, Hi], one per token and head."""
    query = query.contiguous()
    values = torch.empty(query.shape, dtype=torch.float8_e4m3fn, device=query.device)
    scale = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
    num_rows = scale.numel()
    if num_rows:
        _quantize_query_kernel[(triton.cdiv(num_rows, 16),)](
            query, values, scale, num_rows, UE8M0=ue8m0, ROWS=16, DIM=query.shape[-1], num_warps=4
        )
    return values, scale


@triton.jit
def move_key(
    pages_ptr,
    slot,
    keys_ptr,
    token,
    page_bytes,
    WRITE: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
):
    """One key between its page (values of all slots, then scales of all slots) and its packed row; slot -1: nothing."""
    slot = slot.to(tl.int64)
    row_ptr = keys_ptr + token.to(tl.int64) * (VALUE_BYTES + SCALE_BYTES)
    page_ptr = pages_ptr + (slot // BLOCK) * page_bytes
    value = tl.arange(0, VALUE_BYTES)
    mask = value < tl.where(slot >= 0, VALUE_BYTES, 0)
    in_page = page_ptr + (slot % BLOCK) * VALUE_BYTES + value
    if WRITE:
        tl.store(in_page, tl.load(row_ptr + value, mask=mask), mask=mask)
    else:
        tl.store(row_ptr + value, tl.load(in_page, mask=mask), mask=mask)
    if SCALE_BYTES > 0:
        scale = tl.arange(0, SCALE_BYTES)
        mask = scale < tl.where(slot >= 0, SCALE_BYTES, 0)
        in_page = page_ptr + BLOCK * VALUE_BYTES + (slot % BLOCK) * SCALE_BYTES + scale
        if WRITE:
            tl.store(in_page, tl.load(row_ptr + VALUE_BYTES + scale, mask=mask), mask=mask)
        else:
            tl.store(row_ptr + VALUE_BYTES + scale, tl.load(in_page, mask=mask), mask=mask)


@triton.jit
def _move_keys_kernel(
    pages_ptr,
    slots_ptr,
    keys_ptr,
    page_bytes,
    WRITE: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
):
    token = tl.program_id(0)
    slot = tl.load(slots_ptr + token)
    move_key(pages_ptr, slot, keys_ptr, token, page_bytes, WRITE, BLOCK, VALUE_BYTES, SCALE_BYTES)


def key_bytes(fmt: IndexFormat) -> tuple[int, int]:
    """Bytes of a packed key's values and of its scale."""
    return (fmt.head_dim, 4) if fmt.kind == "fp8" else (4 * fmt.head_dim, 0)


def _move_keys(pages: Tensor, slots: Tensor, keys: Tensor, fmt: IndexFormat, write: bool) -> None:
    assert pages.stride(1) == 1 and keys.is_contiguous() and keys.shape[1] == fmt.row_bytes
    if slots.shape[0]:
        value_bytes, scale_bytes = key_bytes(fmt)
        _move_keys_kernel[(slots.shape[0],)](
            pages,
            slots,
            keys,
            pages.stride(0),
            WRITE=write,
            BLOCK=BLOCK_SIZE,
            VALUE_BYTES=value_bytes,
            SCALE_BYTES=scale_bytes,
            num_warps=1,
        )


def write_index_keys(pages: Tensor, slots: Tensor, keys: Tensor, fmt: IndexFormat) -> None:
    """Write keys uint8 [T, row_bytes] to token slots int32 [T] of pages uint8 [num_blocks, page_bytes], in place.

    Slot -1 writes nothing.
    """
    _move_keys(pages, slots, keys, fmt, write=True)


def read_index_keys(pages: Tensor, slots: Tensor, fmt: IndexFormat) -> Tensor:
    """Keys uint8 [T, row_bytes] of token slots int [T] (all >= 0) from pages uint8 [num_blocks, page_bytes]."""
    keys = torch.empty(slots.shape[0], fmt.row_bytes, dtype=torch.uint8, device=pages.device)
    _move_keys(pages, slots, keys, fmt, write=False)
    return keys

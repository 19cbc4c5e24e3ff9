"""Copies of cache rows between the host and the GPU pool, by GPU kernels that address pinned host memory directly.

Triton versions of copy_rows, write_rows, write_tokens and fill_rows; contracts in kernels/reference/cache_ops.py. Rows
are moved as 32-bit words in 16-byte vectors, so row_bytes must be a multiple of 16. Launch grids depend on shapes only.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from echo_batch.kernels.formats import BLOCK_SIZE, IndexFormat
from echo_batch.kernels.triton.rows import key_bytes, move_key

COPY_PROGRAMS = 256
COPY_ROWS = 4
"""Programs of one copy at most, and the rows that each has in flight: together several times what saturates the link
(264 rows on an H200), as index loads and stores leave gaps."""


def row_words(rows: Tensor) -> tuple[Tensor, int]:
    """`rows` (uint8 [N, row_bytes]) as int32 words, and the words of a row."""
    assert rows.dtype == torch.uint8 and rows.dim() == 2 and rows.is_contiguous(), (rows.dtype, rows.shape)
    assert rows.shape[1] % 16 == 0, rows.shape
    return rows.view(torch.int32), rows.shape[1] // 4


@triton.jit
def load_row(pool, row, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Words of one row. Cached in L2 at most: the row may have been written by another kernel of the same graph."""
    columns = tl.arange(0, BLOCK)
    return tl.load(pool + row.to(tl.int64) * WORDS + columns, mask=columns < WORDS, cache_modifier=".cg")


@triton.jit
def store_row(pool, row, words, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the words of one row; row -1 is skipped."""
    columns = tl.arange(0, BLOCK)
    if row >= 0:
        tl.store(pool + row.to(tl.int64) * WORDS + columns, words, mask=columns < WORDS)


@triton.jit(do_not_specialize=["n"])
def copy_rows_kernel(
    source,
    source_index,
    target,
    target_index,
    count,
    n,
    HAS_SOURCE_INDEX: tl.constexpr,
    HAS_TARGET_INDEX: tl.constexpr,
    HAS_COUNT: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    R: tl.constexpr,
):
    num = n
    if HAS_COUNT:
        num = tl.minimum(n, tl.load(count))
    stride = tl.num_programs(0)
    columns = tl.arange(0, BLOCK)[None, :]
    start = tl.program_id(0)
    while start < num:
        # Neighbouring entries go to different programs, so that few rows are spread too.
        i = start + tl.arange(0, R) * stride
        from_row = i
        to_row = i
        if HAS_SOURCE_INDEX:
            from_row = tl.load(source_index + i, mask=i < num, other=-1)
        if HAS_TARGET_INDEX:
            to_row = tl.load(target_index + i, mask=i < num, other=-1)
        valid = (i < num) & (from_row >= 0) & (to_row >= 0)
        mask = (columns < WORDS) & valid[:, None]
        # Cached in L2 at most, as in load_row.
        words = tl.load(source + from_row.to(tl.int64)[:, None] * WORDS + columns, mask=mask, cache_modifier=".cg")
        tl.store(target + to_row.to(tl.int64)[:, None] * WORDS + columns, words, mask=mask)
        start += R * stride


@triton.jit
def write_rows_kernel(kv_rows, gpu_pool, rows, host_pool, slots, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    words = load_row(kv_rows, i, WORDS, BLOCK)
    store_row(gpu_pool, tl.load(rows + i), words, WORDS, BLOCK)
    store_row(host_pool, tl.load(slots + i), words, WORDS, BLOCK)


@triton.jit
def write_tokens_kernel(
    kv_rows,
    gpu_pool,
    rows,
    host_pool,
    slots,
    keys,
    pages,
    page_bytes,
    HAS_HOST: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
):
    i = tl.program_id(0)
    slot = tl.load(slots + i)
    words = load_row(kv_rows, i, WORDS, BLOCK)
    store_row(gpu_pool, tl.load(rows + i), words, WORDS, BLOCK)
    if HAS_HOST:
        store_row(host_pool, slot, words, WORDS, BLOCK)
    move_key(pages, slot, keys, i, page_bytes, True, PAGE, VALUE_BYTES, SCALE_BYTES)


@triton.jit(do_not_specialize=["n"])
def fill_rows_kernel(target, index, n, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    while i < n:
        poison = tl.full([BLOCK], -1, tl.int32)  # bytes of 0xFF
        store_row(target, tl.load(index + i), poison, WORDS, BLOCK)
        i += tl.num_programs(0)


def copy_rows(
    source: Tensor, source_index: Tensor | None, target: Tensor, target_index: Tensor | None, count: Tensor | None
) -> None:
    """See the reference. Either side may be pinned host memory."""
    source, words = row_words(source.contiguous())
    target, target_words = row_words(target)
    assert words == target_words, (words, target_words)
    index = source_index if source_index is not None else target_index
    n = min(source.shape[0], target.shape[0]) if index is None else index.shape[0]
    if n == 0:
        return
    copy_rows_kernel[(min(n, COPY_PROGRAMS),)](
        source,
        source if source_index is None else source_index,
        target,
        target if target_index is None else target_index,
        source if count is None else count,
        n,
        HAS_SOURCE_INDEX=source_index is not None,
        HAS_TARGET_INDEX=target_index is not None,
        HAS_COUNT=count is not None,
        WORDS=words,
        BLOCK=triton.next_power_of_2(words),
        R=COPY_ROWS,
        num_warps=COPY_ROWS,
    )


def write_rows(kv_rows: Tensor, gpu_rows: Tensor, rows: Tensor, host_rows: Tensor, slots: Tensor) -> None:
    """See the reference."""
    kv_words, words = row_words(kv_rows.contiguous())
    if kv_rows.shape[0] == 0:
        return
    write_rows_kernel[(kv_rows.shape[0],)](
        kv_words,
        row_words(gpu_rows)[0],
        rows,
        row_words(host_rows)[0],
        slots,
        WORDS=words,
        BLOCK=triton.next_power_of_2(words),
        num_warps=1,
    )


def write_tokens(
    kv_rows: Tensor,
    gpu_rows: Tensor,
    rows: Tensor,
    host_rows: Tensor | None,
    slots: Tensor,
    keys: Tensor,
    pages: Tensor,
    fmt: IndexFormat,
) -> None:
    """See the reference. One launch."""
    kv_words, words = row_words(kv_rows.contiguous())
    assert keys.is_contiguous() and keys.shape[1] == fmt.row_bytes and pages.stride(1) == 1, (keys.shape, fmt)
    if kv_rows.shape[0] == 0:
        return
    value_bytes, scale_bytes = key_bytes(fmt)
    write_tokens_kernel[(kv_rows.shape[0],)](
        kv_words,
        row_words(gpu_rows)[0],
        rows,
        kv_words if host_rows is None else row_words(host_rows)[0],
        slots,
        keys,
        pages,
        pages.stride(0),
        HAS_HOST=host_rows is not None,
        WORDS=words,
        BLOCK=triton.next_power_of_2(words),
        PAGE=BLOCK_SIZE,
        VALUE_BYTES=value_bytes,
        SCALE_BYTES=scale_bytes,
        num_warps=1,
    )


def fill_rows(target: Tensor, index: Tensor) -> None:
    """See the reference."""
    target, words = row_words(target)
    n = index.shape[0]
    if n == 0:
        return
    fill_rows_kernel[(min(n, COPY_PROGRAMS),)](
        target, index, n, WORDS=words, BLOCK=triton.next_power_of_2(words), num_warps=1
    )

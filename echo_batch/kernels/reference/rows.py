"""Reference packing of one token's cache rows: the MLA KV row and the indexer key (layouts: kernels/formats.py)."""

import torch
from torch import Tensor

from echo_batch.kernels.formats import BLOCK_SIZE, IndexFormat, RowFormat
from echo_batch.kernels.reference.quant import dequantize_groups, quantize_groups


def pack_kv_rows(latent: Tensor, rope: Tensor, fmt: RowFormat) -> Tensor:
    """latent [T, 512] (after its norm), rope [T, 64] (rotated) -> uint8 [T, row_bytes].

    fp8: latent in groups of 128 with unrounded fp32 scales amax/448 (FlashMLA's layout), rope in bf16.
    """
    if fmt.kind != "fp8":
        dtype = torch.bfloat16 if fmt.kind == "bf16" else torch.float32
        return torch.cat((latent.to(dtype), rope.to(dtype)), -1).view(torch.uint8)
    values, scale = quantize_groups(latent)
    parts = (values.view(torch.uint8), scale.view(torch.uint8), rope.to(torch.bfloat16).contiguous().view(torch.uint8))
    return torch.cat(parts, -1)


def unpack_kv_rows(rows: Tensor, fmt: RowFormat) -> tuple[Tensor, Tensor]:
    """uint8 [N, row_bytes] -> latent fp32 [N, 512], rope fp32 [N, 64]."""
    values = unpack_kv_values(rows, fmt)
    return values[:, : fmt.latent_dim], values[:, fmt.latent_dim :]


def unpack_kv_values(rows: Tensor, fmt: RowFormat) -> Tensor:
    """uint8 [N, row_bytes] -> fp32 [N, 576], latent then rope. A view of `rows` where the format allows it."""
    if fmt.kind == "fp32":
        return rows.view(torch.float32)
    if fmt.kind == "bf16":
        return rows.view(torch.bfloat16).float()
    scale_end = fmt.latent_dim + 4 * (fmt.latent_dim // 128)
    latent = rows[:, : fmt.latent_dim].view(torch.float8_e4m3fn)
    scale = rows[:, fmt.latent_dim : scale_end].contiguous().view(torch.float32)
    rope = rows[:, scale_end:].contiguous().view(torch.bfloat16)
    return torch.cat((dequantize_groups(latent, scale), rope.float()), -1)


def prefill_row_format(fmt: RowFormat) -> RowFormat:
    """The format in which `sparse_mla` reads rows for many tokens at once: that of the cache, or a wider one."""
    return fmt


def convert_kv_rows(rows: Tensor, fmt: RowFormat, out: Tensor) -> None:
    """rows uint8 [N, row_bytes] in `fmt` -> the same values rounded to bf16 in `out`, uint8 [N, bf16's row_bytes]."""
    out.copy_(unpack_kv_values(rows, fmt).to(torch.bfloat16).view(torch.uint8))


def pack_index_keys(key: Tensor, fmt: IndexFormat, ue8m0: bool) -> Tensor:
    """key [T, 128] (rotated; for fp8 also Hadamard) -> uint8 [T, row_bytes]: values, then (fp8 only) one scale."""
    if fmt.kind == "fp32":
        return key.float().contiguous().view(torch.uint8)
    values, scale = quantize_groups(key, group=fmt.head_dim, ue8m0=ue8m0)
    return torch.cat((values.view(torch.uint8), scale.view(torch.uint8)), -1)


def unpack_index_keys(rows: Tensor, fmt: IndexFormat) -> tuple[Tensor, Tensor | None]:
    """uint8 [N, row_bytes] -> values fp32 [N, 128] and their scales fp32 [N] (None for fp32 keys)."""
    if fmt.kind == "fp32":
        return rows.view(torch.float32), None
    values = rows[:, : fmt.head_dim].view(torch.float8_e4m3fn).float()
    return values, rows[:, fmt.head_dim :].contiguous().view(torch.float32).squeeze(-1)


def quantize_index_query(query: Tensor, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """query [T, Hi, 128] -> e4m3 [T, Hi, 128] and scales fp32 [T, Hi], one per token and head."""
    values, scale = quantize_groups(query, group=query.shape[-1], ue8m0=ue8m0)
    return values, scale.squeeze(-1)


def _page_parts(pages: Tensor, fmt: IndexFormat) -> tuple[Tensor, Tensor | None]:
    """Views of pages uint8 [P, page_bytes]: values [P, 64, value_bytes], and (fp8 only) scales [P, 64, 4]."""
    if fmt.kind == "fp32":
        return pages.unflatten(1, (BLOCK_SIZE, fmt.row_bytes)), None
    cut = BLOCK_SIZE * fmt.head_dim
    return pages[:, :cut].unflatten(1, (BLOCK_SIZE, fmt.head_dim)), pages[:, cut:].unflatten(1, (BLOCK_SIZE, 4))


def write_index_keys(pages: Tensor, slots: Tensor, keys: Tensor, fmt: IndexFormat) -> None:
    """Write keys uint8 [T, row_bytes] to token slots int32 [T] of pages uint8 [num_blocks, page_bytes], in place.

    Slot -1 writes nothing. A page holds all its 64 values, then all its 64 scales (DeepGEMM's layout).
    """
    keep = slots >= 0
    slots, keys = slots[keep].long(), keys[keep]
    values, scales = _page_parts(pages, fmt)
    block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    values[block, offset] = keys[:, : values.shape[-1]]
    if scales is not None:
        scales[block, offset] = keys[:, values.shape[-1] :]


def read_index_keys(pages: Tensor, slots: Tensor, fmt: IndexFormat) -> Tensor:
    """Keys uint8 [T, row_bytes] of token slots int32 [T] (all >= 0) from pages uint8 [num_blocks, page_bytes]."""
    values, scales = _page_parts(pages, fmt)
    block, offset = slots.long() // BLOCK_SIZE, slots.long() % BLOCK_SIZE
    if scales is None:
        return values[block, offset]
    return torch.cat((values[block, offset], scales[block, offset]), -1)

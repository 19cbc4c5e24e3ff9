"""FlashMLA (sparse MLA for Hopper and later) behind the contract of reference.attention.sparse_mla."""

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from echo_batch.kernels.formats import BLOCK_SIZE, RowFormat
from echo_batch.kernels.triton.rows import dequantize_kv_rows

_MAX_DECODE_TOKENS = 128
"""More tokens than this are prefill: its kernel reads bf16 rows, which is worth unpacking them once."""
_DECODE_MULTIPLE = 64
_PREFILL_MULTIPLE = 128
"""Lists must be a multiple of this long; the rest is -1."""


def load_flash_mla(device: torch.device) -> "FlashMla | None":
    """FlashMLA if it is installed, loads and has kernels for this GPU's architecture, else None."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    try:
        module = importlib.import_module("flash_mla")
    except (ImportError, OSError, RuntimeError):
        return None
    return FlashMla(module)


class FlashMla:
    """Sparse attention by the loaded module, and the decode schedules it keeps alive for captured graphs."""

    def __init__(self, module: Any) -> None:
        self._module = module
        # Packages with two kernel sets keep Hopper's in the legacy one.
        has_legacy = getattr(module, "has_legacy", None)
        self._options = {"use_legacy": True} if has_legacy is not None and has_legacy() else {}
        self._schedules: dict[tuple[int, int, int], Any] = {}

    def supports(self, query: Tensor, fmt: RowFormat) -> bool:
        """Whether it has kernels for this query [T, H, 576] and row format."""
        return (
            query.dtype == torch.bfloat16
            and query.shape[1] in (64, 128)
            and (fmt.latent_dim, fmt.rope_dim) == (512, 64)
            and fmt.kind in ("fp8", "bf16")
        )

    def sparse_mla(self, query: Tensor, rows: Tensor, indices: Tensor, softmax_scale: float, fmt: RowFormat) -> Tensor:
        """As reference.attention.sparse_mla, for what it `supports`.

        query bf16 [T, H, 576], rows uint8 [N, row_bytes], indices int32 [T, k] -> bf16 [T, H, 512]. fp8 rows are read
        as they are for up to 128 tokens if N is a multiple of 64; otherwise they are unpacked to bf16 first. Decode
        shapes (T, H, k) must run once outside of a graph capture.
        """
        if query.shape[0] == 0:
            return query[..., : fmt.latent_dim]
        is_decode = query.shape[0] <= _MAX_DECODE_TOKENS and rows.shape[0] % BLOCK_SIZE == 0
        if fmt.kind == "fp8" and is_decode:
            return self._decode(query, rows, indices, softmax_scale, fmt)
        values = dequantize_kv_rows(rows, fmt) if fmt.kind == "fp8" else rows.view(torch.bfloat16)
        indices = _padded(indices, _PREFILL_MULTIPLE).unsqueeze(1)
        out: Tensor = self._module.flash_mla_sparse_fwd(
            query.contiguous(), values.unsqueeze(1), indices, softmax_scale, d_v=fmt.latent_dim, **self._options
        )[0]
        return out

    def _decode(self, query: Tensor, rows: Tensor, indices: Tensor, softmax_scale: float, fmt: RowFormat) -> Tensor:
        indices = _padded(indices, _DECODE_MULTIPLE).unsqueeze(1)
        key = (query.shape[0], query.shape[1], indices.shape[2])
        if key not in self._schedules:
            # A schedule first filled under capture would live in that graph's memory pool.
            assert not torch.cuda.is_current_stream_capturing(), f"run {key} once before capturing it"
            self._schedules[key] = self._module.get_mla_metadata()[0]
        out: Tensor = self._module.flash_mla_with_kvcache(
            query.unsqueeze(1),
            rows.view(-1, BLOCK_SIZE, 1, fmt.row_bytes).view(torch.float8_e4m3fn),
            None,
            None,
            fmt.latent_dim,
            self._schedules[key],
            softmax_scale=softmax_scale,
            is_fp8_kvcache=True,
            indices=indices,
            **self._options,
        )[0]
        return out.squeeze(1)


def _padded(indices: Tensor, multiple: int) -> Tensor:
    """indices [T, k] widened with -1 to a multiple."""
    missing = -indices.shape[1] % multiple
    return indices if missing == 0 else F.pad(indices, (0, missing), value=-1)

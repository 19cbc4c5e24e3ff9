"""Byte layouts of one token's cache rows: the MLA KV row and the indexer key row.

Caches move bytes and know none of this; models pack rows, attention and indexer kernels unpack them.
Sources: FlashMLA's fp8 KV layout and DeepGEMM's paged index-key layout.
"""

from dataclasses import dataclass
from typing import Literal

BLOCK_SIZE = 64
"""Token slots in a block: the page of the indexer cache, the unit of allocation."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """MLA KV row: `latent_dim` values, then `rope_dim` values.

    fp8: latent in e4m3, then one fp32 scale per 128 latent values, then the rope part in bf16 (656 B for 512 + 64).
    bf16 and fp32: latent and rope values in that type (1,152 B and 2,304 B for 512 + 64).
    """

    kind: Literal["fp8", "bf16", "fp32"]
    latent_dim: int = 512
    rope_dim: int = 64

    @property
    def row_bytes(self) -> int:
        if self.kind == "fp8":
            return self.latent_dim + 4 * (self.latent_dim // 128) + 2 * self.rope_dim
        return (self.latent_dim + self.rope_dim) * (2 if self.kind == "bf16" else 4)


@dataclass(frozen=True, slots=True)
class IndexFormat:
    """Indexer key: fp8 (`head_dim` e4m3 values and one fp32 scale, 132 B for 128) or fp32 values (512 B).

    A page holds BLOCK_SIZE keys: all their values first, then (fp8 only) all their scales.
    """

    kind: Literal["fp8", "fp32"]
    head_dim: int = 128

    @property
    def row_bytes(self) -> int:
        return self.head_dim + 4 if self.kind == "fp8" else 4 * self.head_dim

    @property
    def page_bytes(self) -> int:
        return BLOCK_SIZE * self.row_bytes

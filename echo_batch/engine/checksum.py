"""A 64-bit number for every row of logits, so that equal bits can be asserted between runs."""

import torch
from torch import Tensor

_SLICE = 1 << 15
"""Vocabulary entries at a time: bounds the int64 temporaries."""


def row_checksums(logits: Tensor) -> Tensor:
    """Checksums int64 `[B]` of logits fp32 `[B, V]`: equal bits give equal numbers, on any device.

    Each value's bits times a pseudo-random odd number of its place, summed modulo 2**64: the order of the sum does not
    matter, and a change of one value always changes the result.
    """
    total = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    for start in range(0, logits.shape[1], _SLICE):
        part = logits[:, start : start + _SLICE].contiguous().view(torch.int32).to(torch.int64)
        places = torch.arange(start, start + part.shape[1], dtype=torch.int64, device=logits.device)
        total += (part * _odd_numbers(places)).sum(dim=1)
    return total


def _odd_numbers(places: Tensor) -> Tensor:
    """The finalizer of SplitMix64 (Steele et al., 2014), made odd."""
    x = places * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return (x ^ _shifted(x, 31)) | 1


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value

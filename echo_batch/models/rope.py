"""Rotation frequencies of a RopeSpec, with YaRN (spec section 3.2)."""

import math

import torch
from torch import Tensor

from echo_batch.models.config import RopeSpec


def yarn_correction_range(spec: RopeSpec) -> tuple[int, int]:
    """First and last pair of the ramp between unscaled and scaled frequencies."""

    def pair_of(num_rotations: float) -> float:
        wavelengths = spec.yarn_original_max_position / (num_rotations * 2 * math.pi)
        return spec.dim * math.log(wavelengths) / (2 * math.log(spec.theta))

    low = max(math.floor(pair_of(spec.yarn_beta_fast)), 0)
    high = min(math.ceil(pair_of(spec.yarn_beta_slow)), spec.dim - 1)
    return low, high


def inverse_frequencies(spec: RopeSpec, device: torch.device) -> Tensor:
    """fp32 [dim/2]: the angle of pair j at position p is p times element j."""
    frequencies = spec.theta ** -(torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim)
    if spec.yarn_factor is not None:
        low, high = yarn_correction_range(spec)
        pairs = torch.arange(spec.dim // 2, dtype=torch.float32)
        ramp = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
        frequencies = frequencies / spec.yarn_factor * ramp + frequencies * (1 - ramp)
    return frequencies.to(device)

"""Rotation frequencies, with YaRN's published numbers (spec section 3.2)."""

import pytest
import torch

from echo_batch.models.config import ModelConfig, RopeSpec
from echo_batch.models.rope import inverse_frequencies, yarn_correction_range
from tests.checkpoints import hf_config

CPU = torch.device("cpu")


def test_plain_frequencies() -> None:
    frequencies = inverse_frequencies(RopeSpec(dim=64, theta=10000.0, interleaved=True), CPU)
    assert frequencies.shape == (32,)
    assert frequencies[0] == 1.0
    assert frequencies[16].item() == pytest.approx(0.01)
    assert frequencies[31].item() == pytest.approx(10000 ** (-62 / 64))


def test_yarn_of_v32() -> None:
    spec = ModelConfig.from_hf_dict(hf_config("v32")).rope
    assert yarn_correction_range(spec) == (10, 23)
    plain = inverse_frequencies(RopeSpec(dim=64, theta=10000.0, interleaved=True), CPU)
    ratio = inverse_frequencies(spec, CPU) / plain
    torch.testing.assert_close(ratio[:11], torch.ones(11))
    torch.testing.assert_close(ratio[23:], torch.full((9,), 1 / 40))
    # In between, a line over the pair's number: 1 - (j - 10) / 13 * (1 - 1/40).
    torch.testing.assert_close(ratio[15].item(), 1 - 5 / 13 * (1 - 1 / 40))

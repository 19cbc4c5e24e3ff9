"""Stages are bounded by a block's shared memory."""

import pytest
import torch

from echo_batch.kernels.triton import stages
from echo_batch.kernels.triton.stages import stages_that_fit


@pytest.mark.parametrize(
    ("kilobytes", "wanted", "bytes_of_one", "expected"),
    [(227, 6, 20480, 6), (163, 6, 20480, 6), (99, 6, 20480, 4), (99, 6, 18432, 5), (48, 6, 40960, 2)],
)
def test_as_many_as_fit(
    kilobytes: int, wanted: int, bytes_of_one: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "_shared_bytes", lambda device: kilobytes * 1024 - 2048)
    assert stages_that_fit(wanted, bytes_of_one, torch.device("cuda")) == expected


def test_the_interpreter_takes_what_is_wanted() -> None:
    assert stages_that_fit(6, 20480, torch.device("cpu")) == 6

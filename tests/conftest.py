"""Fixtures that all tests share."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import checkpoints
from tests.checkpoints import Family, Kind


def pytest_configure() -> None:
    """Triton decides at import whether kernels are interpreted: say so before any test module imports one."""
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family, Kind], Path]:
    """`tiny_checkpoint(family, kind)`: a directory with `model` and its fp32 `oracle`, built once. Read only."""
    built: dict[tuple[Family, Kind], Path] = {}

    def get(family: Family, kind: Kind) -> Path:
        if (family, kind) not in built:
            directory = tmp_path_factory.mktemp(f"{family}-{kind}-")
            built[family, kind] = checkpoints.build(directory, family, kind)
        return built[family, kind]

    return get

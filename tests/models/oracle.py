"""Our fp32 model and transformers' on the two halves of a tiny checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from echo_batch.kernels.ops import reference_ops
from echo_batch.models.config import ModelConfig
from echo_batch.models.loader import load_model
from echo_batch.models.model import Model
from tests.checkpoints import Family, Kind

CheckpointFixture = Callable[[Family, Kind], Path]


def load_fp32(path: Path) -> Model:
    # transformers hard-codes 1e-6 for the latent norms (spec section 3.1).
    config = ModelConfig.from_dir(path, latent_eps=1e-6)
    return load_model(
        config, path, device=torch.device("cpu"), dtype=torch.float32, row_kind="fp32", ops=reference_ops()
    )


def load_oracle(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    model, info = loaded
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model.eval()


def random_ids(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 512, (count,), generator=torch.Generator().manual_seed(seed))

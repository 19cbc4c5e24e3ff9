"""What the benches of whole steps and prompts have in common: the model, the sizes of its cache, what a result says
about where it comes from."""

import time
from dataclasses import dataclass
from typing import Any, Literal

import torch

from echo_batch.bench.workload import expert_slice
from echo_batch.cache.spec import CacheSpec, PrefetchMode
from echo_batch.errors import ConfigError
from echo_batch.kernels.formats import BLOCK_SIZE, IndexFormat, RowFormat
from echo_batch.kernels.ops import Ops
from echo_batch.models.config import ModelConfig
from echo_batch.models.loader import load_model
from echo_batch.models.model import Model
from echo_batch.report.metrics import versions


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which model a bench runs, and how: options of its command by the same names."""

    model: str
    num_layers: int | None
    load_format: Literal["safetensors", "dummy"]
    routing: Literal["uniform", "model"]
    ep_slice: int
    offload: bool
    device: str
    dtype: Literal["bfloat16", "float32"]
    seed: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype == "float32" else torch.bfloat16

    @property
    def row_kind(self) -> Literal["fp8", "bf16", "fp32"]:
        """fp8 rows on GPUs, as jobs have them; on a CPU rows of the compute dtype."""
        if self.dtype == "float32":
            return "fp32"
        return "fp8" if torch.device(self.device).type == "cuda" else "bf16"


def bench_device(name: str) -> torch.device:
    """The device of a bench; raises ConfigError for a GPU that is not there."""
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no NVIDIA GPU that PyTorch can use: give --device cpu, or install a build with CUDA")
    return device


def make_model(options: ModelOptions, config: ModelConfig, ops: Ops) -> tuple[Model, float]:
    """The model on its device, and the seconds that it took; with `ep_slice` it holds one worker's experts only."""
    started = time.perf_counter()
    model = load_model(
        config,
        options.model,
        device=torch.device(options.device),
        dtype=options.torch_dtype,
        row_kind=options.row_kind,
        ops=ops,
        load_format=options.load_format,
        seed=options.seed,
        experts=expert_slice(config, options.ep_slice) if options.ep_slice > 1 else None,
    )
    return model, time.perf_counter() - started


def make_spec(
    options: ModelOptions, config: ModelConfig, *, host_tokens: int, gpu_tokens: int, prefetch: PrefetchMode = "off"
) -> CacheSpec:
    """The cache's sizes, in whole blocks; without offloading the GPU pool is as large as the host pool would be."""
    return CacheSpec(
        group_layers=config.group_layers,
        row_format=RowFormat(options.row_kind, latent_dim=config.kv_lora_rank, rope_dim=config.qk_rope_head_dim),
        index_format=IndexFormat("fp32" if options.dtype == "float32" else "fp8", head_dim=config.index_head_dim),
        index_topk=config.index_topk,
        host_tokens=host_tokens // BLOCK_SIZE * BLOCK_SIZE,
        gpu_tokens=(gpu_tokens if options.offload else host_tokens) // BLOCK_SIZE * BLOCK_SIZE,
        offload=options.offload,
        prefetch=prefetch,
    )


def origin(config: ModelConfig, device: torch.device, load_seconds: float) -> dict[str, Any]:
    """Fields of a result: model, device, versions, seconds of loading."""
    return {
        "model": {"layers": config.num_layers, "architecture": config.architecture},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": versions(),
        "load_s": round(load_seconds, 2),
    }

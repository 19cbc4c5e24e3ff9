"""Random weights from a config alone (`--load-format dummy`): seeded, made on the device, scaled to stay finite."""

import zlib

import torch
from torch import Tensor

from echo_batch.kernels.weights import QuantizedWeight, Weight, block_shape
from echo_batch.models.config import ModelConfig
from echo_batch.models.tensors import TensorSpec, expected_tensors


class DummySource:
    """Tensors named and shaped like a checkpoint's. A tensor depends on the seed and its name only."""

    def __init__(
        self, config: ModelConfig, device: torch.device, *, dtype: torch.dtype, quantized: bool, seed: int
    ) -> None:
        self._specs = {spec.name: spec for spec in expected_tensors(config)}
        self._quant = config.quant if quantized else None
        self._device = device
        self._dtype = dtype
        self._seed = seed
        self._generator = torch.Generator(device)

    def read(self, name: str) -> Weight:
        spec = self._specs[name]
        # The CPU generator looks at 32 bits of its seed only.
        self._generator.manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        if spec.role == "linear" and self._quant is not None:
            # Unit-variance values in e4m3, and one scale for all blocks that brings them to 1/sqrt(in).
            data = self._normal(spec).to(torch.float8_e4m3fn)
            scale = torch.full(block_shape(spec.shape), spec.shape[-1] ** -0.5, device=self._device)
            return QuantizedWeight(data, scale, self._quant.ue8m0)
        if name.endswith("norm.weight"):
            return self._normal(spec).mul_(0.1).add_(1.0)
        if len(spec.shape) == 1:
            return self._normal(spec).mul_(0.1)
        if name == "model.embed_tokens.weight":
            return self._normal(spec)
        return self._normal(spec).mul_(spec.shape[-1] ** -0.5)

    def _normal(self, spec: TensorSpec) -> Tensor:
        dtype = self._dtype if spec.role != "fp32" else torch.float32
        return torch.randn(spec.shape, generator=self._generator, dtype=dtype, device=self._device)

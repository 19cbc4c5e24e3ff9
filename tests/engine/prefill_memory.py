"""How many bytes a prefill of a full-size model has allocated at most: `python -m tests.engine.prefill_memory`.

The code of the GPU runs over tensors without data, with libraries that only allocate, so that every allocation is seen
where it is made. Prints bytes for each of CASES. Needs a process of its own: kernels are made by mode when they are
imported.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from echo_batch.cache.spec import CacheSpec
from echo_batch.engine.prefill import Prompt, prefill
from echo_batch.kernels.formats import IndexFormat, RowFormat
from echo_batch.kernels.gpu_ops import GpuLibraries, cuda_ops
from echo_batch.kernels.libs.deep_gemm import DeepGemm
from echo_batch.kernels.libs.flash_mla import FlashMla
from echo_batch.kernels.ops import Ops, reference_ops
from echo_batch.kernels.triton import linear
from echo_batch.kernels.weights import QuantizedWeight, Weight, block_shape
from echo_batch.models.config import ModelConfig
from echo_batch.models.loader import WeightBuilder
from echo_batch.models.model import Model
from echo_batch.models.tensors import expected_tensors
from tests.geometries import GLM52, V32

META = torch.device("meta")
CONFIGS = {"v32": V32, "glm52": GLM52}
CASES: tuple[tuple[str, int, tuple[int, ...]], ...] = (
    ("v32", 16384, (30_011, 9_003)),
    ("v32", 1024, (2_000, 1_272)),
    ("glm52", 8192, (33_000,)),
)
"""Model, tokens of a chunk, prompts. The second ends in a chunk of 200 tokens, whose experts take most room."""
LAYERS = {"v32": 4, "glm52": 7}
"""Dense layers, and a whole selection group with experts."""


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


class Peak(TorchDispatchMode):
    """Most bytes of tensors made under it that were there at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = self._bytes = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for key, (storage, num_bytes) in list(self._live.items()):
            if storage.expired():
                self._bytes -= num_bytes
                del self._live[key]
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device == META:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._live:
                    self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                    self._bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        return result


class _DeepGemm:
    """Its functions' own allocations: transposed scales, scores."""

    def fp8_gemm_nt(self, x: Sequence[Tensor], weight: Any, out: Tensor) -> None:
        torch.empty_like(x[1])

    def m_grouped_fp8_gemm_nt_contiguous(self, x: Sequence[Tensor], weight: Any, out: Tensor, experts: Tensor) -> None:
        torch.empty_like(x[1])

    def fp8_m_grouped_gemm_nt_masked(
        self, x: Sequence[Tensor], weight: Any, out: Tensor, counts: Tensor, expected: int
    ) -> None:
        torch.empty_like(x[1])

    def get_mk_alignment_for_contiguous_layout(self) -> int:
        return 128

    def fp8_mqa_logits(self, query: Tensor, keys: Sequence[Tensor], *_: Tensor, clean_logits: bool) -> Tensor:
        return empty(query.shape[0], -(-keys[0].shape[0] // 256) * 256, dtype=torch.float32)


class _FlashMla:
    def flash_mla_sparse_fwd(self, query: Tensor, *_: Any, d_v: int) -> tuple[Tensor, Tensor, Tensor]:
        tokens, heads = query.shape[:2]
        return empty(tokens, heads, d_v), *(empty(tokens, heads, dtype=torch.float32) for _ in range(2))


class _Cache:
    """Takes what a prefill writes and keeps nothing."""

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


@dataclass
class _Source:
    """Weights without data, in fp8 as the released checkpoints have them."""

    config: ModelConfig

    def __post_init__(self) -> None:
        self.specs = {spec.name: spec for spec in expected_tensors(self.config)}

    def read(self, name: str) -> Weight:
        spec = self.specs[name]
        if spec.role == "linear":
            data = empty(*spec.shape, dtype=torch.float8_e4m3fn)
            return QuantizedWeight(data, empty(*block_shape(spec.shape), dtype=torch.float32), True)
        return empty(*spec.shape, dtype=torch.float32 if spec.role == "fp32" else torch.bfloat16)


def gpu_ops() -> Ops:
    """The ops of a GPU with all libraries; what looks at the device of a tensor is replaced by what it does there."""
    linear.linear_fp32 = lambda x, weight: empty(x.shape[0], weight.shape[0], dtype=torch.float32)
    ops = cuda_ops(reference_ops(), GpuLibraries(DeepGemm(_DeepGemm()), FlashMla(_FlashMla()), False))
    return replace(ops, topk_rows=lambda scores, *_, first=0: empty(scores.shape[0], dtype=torch.float32))


def make_model(name: str, ops: Ops) -> Model:
    """The first layers of a model."""
    config = ModelConfig.from_hf_dict(CONFIGS[name])
    config = replace(config, layers=config.layers[: LAYERS[name]])
    weights = WeightBuilder(config, _Source(config), META, torch.bfloat16, keep_quantized=True).model()
    return Model(config, weights, ops, row_format=RowFormat("fp8"), index_format=IndexFormat("fp8"))


def peak_bytes(model: Model, chunk_tokens: int, lengths: Sequence[int]) -> int:
    """Of one group of prompts of these lengths."""
    spec = CacheSpec(
        group_layers=model.config.group_layers,
        row_format=model.row_format,
        index_format=model.index_format,
        index_topk=model.config.index_topk,
        host_tokens=1 << 20,
        gpu_tokens=1 << 16,
    )
    cache: Any = _Cache(spec)
    prompts, first = list[Prompt](), 0
    for length in lengths:
        blocks = range(first, first + -(-length // 64))
        prompts.append(Prompt(token_ids=[0] * length, blocks=list(blocks)))
        first = blocks.stop
    with Peak() as peak:
        for _ in prefill(model, cache, model.ops, prompts, chunk_tokens=chunk_tokens, on_device=META):
            pass
    return peak.peak_bytes


def main() -> None:
    JITFunction.run = lambda self, *args, **kwargs: None
    ops = gpu_ops()
    models = {name: make_model(name, ops) for name in LAYERS}
    print(json.dumps([peak_bytes(models[name], chunk, lengths) for name, chunk, lengths in CASES]))


if __name__ == "__main__":
    main()

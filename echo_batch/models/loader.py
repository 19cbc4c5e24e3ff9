"""From a checked checkpoint (or random numbers) to the weights of a Model, one tensor at a time."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from echo_batch.errors import ModelError
from echo_batch.kernels.formats import IndexFormat, RowFormat
from echo_batch.kernels.ops import Ops
from echo_batch.kernels.weights import QUANT_BLOCK, QuantizedWeight, Weight, block_shape, dequantize
from echo_batch.models.checkpoint import Checkpoint, check_checkpoint
from echo_batch.models.config import ModelConfig
from echo_batch.models.dummy import DummySource
from echo_batch.models.layers import (
    AttentionWeights,
    IndexerWeights,
    LayerWeights,
    MlpWeights,
    ModelWeights,
    MoeWeights,
)
from echo_batch.models.model import Model
from echo_batch.models.streaming import DTYPES, TensorReader
from echo_batch.models.tensors import scale_name

Progress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes in all)."""


class TensorSource(Protocol):
    """Where weights come from. Tensors arrive on the target device, in their stored dtype."""

    def read(self, name: str) -> Weight:
        """The tensor, or a QuantizedWeight if it is stored in fp8."""
        ...


class SafetensorsSource:
    """Tensors of a checked checkpoint, which must be read in the order of `names`. A context manager."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        *,
        names: Iterable[str],
        ue8m0: bool,
        progress: Progress | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._ue8m0 = ue8m0
        self._progress = progress
        self._read_bytes = 0
        # Each rank reads only what it holds: that is also what progress counts.
        wanted = [stored for name in names for stored in self._stored(name)]
        self._total_bytes = sum(checkpoint.tensors[name].num_bytes for name in wanted)
        self._reader = TensorReader(((name, checkpoint.tensors[name]) for name in wanted), device)

    def __enter__(self) -> "SafetensorsSource":
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def read(self, name: str) -> Weight:
        data, *scale = (self._take(stored) for stored in self._stored(name))
        return QuantizedWeight(data, scale[0], self._ue8m0) if scale else data

    def _stored(self, name: str) -> tuple[str, ...]:
        """What a weight consists of in the files."""
        return (name, scale_name(name)) if name in self._checkpoint.quantized else (name,)

    def _take(self, name: str) -> Tensor:
        tensor = self._reader.take(name)
        self._read_bytes += self._checkpoint.tensors[name].num_bytes
        if self._progress is not None:
            self._progress(self._read_bytes, self._total_bytes)
        return tensor


class _NamesOnly:
    """A source without data that notes what is read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.names: list[str] = []
        self._checkpoint = checkpoint

    def read(self, name: str) -> Weight:
        self.names.append(name)
        stored = self._checkpoint.tensors[name]
        data = torch.empty(stored.shape, dtype=DTYPES[stored.dtype], device="meta")
        if name not in self._checkpoint.quantized:
            return data
        scale = self._checkpoint.tensors[scale_name(name)]
        return QuantizedWeight(data, torch.empty(scale.shape, device="meta"), False)


def read_order(
    config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype, *, keep_quantized: bool, experts: range | None
) -> list[str]:
    """The weights that WeightBuilder reads, in its order: it builds a model without data."""
    source = _NamesOnly(checkpoint)
    WeightBuilder(config, source, torch.device("meta"), dtype, keep_quantized=keep_quantized, experts=experts).model()
    return source.names


def load_model(
    config: ModelConfig,
    path: str | Path | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    row_kind: Literal["fp8", "bf16", "fp32"],
    ops: Ops,
    load_format: Literal["safetensors", "dummy"] = "safetensors",
    seed: int = 0,
    experts: range | None = None,
    progress: Progress | None = None,
    first_layers: Callable[[Model], None] | None = None,
) -> Model:
    """Load `path` (or make random weights from `seed`) for `device` in compute dtype float32 or bfloat16.

    fp8 files are dequantized, except that on CUDA with bfloat16 their linears stay quantized. The index format follows
    the dtype: fp32 keys with float32, fp8 keys otherwise. `experts`: those that this worker holds (None: all).
    `first_layers` is told once, on the way, of a model of the first layers, enough for one of every kind, whose final
    norm and head are other weights of the same shape. ModelError names what is wrong with the checkpoint.
    """
    assert dtype in (torch.float32, torch.bfloat16), dtype
    keep_quantized = device.type == "cuda" and dtype == torch.bfloat16

    def as_model(weights: ModelWeights) -> Model:
        return Model(
            replace(config, layers=config.layers[: len(weights.layers)]),
            weights,
            ops,
            row_format=RowFormat(row_kind, latent_dim=config.kv_lora_rank, rope_dim=config.qk_rope_head_dim),
            index_format=IndexFormat("fp32" if dtype == torch.float32 else "fp8", head_dim=config.index_head_dim),
        )

    told = None if first_layers is None else lambda weights: first_layers(as_model(weights))
    with ExitStack() as opened:
        source: TensorSource
        if load_format == "dummy":
            source = DummySource(config, device, dtype=dtype, quantized=keep_quantized, seed=seed)
        else:
            assert path is not None
            checkpoint = check_checkpoint(config, path)
            names = read_order(config, checkpoint, dtype, keep_quantized=keep_quantized, experts=experts)
            ue8m0 = config.quant is not None and config.quant.ue8m0
            source = opened.enter_context(
                SafetensorsSource(checkpoint, device, names=names, ue8m0=ue8m0, progress=progress)
            )
        try:
            weights = WeightBuilder(
                config, source, device, dtype, keep_quantized=keep_quantized, experts=experts
            ).model(told)
        except torch.cuda.OutOfMemoryError:
            raise ModelError("the weights do not fit in the memory of the GPU") from None
    return as_model(weights)


def num_first_layers(config: ModelConfig) -> int:
    """How many layers, from the first on, have one of every kind among them (dense or experts, indexer or none)."""
    kinds = [(layer.mlp, layer.indexer) for layer in config.layers]
    return 1 + max(kinds.index(kind) for kind in set(kinds))


class WeightBuilder:
    """Merges, stacks and absorbs the tensors of a source. Holds at most one unmerged tensor beside the result."""

    def __init__(
        self,
        config: ModelConfig,
        source: TensorSource,
        device: torch.device,
        dtype: torch.dtype,
        *,
        keep_quantized: bool,
        experts: range | None = None,
    ) -> None:
        self._config = config
        self._experts = range(config.n_routed_experts) if experts is None else experts
        self._source = source
        self._device = device
        self._dtype = dtype
        self._keep_quantized = keep_quantized

    def model(self, first_layers: Callable[[ModelWeights], None] | None = None) -> ModelWeights:
        """All weights; `first_layers` is told of those of the first `num_first_layers` in between."""
        embedding = self._plain("model.embed_tokens.weight", self._dtype)
        layers: list[LayerWeights] = []
        for i in range(self._config.num_layers):
            layers.append(self._layer(i))
            if first_layers is not None and len(layers) == num_first_layers(self._config):
                # Norm and head are read last: weights of their shapes stand for them.
                norm = layers[0].input_norm
                first_layers(ModelWeights(embedding=embedding, layers=tuple(layers), norm=norm, head=embedding))
        return ModelWeights(
            embedding=embedding,
            layers=tuple(layers),
            norm=self._plain("model.norm.weight"),
            head=self._plain("lm_head.weight", self._dtype),
        )

    def _layer(self, layer: int) -> LayerWeights:
        config, prefix = self._config, f"model.layers.{layer}."
        is_dense = config.layers[layer].mlp == "dense"
        return LayerWeights(
            input_norm=self._plain(prefix + "input_layernorm.weight"),
            post_attention_norm=self._plain(prefix + "post_attention_layernorm.weight"),
            attention=self._attention(prefix + "self_attn.", has_indexer=config.layers[layer].indexer == "full"),
            mlp=self._mlp(prefix + "mlp.") if is_dense else self._moe(prefix + "mlp."),
        )

    def _attention(self, prefix: str, *, has_indexer: bool) -> AttentionWeights:
        config = self._config
        # kv_a last: its 576 rows are no whole number of blocks, and after it nothing has to be aligned.
        fused = [prefix + "q_a_proj.weight", prefix + "kv_a_proj_with_mqa.weight"]
        if has_indexer:
            fused.insert(1, prefix + "indexer.wk.weight")
        # 128-row scale blocks may straddle heads, so kv_b is dequantized whole (spec section 5).
        kv_b = dequantize(self._source.read(prefix + "kv_b_proj.weight"), self._dtype)
        kv_b = kv_b.view(config.num_attention_heads, config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank)
        key_up, value_up = kv_b.split((config.qk_nope_head_dim, config.v_head_dim), dim=1)
        return AttentionWeights(
            fused_a=self._merged(fused),
            q_a_norm=self._plain(prefix + "q_a_layernorm.weight"),
            kv_a_norm=self._plain(prefix + "kv_a_layernorm.weight"),
            q_b=self._merged([prefix + "q_b_proj.weight"] + [prefix + "indexer.wq_b.weight"] * has_indexer),
            key_up=key_up.contiguous(),
            value_up=value_up.contiguous(),
            o=self._linear(prefix + "o_proj.weight"),
            indexer=self._indexer(prefix + "indexer.") if has_indexer else None,
        )

    def _indexer(self, prefix: str) -> IndexerWeights:
        return IndexerWeights(
            k_norm=self._plain(prefix + "k_norm.weight"),
            k_norm_bias=self._plain(prefix + "k_norm.bias"),
            weights_proj=self._exact(prefix + "weights_proj.weight"),
        )

    def _mlp(self, prefix: str) -> MlpWeights:
        return MlpWeights(
            gate_up=self._merged([prefix + "gate_proj.weight", prefix + "up_proj.weight"]),
            down=self._linear(prefix + "down_proj.weight"),
        )

    def _moe(self, prefix: str) -> MoeWeights:
        config = self._config
        hidden, intermediate = config.hidden_size, config.moe_intermediate_size
        stacked = [f"{prefix}experts.{expert}." for expert in self._experts]
        if config.n_shared_experts == 1:
            stacked.append(prefix + "shared_experts.")
        return MoeWeights(
            gate=self._exact(prefix + "gate.weight"),
            bias=self._plain(prefix + "gate.e_score_correction_bias"),
            experts=MlpWeights(
                gate_up=self._stacked(stacked, ("gate_proj", "up_proj"), (2 * intermediate, hidden)),
                down=self._stacked(stacked, ("down_proj",), (hidden, intermediate)),
            ),
            first_expert=self._experts.start,
            num_held=len(self._experts),
            shared=None if config.n_shared_experts == 1 else self._mlp(prefix + "shared_experts."),
        )

    def _plain(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        # Always a copy: what safetensors returns may be the mapped file itself.
        return dequantize(self._source.read(name), dtype).clone()

    def _exact(self, name: str) -> Tensor:
        """A matrix of `linear_fp32`: bf16 where file and model are (products of bf16 are exact in fp32), else fp32."""
        read = self._source.read(name)
        is_bf16 = isinstance(read, Tensor) and read.dtype == self._dtype == torch.bfloat16
        return dequantize(read, torch.bfloat16 if is_bf16 else torch.float32).clone()

    def _linear(self, name: str) -> Weight:
        return self._merged([name])

    def _merged(self, names: list[str]) -> Weight:
        """The matrices one below the other."""
        parts = [self._source.read(name) for name in names]
        rows = sum(part.shape[0] for part in parts)
        out = self._allocate((rows, parts[0].shape[1]), parts)
        self._place(out, parts)
        return out

    def _stacked(self, prefixes: list[str], projections: tuple[str, ...], shape: tuple[int, int]) -> Weight:
        """[len(prefixes), *shape]: the named projections of each prefix one below the other."""
        stack: Weight | None = None
        for place, prefix in enumerate(prefixes):
            parts = [self._source.read(f"{prefix}{name}.weight") for name in projections]
            if stack is None:
                stack = self._allocate((len(prefixes), *shape), parts)
            if isinstance(stack, QuantizedWeight):
                self._place(stack.expert(place), parts, prefix.removesuffix("."))
            else:
                self._place(stack[place], parts)
        assert stack is not None
        return stack

    def _allocate(self, shape: tuple[int, ...], parts: list[Weight]) -> Weight:
        """Room for a merged weight: quantized if that is wanted, all parts are, and their blocks stay aligned."""
        aligned = all(part.shape[0] % QUANT_BLOCK == 0 for part in parts[:-1]) and shape[-1] % QUANT_BLOCK == 0
        if self._keep_quantized and aligned and all(isinstance(part, QuantizedWeight) for part in parts):
            first = parts[0]
            assert isinstance(first, QuantizedWeight)
            data = torch.empty(shape, dtype=first.data.dtype, device=self._device)
            scale = torch.empty(block_shape(shape), dtype=torch.float32, device=self._device)
            return QuantizedWeight(data, scale, first.ue8m0)
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _place(self, out: Weight, parts: list[Weight], what: str = "") -> None:
        """Copy the parts into `out`, one below the other."""
        row = 0
        for part in parts:
            end = row + part.shape[0]
            if isinstance(out, QuantizedWeight):
                if not isinstance(part, QuantizedWeight):
                    raise ModelError(f"{what}: some experts are quantized and some are not, which is not supported")
                out.data[row:end].copy_(part.data)
                blocks = part.scale.shape[0]
                out.scale[row // QUANT_BLOCK : row // QUANT_BLOCK + blocks].copy_(part.scale)
            else:
                out[row:end].copy_(dequantize(part, self._dtype))
            row = end

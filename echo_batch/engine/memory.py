"""How many bytes things take: weights, one token of cache, activations. Arithmetic only, no torch.

Estimates err on the large side: a plan that fits must not run out of memory hours later.
"""

from dataclasses import dataclass
from typing import Literal

from echo_batch.cache.spec import CacheSpec, PrefetchMode
from echo_batch.engine.prefill_layout import SCORE_BYTES, SLICE_TOKENS
from echo_batch.kernels.formats import IndexFormat, RowFormat
from echo_batch.models import sizes
from echo_batch.models.config import ModelConfig

GIB = 2**30

_RUNTIME_BYTES = {"cuda": 2 * GIB, "cpu": GIB // 2}
"""CUDA context, library workspaces, NCCL and captured graphs; on CPU the interpreter and its libraries."""

_ALLOCATOR_BYTES = {"cuda": GIB, "cpu": 0}
"""Gaps between tensors that torch's GPU allocator holds while activations are at their most, if its segments can be
extended (PYTORCH_ALLOC_CONF): the ends of segments, and gaps between two tensors that live on. With one segment for
each large tensor, its default, no number would do: index scores grow with every slice of a long prompt, and each finds
all that were freed before it too small. Those lie in the memory that the plan leaves alone, and are given back under
pressure."""

_MASKED_TOKENS = 256
"""Up to here the library's experts get room for so many rows each (kernels/libs/deep_gemm.py)."""

_SCORE_BYTES = 16
"""Of one index score in the references: fp32 score, its sortable key, masks of the selection."""

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of a model in memory: what every worker holds, and the experts, which are spread over the workers."""

    replicated: int
    experts: int
    num_experts: int

    def per_worker(self, num_workers: int) -> int:
        """Of the worker that holds most experts."""
        if not self.experts:
            return self.replicated
        return self.replicated + self.experts * -(-self.num_experts // num_workers) // self.num_experts


def weight_bytes(model: ModelConfig, *, dtype: Dtype, keep_fp8: bool) -> WeightBytes:
    """Bytes of the loaded weights (models/sizes.py); with `keep_fp8` linears are held in fp8."""
    loaded = sizes.weight_bytes(model, dtype=dtype, quantized=keep_fp8)
    experts = loaded.by_component.get("experts", 0)
    return WeightBytes(loaded.total - experts, experts, model.n_routed_experts)


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Bytes per token slot of each pool, over all layers.

    `gpu_row` and `host_row` are MLA KV rows, `index` the indexer cache of a host slot; `host_map` and `gpu_map` are the
    cache manager's int32 metadata per slot (none when nothing is offloaded).
    """

    host_row: int
    gpu_row: int
    index: int
    host_map: int
    gpu_map: int


def token_bytes(model: ModelConfig, row: RowFormat, index: IndexFormat, *, offload: bool) -> TokenBytes:
    """Bytes of one token of cache (the same arithmetic as CacheSpec, per token)."""
    rows = model.num_layers * row.row_bytes
    groups = len(model.group_layers)
    return TokenBytes(
        host_row=rows if offload else 0,
        gpu_row=rows,
        index=groups * index.row_bytes,
        host_map=4 * groups if offload else 0,
        gpu_map=8 * groups if offload else 0,
    )


def cache_fixed_bytes(model: ModelConfig, row: RowFormat, index: IndexFormat, *, prefetch: PrefetchMode) -> int:
    """Metadata of an offloading cache that does not grow with its pools: candidate lists, rows set aside for
    prefetch (as many as in a large pool) and counters."""
    many = 2**24
    spec = CacheSpec(
        group_layers=model.group_layers,
        row_format=row,
        index_format=index,
        index_topk=model.index_topk,
        host_tokens=many,
        gpu_tokens=many,
        prefetch=prefetch,
    )
    tokens = token_bytes(model, row, index, offload=True)
    return spec.metadata_bytes - many * (tokens.host_map + tokens.gpu_map)


def runtime_bytes(kind: Literal["cpu", "cuda"]) -> int:
    """Memory of a worker that is neither weights, cache nor activations."""
    return _RUNTIME_BYTES[kind]


def allocator_bytes(kind: Literal["cpu", "cuda"]) -> int:
    """Memory that the allocator may hold beyond what is in use."""
    return _ALLOCATOR_BYTES[kind]


def chunk_bytes(
    model: ModelConfig, *, dtype: Dtype, kind: Literal["cpu", "cuda"], chunk_tokens: int, context: int
) -> int:
    """Peak bytes inside a layer for a prefill chunk whose tokens see up to `context` tokens.

    Attention takes the chunk in slices, the experts see it whole: the larger of both, beside attention's output.
    """
    width = 4 if dtype == "float32" else 2
    slice_tokens = min(chunk_tokens, SLICE_TOKENS)
    scores = min(4 * slice_tokens * context, SCORE_BYTES) * (_SCORE_BYTES // 4 if kind == "cpu" else 1)
    attention = slice_tokens * _attention_token_bytes(model, width) + scores + chunk_tokens * model.hidden_size * width
    return max(attention, _mlp_bytes(model, width, chunk_tokens, kind)) + chunk_tokens * model.hidden_size * width


def _attention_token_bytes(model: ModelConfig, width: int) -> int:
    """Of one token inside attention, its index scores apart."""
    heads = model.num_attention_heads
    latent_query = model.kv_lora_rank + model.qk_rope_head_dim
    residual = 2 * model.hidden_size * (width + 4)
    query = heads * (model.qk_nope_head_dim + model.qk_rope_head_dim + latent_query) * width
    # The library's kernels give fp32 maxima and sums of each head beside the latent.
    output = heads * ((model.kv_lora_rank + 2 * model.v_head_dim) * width + 8)
    indexer = model.index_n_heads * model.index_head_dim * 8
    return residual + query + output + indexer + 16 * model.index_topk


def _mlp_bytes(model: ModelConfig, width: int, tokens: int, kind: Literal["cpu", "cuda"]) -> int:
    """Of the dense or the routed MLP over so many tokens, each expert's rows rounded up to a tile of 128."""
    residual = tokens * model.hidden_size * (2 * width + 5)
    dense = tokens * model.intermediate_size * (3 * width + 1)
    # A single shared expert goes with the routed ones.
    pairs = tokens * (model.num_experts_per_tok + model.n_shared_experts)
    experts = model.n_routed_experts + model.n_shared_experts
    rows = pairs + 128 * min(experts, pairs)
    if kind == "cuda" and tokens > 128:
        # The last chunk may be one of those.
        rows = max(rows, min(tokens, _MASKED_TOKENS) * experts)
    inner = model.moe_intermediate_size
    before = model.hidden_size + inner * 2 * width
    after = model.hidden_size * width + inner * (width + 1)
    return residual + max(dense, rows * max(before, after))


def group_token_bytes(model: ModelConfig, *, dtype: Dtype, row: RowFormat, index: IndexFormat) -> int:
    """Bytes per token of the prompts that are prefilled together.

    Hidden state; KV rows of one selection group's layers, once more while they are written to the host, and, where the
    cache is fp8, as bf16 for attention; index keys, as rows and as what a scoring call makes of them; RoPE angles, ids,
    positions and slots.
    """
    width = 4 if dtype == "float32" else 2
    rows = loaded_token_bytes(model, row=row, index=index)
    return model.hidden_size * width + rows + 4 * row.rope_dim + 40


def loaded_token_bytes(model: ModelConfig, *, row: RowFormat, index: IndexFormat) -> int:
    """Of `group_token_bytes`, what a prefix token takes that is read from the host pool: rows and keys only.

    Its rows are there twice too: those of the next layers are read ahead.
    """
    layers = max(len(layers) for layers in model.group_layers)
    wide = RowFormat("bf16", latent_dim=row.latent_dim, rope_dim=row.rope_dim).row_bytes if row.kind == "fp8" else 0
    return layers * (2 * row.row_bytes + wide) + 3 * index.row_bytes


def decode_row_bytes(model: ModelConfig, *, dtype: Dtype, context: int) -> int:
    """Peak bytes of a decode step per batch row: a layer's activations, logits and the sampler's copies of them."""
    width = 4 if dtype == "float32" else 2
    dense = 3 * model.intermediate_size * width
    routed = model.num_experts_per_tok * (2 * model.hidden_size + 3 * model.moe_intermediate_size) * width
    layer = _attention_token_bytes(model, width) + max(dense, routed) + _SCORE_BYTES * context
    return layer + 16 * model.vocab_size + context // 16

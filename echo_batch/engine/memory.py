"""How many bytes things take: weights, one token of cache, activations. Arithmetic only, no torch.

Estimates err on the large side: a plan that fits must not run out of memory hours later.
"""

from dataclasses import dataclass
from typing import Literal

from echo_batch.cache.spec import CacheSpec
from echo_batch.kernels.formats import IndexFormat, RowFormat
from echo_batch.models import sizes
from echo_batch.models.config import ModelConfig

GIB = 2**30

_RUNTIME_BYTES = {"cuda": 2 * GIB, "cpu": GIB // 2}
"""CUDA context, library workspaces, NCCL and captured graphs; on CPU the interpreter and its libraries."""

_SCORE_BYTES = 16
"""Of one index score in flight: fp32 score, its sortable key, masks of the selection."""

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


def cache_fixed_bytes(model: ModelConfig, row: RowFormat, index: IndexFormat) -> int:
    """Metadata of an offloading cache that does not grow with its pools: candidate lists and counters."""
    many = 2**24
    spec = CacheSpec(
        group_layers=model.group_layers,
        row_format=row,
        index_format=index,
        index_topk=model.index_topk,
        host_tokens=many,
        gpu_tokens=many,
    )
    tokens = token_bytes(model, row, index, offload=True)
    return spec.metadata_bytes - many * (tokens.host_map + tokens.gpu_map)


def runtime_bytes(kind: Literal["cpu", "cuda"]) -> int:
    """Memory of a worker that is neither weights, cache nor activations."""
    return _RUNTIME_BYTES[kind]


def chunk_token_bytes(model: ModelConfig, *, dtype: Dtype, context: int) -> int:
    """Peak bytes inside a layer per token of a prefill chunk that sees `context` tokens."""
    width = 4 if dtype == "float32" else 2
    heads = model.num_attention_heads
    latent_query = model.kv_lora_rank + model.qk_rope_head_dim
    residual = 4 * model.hidden_size * (width + 4)
    query = heads * (model.qk_nope_head_dim + model.qk_rope_head_dim + 2 * latent_query) * width
    output = heads * (model.kv_lora_rank + model.v_head_dim) * max(width, 4)
    indexer = model.index_n_heads * model.index_head_dim * 8
    scores = _SCORE_BYTES * context + 16 * model.index_topk
    dense = 3 * model.intermediate_size * width
    moe = model.num_experts_per_tok * (2 * model.hidden_size + 3 * model.moe_intermediate_size) * width
    return residual + query + output + indexer + scores + max(dense, moe)


def group_token_bytes(model: ModelConfig, *, dtype: Dtype, row: RowFormat, index: IndexFormat) -> int:
    """Bytes per token of the prompts that are prefilled together: hidden state, KV rows of one selection group's
    layers, index keys, ids, positions and slots."""
    width = 4 if dtype == "float32" else 2
    layers = max(len(layers) for layers in model.group_layers)
    return model.hidden_size * width + layers * row.row_bytes + index.row_bytes + 24


def decode_row_bytes(model: ModelConfig, *, dtype: Dtype, context: int) -> int:
    """Peak bytes of a decode step per batch row: a layer's activations, logits and the sampler's copies of them."""
    return chunk_token_bytes(model, dtype=dtype, context=context) + 16 * model.vocab_size + context // 16

"""Names, shapes and roles of the tensors that a checkpoint of a given config must have. No torch (spec section 2)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from echo_batch.models.config import ModelConfig

Role = Literal["linear", "fp32", "exact", "matrix"]
Component = Literal["embedding", "attention", "indexer", "dense_mlp", "router", "experts", "shared_experts", "norms"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint.

    role: "linear" may be stored in fp8 with a `weight_scale_inv` beside it; "fp32" is kept in fp32 in memory (norms,
    router bias); "exact" is used with fp32 results (router, head weights of the indexer) and kept as bf16 only where it
    is bf16 in the file; "matrix" is kept in the compute dtype (embedding, output head).
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    component: Component

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


def scale_name(weight_name: str) -> str:
    """Name of the block scales of a quantized weight."""
    return weight_name.removesuffix(".weight") + ".weight_scale_inv"


def expected_tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor the model needs, embedding first, then layer by layer. MTP layers and scales are not among them."""
    hidden, vocab = config.hidden_size, config.vocab_size
    yield TensorSpec("model.embed_tokens.weight", (vocab, hidden), "matrix", "embedding")
    for i in range(config.num_layers):
        yield from layer_tensors(config, i)
    yield TensorSpec("model.norm.weight", (hidden,), "fp32", "norms")
    yield TensorSpec("lm_head.weight", (vocab, hidden), "matrix", "embedding")


def layer_tensors(config: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    """The tensors of one layer."""
    prefix, hidden = f"model.layers.{layer}.", config.hidden_size
    yield TensorSpec(prefix + "input_layernorm.weight", (hidden,), "fp32", "norms")
    yield TensorSpec(prefix + "post_attention_layernorm.weight", (hidden,), "fp32", "norms")
    yield from _attention_tensors(config, prefix + "self_attn.")
    if config.layers[layer].indexer == "full":
        yield from _indexer_tensors(config, prefix + "self_attn.indexer.")
    mlp = prefix + "mlp."
    if config.layers[layer].mlp == "dense":
        yield from _mlp_tensors(mlp, hidden, config.intermediate_size, "dense_mlp")
        return
    yield TensorSpec(mlp + "gate.weight", (config.n_routed_experts, hidden), "exact", "router")
    yield TensorSpec(mlp + "gate.e_score_correction_bias", (config.n_routed_experts,), "fp32", "router")
    for expert in range(config.n_routed_experts):
        yield from _mlp_tensors(f"{mlp}experts.{expert}.", hidden, config.moe_intermediate_size, "experts")
    shared_size = config.n_shared_experts * config.moe_intermediate_size
    yield from _mlp_tensors(mlp + "shared_experts.", hidden, shared_size, "shared_experts")


def _attention_tensors(config: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    heads, hidden = config.num_attention_heads, config.hidden_size
    latent, rope = config.kv_lora_rank, config.qk_rope_head_dim
    nope, value, q_rank = config.qk_nope_head_dim, config.v_head_dim, config.q_lora_rank
    yield TensorSpec(prefix + "q_a_proj.weight", (q_rank, hidden), "linear", "attention")
    yield TensorSpec(prefix + "q_a_layernorm.weight", (q_rank,), "fp32", "norms")
    yield TensorSpec(prefix + "q_b_proj.weight", (heads * (nope + rope), q_rank), "linear", "attention")
    yield TensorSpec(prefix + "kv_a_proj_with_mqa.weight", (latent + rope, hidden), "linear", "attention")
    yield TensorSpec(prefix + "kv_a_layernorm.weight", (latent,), "fp32", "norms")
    yield TensorSpec(prefix + "kv_b_proj.weight", (heads * (nope + value), latent), "linear", "attention")
    yield TensorSpec(prefix + "o_proj.weight", (hidden, heads * value), "linear", "attention")


def _indexer_tensors(config: ModelConfig, prefix: str) -> Iterator[TensorSpec]:
    heads, dim, hidden = config.index_n_heads, config.index_head_dim, config.hidden_size
    yield TensorSpec(prefix + "wq_b.weight", (heads * dim, config.q_lora_rank), "linear", "indexer")
    yield TensorSpec(prefix + "wk.weight", (dim, hidden), "linear", "indexer")
    yield TensorSpec(prefix + "k_norm.weight", (dim,), "fp32", "indexer")
    yield TensorSpec(prefix + "k_norm.bias", (dim,), "fp32", "indexer")
    yield TensorSpec(prefix + "weights_proj.weight", (heads, hidden), "exact", "indexer")


def _mlp_tensors(prefix: str, hidden: int, intermediate: int, component: Component) -> Iterator[TensorSpec]:
    yield TensorSpec(prefix + "gate_proj.weight", (intermediate, hidden), "linear", component)
    yield TensorSpec(prefix + "up_proj.weight", (intermediate, hidden), "linear", component)
    yield TensorSpec(prefix + "down_proj.weight", (hidden, intermediate), "linear", component)

"""Our own frozen description of a model, read from a Hugging Face config.json. Nothing below sees the HF file."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding of one use. `interleaved`: pairs (2j, 2j+1); otherwise half-split pairs (j, j + dim/2).

    YaRN (spec section 3.2) is on when `yarn_factor` is not None.
    """

    dim: int
    theta: float
    interleaved: bool
    yarn_factor: float | None = None
    yarn_original_max_position: int = 4096
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_mscale_all_dim: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """What one layer is made of. A "shared" indexer reuses the selection of the nearest earlier "full" layer."""

    indexer: Literal["full", "shared"]
    mlp: Literal["dense", "moe"]
    selection_group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantSpec:
    """Block-scaled fp8 weights: block [128, 128]; `ue8m0` rounds activation scales up to powers of two."""

    block_size: int = 128
    ue8m0: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A DSA model (DeepSeek-V3.2, GLM-5.x)."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    rope: RopeSpec
    index_rope: RopeSpec
    softmax_scale: float
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quant: QuantSpec | None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def group_layers(self) -> tuple[tuple[int, ...], ...]:
        """Layers of each selection group, in order; the first of each is its full-indexer layer."""
        groups: list[list[int]] = []
        for i, layer in enumerate(self.layers):
            if layer.indexer == "full":
                groups.append([])
            groups[-1].append(i)
        return tuple(tuple(g) for g in groups)

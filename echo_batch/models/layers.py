"""The weights of a loaded model, as the forward code wants them: merged, stacked and absorbed."""

from dataclasses import dataclass

from torch import Tensor

from echo_batch.kernels.weights import Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerWeights:
    """Indexer of a "full" layer. Its key and query projections are part of AttentionWeights.fused_a and q_b."""

    k_norm: Tensor
    k_norm_bias: Tensor
    """fp32 [128]"""
    weights_proj: Tensor
    """bf16 or fp32 [Hi, D]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """MLA projections, with kv_b split per head and absorbed (spec section 3.5)."""

    fused_a: Weight
    """[q_rank + (128 if the layer has an indexer) + 576, D]: q_a, indexer wk, kv_a in one matrix"""
    q_a_norm: Tensor
    """fp32 [q_rank]"""
    kv_a_norm: Tensor
    """fp32 [512]"""
    q_b: Weight
    """[H * (nope + rope) (+ Hi * 128 if the layer has an indexer), q_rank]: q_b, indexer wq_b in one matrix"""
    key_up: Tensor
    """[H, nope, 512]: turns a head's q_nope into a query on the latent"""
    value_up: Tensor
    """[H, v, 512]: turns a head's attended latent into its value"""
    o: Weight
    """[D, H * v]"""
    indexer: IndexerWeights | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpWeights:
    """Gated MLP; a stack of them has a leading expert dimension."""

    gate_up: Weight
    """[2I, D], gate rows first"""
    down: Weight
    """[D, I]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeWeights:
    gate: Tensor
    """bf16 or fp32 [E, D]"""
    bias: Tensor
    """fp32 [E], for selection only"""
    experts: MlpWeights
    """[held (+ 1), 2I, D] and [held (+ 1), D, I]: the experts that this worker holds, from `first_expert` on; behind
    them the shared one if it has their shape, so that all run in the same launches"""
    first_expert: int
    num_held: int
    shared: MlpWeights | None
    """The shared experts where they do not fit the stack"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    input_norm: Tensor
    post_attention_norm: Tensor
    """fp32 [D]"""
    attention: AttentionWeights
    mlp: MlpWeights | MoeWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    embedding: Tensor
    """[V, D] in the compute dtype"""
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    """fp32 [D]"""
    head: Tensor
    """[V, D] in the compute dtype"""

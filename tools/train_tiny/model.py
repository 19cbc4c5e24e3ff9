"""echo-tiny in plain PyTorch for training: DeepSeek-V3.2's layers with dense or sparse attention over whole sequences.

Parameters carry Hugging Face's names, but for the experts, which are stacked. Tokens are flat [B * L]; a call gets B
sequences of one length L. Token-wise parts are plain functions of [T, ...] so that they can be compiled once for every
sequence length; only the attention between them sees L.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LOOK_BACK: tuple[tuple[int, ...], ...] = ((1, 3, 5), (1, 4))  # tokens, by layer and head
E4M3_MAX = 448.0
BLOCK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyConfig:
    """Sizes of the model; the defaults are echo-tiny's. Names are those of the Hugging Face configuration."""

    vocab_size: int = 2048
    hidden_size: int = 256
    num_hidden_layers: int = 4
    first_k_dense_replace: int = 1
    intermediate_size: int = 1024
    moe_intermediate_size: int = 128
    n_routed_experts: int = 8
    n_shared_experts: int = 1
    num_experts_per_tok: int = 2
    n_group: int = 2
    topk_group: int = 1
    routed_scaling_factor: float = 2.5
    num_attention_heads: int = 4
    q_lora_rank: int = 256
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    index_n_heads: int = 16
    index_head_dim: int = 128
    index_topk: int = 256
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    yarn_factor: float = 10.0
    yarn_original_max_position: int = 4096
    max_position_embeddings: int = 40960

    @property
    def softmax_scale(self) -> float:
        mscale = 0.1 * math.log(self.yarn_factor) + 1.0
        return float((self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * mscale * mscale)


def rope_frequencies(config: TinyConfig) -> Tensor:
    """YaRN frequencies [rope / 2] fp32 (spec section 3.2)."""
    dim, theta = config.qk_rope_head_dim, config.rope_theta
    pair = torch.arange(dim // 2, dtype=torch.float32)
    freq = theta ** (-2.0 * pair / dim)

    def correction(rotations: float) -> float:
        return dim * math.log(config.yarn_original_max_position / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low, high = max(math.floor(correction(32.0)), 0), min(math.ceil(correction(1.0)), dim - 1)
    ramp = ((pair - low) / (high - low)).clamp(0, 1)
    return freq / config.yarn_factor * ramp + freq * (1 - ramp)


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on pairs (2j, 2j+1). x [T, H, d], cos and sin [T, 1, d / 2] fp32; returns x's dtype."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on pairs (j, j + d/2). x [T, H, d], cos and sin [T, 1, d / 2] fp32; returns x's dtype."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """RMSNorm over the last dimension in fp32, cast to `dtype`."""
    wide = x.float()
    return (weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps))).to(dtype)


def power_of_two_scale(amax: Tensor) -> Tensor:
    """The smallest power of two that brings `amax` into e4m3's range."""
    return torch.exp2(torch.ceil(torch.log2(amax.clamp(min=1e-4) / E4M3_MAX)))


def round_to_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """x through e4m3 at `scale` and back, fp32."""
    return (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale


def weight_block_scales(weight: Tensor) -> Tensor:
    """Power-of-two scale of each 128 x 128 block: weight [..., out, in] -> [..., ceil(out/128), ceil(in/128)]."""
    rows, cols = weight.shape[-2:]
    padded = F.pad(weight.float(), (0, -cols % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    return power_of_two_scale(blocks.abs().amax(dim=(-1, -3)))


def expand_blocks(scales: Tensor, rows: int, cols: int) -> Tensor:
    """Block scales repeated to the weight's shape."""
    wide = scales.repeat_interleave(BLOCK, -2)[..., :rows, :]
    return wide.repeat_interleave(BLOCK, -1)[..., :cols]


def quantized_weight(weight: Tensor) -> Tensor:
    """The weight as its fp8 checkpoint reads, with a straight-through gradient."""
    scale = expand_blocks(weight_block_scales(weight.detach()), *weight.shape[-2:])
    return weight + (round_to_e4m3(weight.detach(), scale) - weight.detach())


def quantized_rows(x: Tensor) -> Tensor:
    """Rows rounded through e4m3 in groups of 128 of the last dimension, with a straight-through gradient."""
    groups = x.detach().float().unflatten(-1, (-1, BLOCK))
    rounded = round_to_e4m3(groups, power_of_two_scale(groups.abs().amax(-1, keepdim=True))).flatten(-2)
    return x + (rounded.to(x.dtype) - x.detach())


class Linear(nn.Module):
    """A matrix [out, in], or a stack of them; with `round_fp8` it and its input are rounded as for an fp8 product."""

    def __init__(self, *shape: int, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape) * gain * shape[-1] ** -0.5)
        self.round_fp8 = False

    def matrix(self, dtype: torch.dtype) -> Tensor:
        return (quantized_weight(self.weight) if self.round_fp8 else self.weight).to(dtype)

    def rounded_input(self, x: Tensor) -> Tensor:
        return quantized_rows(x) if self.round_fp8 else x

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.rounded_input(x), self.matrix(x.dtype))


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class LayerNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))


class AttentionParts(NamedTuple):
    """query, key [T, H, nope + rope]; value [T, H, v]; hidden [T, D] (normed input) and q_latent [T, q_lora]."""

    query: Tensor
    key: Tensor
    value: Tensor
    hidden: Tensor
    q_latent: Tensor


class IndexParts(NamedTuple):
    """query [T, Hi, 128], key [T, 128], weights [T, Hi] fp32 with the constant factors folded in."""

    query: Tensor
    key: Tensor
    weights: Tensor


class Indexer(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.wq_b = Linear(config.index_n_heads * config.index_head_dim, config.q_lora_rank)
        self.wk = Linear(config.index_head_dim, config.hidden_size)
        self.k_norm = LayerNorm(config.index_head_dim)
        self.weights_proj = Linear(config.index_n_heads, config.hidden_size)

    def forward(self, hidden: Tensor, q_latent: Tensor, cos: Tensor, sin: Tensor) -> IndexParts:
        """Spec section 3.3 without the Hadamard transform and fp8, which do not change exact scores."""
        c = self.config
        rope = c.qk_rope_head_dim
        query = self.wq_b(q_latent).unflatten(-1, (c.index_n_heads, c.index_head_dim))
        key = self.wk(hidden).float()
        key = F.layer_norm(key, (c.index_head_dim,), self.k_norm.weight, self.k_norm.bias, 1e-6).to(hidden.dtype)
        query = torch.cat((rotate_half(query[..., :rope], cos, sin), query[..., rope:]), dim=-1)
        key = torch.cat((rotate_half(key[:, None, :rope], cos, sin)[:, 0], key[:, rope:]), dim=-1)
        weights = F.linear(hidden.float(), self.weights_proj.weight)
        return IndexParts(query, key, weights * (c.index_n_heads * c.index_head_dim) ** -0.5)


class Attention(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        c = self.config = config
        heads, qk = c.num_attention_heads, c.qk_nope_head_dim + c.qk_rope_head_dim
        self.q_a_proj = Linear(c.q_lora_rank, c.hidden_size)
        self.q_a_layernorm = Norm(c.q_lora_rank)
        self.q_b_proj = Linear(heads * qk, c.q_lora_rank)
        self.kv_a_proj_with_mqa = Linear(c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size)
        self.kv_a_layernorm = Norm(c.kv_lora_rank)
        self.kv_b_proj = Linear(heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
        self.o_proj = Linear(c.hidden_size, heads * c.v_head_dim, gain=(2 * c.num_hidden_layers) ** -0.5)
        self.indexer = Indexer(config)
        self.round_fp8 = False

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> AttentionParts:
        """Projections and RoPE of the normed input [T, D]; cos and sin [T, 1, rope / 2] fp32."""
        c = self.config
        heads, nope = c.num_attention_heads, c.qk_nope_head_dim
        q_latent = rms_norm(self.q_a_proj(hidden), self.q_a_layernorm.weight, c.rms_norm_eps, hidden.dtype)
        query = self.q_b_proj(q_latent).unflatten(-1, (heads, -1))
        query = torch.cat((query[..., :nope], rotate_interleaved(query[..., nope:], cos, sin)), dim=-1)
        latent, rope = self.cache_rows(hidden, cos, sin).split((c.kv_lora_rank, c.qk_rope_head_dim), dim=-1)
        expanded = F.linear(latent, self.kv_b_proj.matrix(latent.dtype)).unflatten(-1, (heads, -1))
        key = torch.cat((expanded[..., :nope], rope[:, None].expand(-1, heads, -1)), dim=-1)
        return AttentionParts(query, key, expanded[..., nope:], hidden, q_latent)

    def cache_rows(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """What a cache holds of each token [T, 576]: the normed latent (rounded if so set), then the rotated key."""
        c = self.config
        latent, rope = self.kv_a_proj_with_mqa(hidden).split((c.kv_lora_rank, c.qk_rope_head_dim), dim=-1)
        latent = rms_norm(latent, self.kv_a_layernorm.weight, c.rms_norm_eps, hidden.dtype)
        if self.round_fp8:
            latent = quantized_rows(latent)
        return torch.cat((latent, rotate_interleaved(rope[:, None], cos, sin)[:, 0]), dim=-1)


class DenseMlp(nn.Module):
    def __init__(self, config: TinyConfig, width: int) -> None:
        super().__init__()
        self.gate_proj = Linear(width, config.hidden_size)
        self.up_proj = Linear(width, config.hidden_size)
        self.down_proj = Linear(config.hidden_size, width, gain=(2 * config.num_hidden_layers) ** -0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (output [T, D], an empty load count)."""
        inner = F.silu(self.gate_proj(x).float()) * self.up_proj(x).float()
        return self.down_proj(inner.to(x.dtype)), x.new_zeros(0, dtype=torch.float32)


class Router(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(config.n_routed_experts, config.hidden_size) * config.hidden_size**-0.5)
        self.e_score_correction_bias: Tensor
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))


class Experts(nn.Module):
    """Routed experts stacked: gate and up [E, width, D], down [E, D, width]."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        e, width, hidden = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        self.gate_proj = Linear(e, width, hidden)
        self.up_proj = Linear(e, width, hidden)
        self.down_proj = Linear(e, hidden, width, gain=(2 * config.num_hidden_layers) ** -0.5)


class MoeMlp(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = DenseMlp(config, config.moe_intermediate_size * config.n_shared_experts)

    def route(self, x: Tensor) -> Tensor:
        """Weight of every expert for each token, [T, E] fp32, zero where not chosen (spec section 3.6)."""
        c = self.config
        prob = torch.sigmoid(F.linear(x.float(), self.gate.weight))
        biased = prob.detach() + self.gate.e_score_correction_bias
        if c.n_group > 1:
            groups = biased.unflatten(-1, (c.n_group, -1))
            group_score = groups.topk(2, dim=-1).values.sum(-1)
            keep = torch.zeros_like(group_score).scatter_(-1, group_score.topk(c.topk_group, dim=-1).indices, 1.0)
            biased = groups.masked_fill(keep[..., None] == 0, float("-inf")).flatten(-2)
        chosen = torch.zeros_like(prob).scatter_(-1, biased.topk(c.num_experts_per_tok, dim=-1).indices, 1.0)
        weight = prob * chosen
        return weight / (weight.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Every expert on every token, which is cheap at this width. Returns (output [T, D], tokens per expert [E])."""
        routing = self.route(x)
        rounded = self.experts.gate_proj.rounded_input(x)
        gate = F.linear(rounded, self.experts.gate_proj.matrix(x.dtype).flatten(0, 1)).float()
        up = F.linear(rounded, self.experts.up_proj.matrix(x.dtype).flatten(0, 1)).float()
        inner = (F.silu(gate) * up).unflatten(-1, (self.config.n_routed_experts, -1)) * routing[..., None]
        down = self.experts.down_proj.matrix(x.dtype).transpose(0, 1).flatten(1, 2)
        routed = F.linear(self.experts.down_proj.rounded_input(inner.flatten(1).to(x.dtype)), down)
        return routed + self.shared_experts(x)[0], (routing > 0).float().sum(0)


class Layer(nn.Module):
    def __init__(self, config: TinyConfig, index: int) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.input_layernorm = Norm(config.hidden_size)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config.hidden_size)
        dense = index < config.first_k_dense_replace
        self.mlp = DenseMlp(config, config.intermediate_size) if dense else MoeMlp(config)

    def before(self, stream: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> AttentionParts:
        """Everything up to the attention. stream [T, D] fp32."""
        parts: AttentionParts = self.self_attn(rms_norm(stream, self.input_layernorm.weight, self.eps, dtype), cos, sin)
        return parts

    def after(self, stream: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Output projection and MLP. attended [T, H, v]. Returns (stream [T, D] fp32, tokens per expert)."""
        stream = stream + self.self_attn.o_proj(attended.flatten(1)).float()
        out, load = self.mlp(rms_norm(stream, self.post_attention_layernorm.weight, self.eps, attended.dtype))
        return stream + out.float(), load


class Body(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size)


class TinyModel(nn.Module):
    """Parameter names: `model.*` and `lm_head.weight`, as in a DeepSeek-V3.2 checkpoint."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.lm_head = Linear(config.vocab_size, config.hidden_size, gain=0.5)
        self.look_back()

    @torch.no_grad()
    def look_back(self) -> None:
        """Start some heads of the first layers as looks a few tokens back, which retrieval is built from.

        Without biases, and with rotary queries and keys made from random embeddings, such heads form slowly. So the
        first channel of every embedding starts at one constant; the rotary part of every key reads it, and in head h of
        layer l the rotary query is the same vector turned back by LOOK_BACK[l][h] tokens. All of it trains on.
        """
        freq = rope_frequencies(self.config)
        self.model.embed_tokens.weight[:, 0] = 1.0
        for layer, offsets in zip(self.model.layers, LOOK_BACK, strict=False):
            assert isinstance(layer, Layer)
            attention = layer.self_attn
            rope, heads = self.config.qk_rope_head_dim, self.config.num_attention_heads
            key = attention.kv_a_proj_with_mqa.weight[-rope:]
            key *= 0.1
            key[0::2, 0] = 1.0
            attention.q_a_proj.weight[0] = 0.0
            attention.q_a_proj.weight[0, 0] = 1.0
            query = attention.q_b_proj.weight.view(heads, -1, self.config.q_lora_rank)
            query *= 0.5
            for head, back in enumerate(offsets[:heads]):
                query[head] *= 0.2
                query[head, -rope::2, 0] = torch.cos(back * freq)
                query[head, -rope + 1 :: 2, 0] = -torch.sin(back * freq)

    def set_round_fp8(self, on: bool) -> None:
        """Round matrices, their inputs and latents to fp8, but not the embedding, lm_head, router and weights_proj."""
        for name, module in self.named_modules():
            if isinstance(module, Attention) or (
                isinstance(module, Linear) and not name.endswith(("lm_head", "weights_proj"))
            ):
                module.round_fp8 = on

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, rope / 2] fp32 of positions [T]."""
        angle = positions.float()[:, None] * rope_frequencies(self.config).to(positions.device)
        return angle.cos()[:, None], angle.sin()[:, None]

    def logits(self, stream: Tensor, dtype: torch.dtype) -> Tensor:
        """Final norm and lm_head: [T, D] -> [T, V] in `dtype`."""
        out: Tensor = self.lm_head(rms_norm(stream, self.model.norm.weight, self.config.rms_norm_eps, dtype))
        return out

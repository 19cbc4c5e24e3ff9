"""Attention of echo-tiny over whole sequences: dense, sparse under the indexer's selection, and the indexer's losses.

Shapes: queries and keys [T, H, d] flat, with T = B * L for B sequences of length L.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.train_tiny.match import MATCH_HEADS, Statements, guide_loss, make_guide
from tools.train_tiny.model import AttentionParts, IndexParts, Layer, TinyConfig, TinyModel

_QUERY_CHUNK = 1024


def _heads_first(x: Tensor, length: int) -> Tensor:
    return x.unflatten(0, (-1, length)).transpose(1, 2)


def attend(parts: AttentionParts, length: int, scale: float, allowed: Tensor | None = None) -> Tensor:
    """Causal attention, or only where `allowed` bool [B, 1, L, L]. Returns [T, H, v] in the query's dtype."""
    query, key, value = (_heads_first(x, length) for x in parts[:3])
    width = value.shape[-1]
    value = F.pad(value, (0, query.shape[-1] - width))  # one head size for all: what the fast kernels want
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed, is_causal=allowed is None, scale=scale)
    return out[..., :width].transpose(1, 2).flatten(0, 1)


def index_scores(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """Sum over heads of weights * relu(query . key): query [n, Hi, d], key [L, d], weights [n, Hi] -> fp32 [n, L]."""
    n, heads, _ = query.shape
    dots = (query.flatten(0, 1) @ key.T).view(n, heads, -1)
    return torch.bmm(weights[:, None].to(dots.dtype), F.relu(dots))[:, 0].float()


def causal_scores(query: Tensor, key: Tensor, weights: Tensor, first: int) -> Tensor:
    """index_scores of queries at positions first, first + 1, ... with -inf past each query's own position."""
    if query.is_cuda:
        from tools.train_tiny.fast_scores import causal_index_scores

        return causal_index_scores(query, key, weights, first)
    limit = torch.arange(first, first + query.shape[0], device=key.device)[:, None]
    scores = index_scores(query, key, weights)
    return scores.masked_fill_(torch.arange(key.shape[0], device=key.device) > limit, float("-inf"))


@torch.no_grad()
def select(index: IndexParts, length: int, k: int) -> Tensor:
    """Which keys each query may attend to: bool [B, 1, L, L], the causal top k by index score (or all of <= k)."""
    batch = index.key.shape[0] // length
    allowed = torch.zeros(batch, 1, length, length, dtype=torch.bool, device=index.key.device)
    for b in range(batch):
        for lo in range(0, length, _QUERY_CHUNK):
            hi = min(lo + _QUERY_CHUNK, length)
            rows = slice(b * length + lo, b * length + hi)
            scores = causal_scores(index.query[rows], index.key[b * length : b * length + hi], index.weights[rows], lo)
            best = scores.topk(min(k, hi), dim=-1, sorted=False)
            allowed[b, 0, lo:hi, :hi].scatter_(-1, best.indices, best.values > float("-inf"))
    return allowed


def index_loss(
    parts: AttentionParts, index: IndexParts, sampled: Tensor, scale: float, allowed: Tensor | None
) -> Tensor:
    """KL of the indexer's softmax from the heads' mean attention at sampled queries; gradient to the indexer only.

    sampled int64 [B, n] positions; allowed bool [B, 1, L, L] restricts both distributions to the selected keys.
    """
    batch, n = sampled.shape
    length = index.key.shape[0] // batch
    total = index.weights.new_zeros(())
    position = torch.arange(length, device=sampled.device)
    for b in range(batch):
        rows, keys = sampled[b] + b * length, slice(b * length, (b + 1) * length)
        banned = position > sampled[b][:, None]
        if allowed is not None:
            banned = banned | ~allowed[b, 0, sampled[b]]
        with torch.no_grad():
            logits = torch.einsum("nhd,uhd->hnu", parts.query[rows], parts.key[keys]).float() * scale
            target = logits.masked_fill_(banned, float("-inf")).softmax(-1).mean(0)
        scores = index_scores(index.query[rows], index.key[keys], index.weights[rows])
        log_prob = scores.masked_fill(banned, float("-inf")).log_softmax(-1)
        total = total + F.kl_div(log_prob.masked_fill(banned, 0.0), target, reduction="sum") / (batch * n)
    return total


@dataclass(frozen=True, slots=True)
class TokenwiseOps:
    """The token-wise halves of a layer and the output loss, as they are or compiled."""

    before: Callable[[Layer, Tensor, Tensor, Tensor, torch.dtype], AttentionParts]
    after: Callable[[Layer, Tensor, Tensor], tuple[Tensor, Tensor]]
    token_losses: Callable[[TinyModel, Tensor, Tensor, torch.dtype], Tensor]


def _token_losses(model: TinyModel, stream: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    return F.cross_entropy(model.logits(stream, dtype).float(), targets, reduction="none")


def tokenwise_ops(*, compiled: bool, backend: str = "inductor") -> TokenwiseOps:
    """The plain functions, or compiled ones that serve any number of tokens."""
    if not compiled:
        return TokenwiseOps(Layer.before, Layer.after, _token_losses)
    before = torch.compile(Layer.before, fullgraph=True, backend=backend)
    after = torch.compile(Layer.after, fullgraph=True, backend=backend)
    token_losses = torch.compile(_token_losses, fullgraph=True, backend=backend)

    def any_length(*tensors: Tensor) -> None:
        for tensor in tensors:
            torch._dynamo.mark_dynamic(tensor, 0)

    def run_before(layer: Layer, stream: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> AttentionParts:
        any_length(stream, cos, sin)
        parts: AttentionParts = before(layer, stream, cos, sin, dtype)
        return parts

    def run_after(layer: Layer, stream: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        any_length(stream, attended)
        result: tuple[Tensor, Tensor] = after(layer, stream, attended)
        return result

    def run_token_losses(model: TinyModel, stream: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        any_length(stream, targets)
        losses: Tensor = token_losses(model, stream, targets, dtype)
        return losses

    return TokenwiseOps(run_before, run_after, run_token_losses)


@dataclass(slots=True)
class ForwardResult:
    """stream [T, D] fp32 after the last layer; loads: tokens per expert of each layer; losses summed over layers."""

    stream: Tensor
    loads: list[Tensor]
    index_loss: Tensor
    guide_loss: Tensor


def forward(
    model: TinyModel,
    tokens: Tensor,
    *,
    dtype: torch.dtype,
    ops: TokenwiseOps,
    sampled: Tensor | None = None,
    sparse: bool = False,
    statements: Statements | None = None,
) -> ForwardResult:
    """One pass over tokens [B, L].

    `sampled` [B, n]: the indexer's loss there; `sparse`: attend to its selection; `statements`: guide some heads.
    """
    config: TinyConfig = model.config
    batch, length = tokens.shape
    cos, sin = model.angles(torch.arange(length, device=tokens.device).repeat(batch))
    stream = model.model.embed_tokens(tokens.flatten()).float()
    loads: list[Tensor] = []
    loss, guided = stream.new_zeros(()), stream.new_zeros(())
    guide = None if statements is None else make_guide(statements)
    for i, layer in enumerate(model.model.layers):
        assert isinstance(layer, Layer)
        parts = ops.before(layer, stream, cos, sin, dtype)
        if guide is not None and i <= len(MATCH_HEADS):
            guided = guided + guide_loss(parts, guide, i, config.softmax_scale)
        allowed = None
        if sparse or sampled is not None:
            index = layer.self_attn.indexer(parts.hidden.detach(), parts.q_latent.detach(), cos, sin)
            if sparse:
                allowed = select(index, length, config.index_topk)
            if sampled is not None:
                loss = loss + index_loss(parts, index, sampled, config.softmax_scale, allowed)
        attended = attend(parts, length, config.softmax_scale, allowed)
        stream, load = ops.after(layer, stream, attended)
        loads.append(load)
    return ForwardResult(stream, loads, loss, guided)

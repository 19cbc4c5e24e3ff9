"""A DSA model as the engine drives it: one method per step between which the cache does its work.

The model knows tokens and layers; it knows no cache, no requests and no batch make-up.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from echo_batch.kernels.activation import Activation, quantization_for
from echo_batch.kernels.formats import IndexFormat, RowFormat
from echo_batch.kernels.ops import Ops
from echo_batch.kernels.parts import Result
from echo_batch.kernels.weights import Weight
from echo_batch.models import dsa
from echo_batch.models.config import ModelConfig
from echo_batch.models.dsa import Angles, AttentionInputs, Projected
from echo_batch.models.layers import ModelWeights, MoeWeights
from echo_batch.models.moe import mlp, moe
from echo_batch.models.rope import inverse_frequencies


class Stream(NamedTuple):
    """Residual stream between layers; `delta` is a layer's output that the next norm will add."""

    hidden: Tensor
    """[T, D] in the compute dtype"""
    delta: Result | None
    """[T, D] in the compute dtype, perhaps in parts that the norm adds up; or None: nothing to add"""


class Model:
    """Weights and methods of one model on one device. The engine treats a Stream as opaque."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        ops: Ops,
        *,
        row_format: RowFormat,
        index_format: IndexFormat,
    ) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops
        self.row_format = row_format
        self.index_format = index_format
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._frequencies = inverse_frequencies(config.rope, self.device)

    def embed(self, token_ids: Tensor) -> Stream:
        """token_ids int [T] -> Stream."""
        return Stream(F.embedding(token_ids, self.weights.embedding), None)

    def angles(self, positions: Tensor) -> Angles:
        """RoPE angles of positions int [T], for all layers."""
        return Angles(*self.ops.rope_angles(positions, self._frequencies))

    def project(self, layer: int, stream: Stream, angles: Angles) -> tuple[Stream, Projected]:
        """Norm and first projections of one layer. The first result is the stream for `attention_output`."""
        weights = self.weights.layers[layer]
        hidden, normed = self._norm(stream, weights.input_norm, weights.attention.fused_a)
        projected = dsa.project(
            self.ops, self.config, weights.attention, normed, angles, self.row_format, self.index_format
        )
        return Stream(hidden, None), projected

    def index_query(self, layer: int, projected: Projected, angles: Angles) -> tuple[Tensor, Tensor]:
        """The indexer's query and head weights on a layer that selects."""
        weights = self.weights.layers[layer].attention
        return dsa.index_query(self.ops, self.config, weights, projected, angles, self.index_format)

    def project_query(self, layer: int, projected: Projected, angles: Angles) -> Tensor:
        """The first half of attention's query, which nothing before attention needs; for `absorb_query`."""
        return dsa.project_query(self.ops, self.weights.layers[layer].attention, projected, angles)

    def absorb_query(self, layer: int, query: Tensor, angles: Angles) -> Tensor:
        """Attention's query [T, H, 576] of what `project_query` made."""
        weights = self.weights.layers[layer].attention
        return dsa.absorb_query(self.ops, self.config, weights, query, angles, self.index_format)

    def attention_inputs(self, layer: int, stream: Stream, angles: Angles) -> tuple[Stream, AttentionInputs]:
        """`project` and all queries, in fewer launches than apart."""
        stream, projected = self.project(layer, stream, angles)
        weights = self.weights.layers[layer].attention
        query, index_query, index_weights = dsa.all_queries(
            self.ops, self.config, weights, projected, angles, self.index_format
        )
        latents = projected.latents
        return stream, AttentionInputs(query, latents.kv_row, index_query, index_weights, latents.index_key)

    def attention_output(self, layer: int, stream: Stream, latent: Tensor) -> Stream:
        """Attended latent [T, H, 512] of one layer, through its output projection, onto the stream."""
        return Stream(self.sum(stream), dsa.attention_output(self.ops, self.weights.layers[layer].attention, latent))

    def ffn(self, layer: int, stream: Stream, valid: Tensor | None = None) -> Stream:
        """Norm and MLP or experts of one layer. Tokens with valid [T] False reach no routed expert."""
        weights = self.weights.layers[layer]
        first = weights.mlp.experts.gate_up if isinstance(weights.mlp, MoeWeights) else weights.mlp.gate_up
        hidden, normed = self._norm(stream, weights.post_attention_norm, first)
        if isinstance(weights.mlp, MoeWeights):
            return Stream(hidden, moe(self.ops, self.config, weights.mlp, normed, valid))
        return Stream(hidden, mlp(self.ops, weights.mlp, normed))

    def logits(self, stream: Stream) -> Tensor:
        """Final norm and output head: fp32 [T, V]."""
        _, normed = self._norm(stream, self.weights.norm, self.weights.head)
        return self.ops.linear_fp32(normed.values, self.weights.head)

    def _norm(
        self, stream: Stream, weight: Tensor, consumer: Weight, out: Activation | None = None
    ) -> tuple[Tensor, Activation]:
        """The stream's sum, and its norm in the form that `consumer` takes."""
        return self.ops.norm_activation(
            stream.hidden, stream.delta, weight, self.config.rms_norm_eps, quantization_for(consumer), out
        )

    def sum(self, stream: Stream, out: Tensor | None = None) -> Tensor:
        """The residual [T, D]: added in fp32, rounded to the compute dtype. `out` (which may be what `hidden` was made
        of) receives it."""
        if stream.delta is not None:
            return torch.add(stream.hidden, self.ops.add_parts(stream.delta), out=out)
        return stream.hidden if out is None else out.copy_(stream.hidden)

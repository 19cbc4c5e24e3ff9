"""Synthetic decode workloads on the real engine path: contexts without prefill, routing, drifting queries, one worker
of an expert-parallel deployment. Everything random is made on the device, inside the step where it changes by step.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from echo_batch.cache.manager import KVCache, OffloadedCache
from echo_batch.engine.batch import BatchState
from echo_batch.kernels.activation import Activation
from echo_batch.kernels.formats import BLOCK_SIZE
from echo_batch.kernels.ops import Ops
from echo_batch.kernels.parts import slice_rows
from echo_batch.models.config import ModelConfig
from echo_batch.models.dsa import Angles, Projected
from echo_batch.models.layers import MoeWeights
from echo_batch.models.model import Model, Stream
from echo_batch.models.moe import moe

_FILL_SLOTS = 65_536
"""Slots that are filled at a time."""


def fill_contexts(
    model: Model, cache: KVCache, ops: Ops, state: BatchState, *, batch: int, context: int, room: int, seed: int
) -> None:
    """Make the first `batch` rows active with `context` tokens each and room for `room` more, without prefill.

    KV rows and index keys are packed from standard normal values, so every kernel sees plausible numbers; rows are
    drawn from a table of 4,096 different ones. The GPU pool starts empty, or with everything while that fits it and
    the cache may be resident.
    """
    device = state.device
    config, spec = model.config, cache.spec
    generator = torch.Generator(device).manual_seed(seed)
    blocks_each = -(-(context + room) // BLOCK_SIZE)
    assert batch * blocks_each <= spec.num_blocks, "the contexts do not fit into the host pool"
    cache.reset()
    if isinstance(cache, OffloadedCache) and cache.resident and batch * blocks_each * BLOCK_SIZE > spec.gpu_tokens:
        cache.leave_residency(0, torch.empty(0, dtype=torch.int32, device=device))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=model.dtype)

    table_rows = ops.pack_kv_rows(
        normal(4096, config.kv_lora_rank), normal(4096, config.qk_rope_head_dim), spec.row_format
    )
    num_slots = batch * blocks_each * BLOCK_SIZE
    for start in range(0, num_slots, _FILL_SLOTS):
        slots = torch.arange(start, min(start + _FILL_SLOTS, num_slots), dtype=torch.int32, device=device)
        chosen = torch.randint(4096, slots.shape, generator=generator, device=device)
        for layer in range(spec.num_layers):
            cache.write_host(layer, slots, table_rows[chosen])
        for group in range(spec.num_groups):
            keys = ops.pack_index_keys(normal(slots.shape[0], config.index_head_dim), spec.index_format, True)
            cache.write_index(group, slots, keys)
    state.active.fill_(False)
    state.block_table.fill_(-1)
    rows = slice(0, batch)
    table = torch.arange(batch * blocks_each, dtype=torch.int32, device=device).view(batch, blocks_each)
    state.block_table[rows, :blocks_each] = table
    state.positions[rows] = context - 1
    state.last_position[rows] = context + room
    state.token_ids[rows] = torch.randint(config.vocab_size, (batch,), generator=generator, device=device)
    state.temperature[rows] = 0.0
    state.stop_ids[rows] = -1
    state.row_id[rows] = torch.arange(batch, device=device)
    state.predicted.fill_(float("nan"))
    state.active[rows] = True


def uniform_routing(ops: Ops, num_experts: int, device: torch.device) -> Ops:
    """Ops whose router draws independent experts for every token, under the model's group limit.

    With dummy weights nearly all tokens would pick the same experts and read few expert weights.
    """
    no_bias = torch.zeros(num_experts, device=device)

    def route(logits: Tensor, bias: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return ops.route(torch.randn_like(logits.view(-1, *logits.shape[-2:])[0]), no_bias, *rest, **options)

    return replace(ops, route=route)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadShape:
    """`locality` None leaves the indexer's queries to the model; else they follow an AR(1) process with this factor.

    `uniform_routing`: as the function of this name, with the numbers of all layers made at once. `ep_slice` n > 1: this
    is one of n workers; the other workers' tokens (as many each) reach the experts here too.
    """

    capacity: int
    locality: float | None = None
    uniform_routing: bool = False
    ep_slice: int = 1


class WorkloadModel(Model):
    """The model of a workload: the same layers, with drifting indexer queries and foreign expert tokens."""

    def __init__(self, model: Model, shape: WorkloadShape) -> None:
        super().__init__(
            model.config, model.weights, model.ops, row_format=model.row_format, index_format=model.index_format
        )
        self.shape = shape
        heads, dim = self.config.index_n_heads, self.config.index_head_dim
        groups = len(self.config.group_layers)
        if shape.locality is not None:
            self._drift = torch.randn(groups, shape.capacity, heads, dim, device=self.device)
            self._drift_weights = torch.rand(groups, shape.capacity, heads, device=self.device) * heads**-0.5
            self._queries, self._weights = self._drift.to(self.dtype), self._drift_weights
        moe_layers = [i for i, layer in enumerate(self.weights.layers) if isinstance(layer.mlp, MoeWeights)]
        self._place_of_layer = {layer: place for place, layer in enumerate(moe_layers)}
        tokens = shape.ep_slice * shape.capacity
        if shape.uniform_routing and moe_layers:
            self._logits = torch.randn(len(moe_layers), tokens, self.config.n_routed_experts, device=self.device)
            self._no_bias = torch.zeros(self.config.n_routed_experts, device=self.device)
            self._model_ops, self._place = self.ops, 0
            self.ops = replace(self.ops, route=self._route)
        if shape.ep_slice > 1 and moe_layers:
            # All workers' tokens in one batch, as after an all-gather: this worker's are written to the first rows.
            stream = Stream(torch.randn(tokens, self.config.hidden_size, device=self.device, dtype=self.dtype), None)
            first = self.weights.layers[moe_layers[0]]
            assert isinstance(first.mlp, MoeWeights)
            self._everyone = self._norm(stream, first.post_attention_norm, first.mlp.experts.gate_up)[1]
            self._valid: Tensor | None = None

    def restart(self, seed: int) -> None:
        """From here on the same random numbers, experts and queries, whenever `seed` is the same."""
        torch.manual_seed(seed)
        if self.shape.locality is not None:
            self._drift.normal_()
            self._drift_weights.uniform_().mul_(self._drift.shape[2] ** -0.5)

    def _route(self, logits: Tensor, bias: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return self._model_ops.route(self._logits[self._place, : logits.shape[-2]], self._no_bias, *rest, **options)

    def distinct_experts(self, rows: int) -> float | None:
        """Routed experts of this worker that a batch of `rows` reached in the last step: mean of the MoE layers.

        None without uniform routing. Waits for the device.
        """
        if not self.shape.uniform_routing or not self._place_of_layer:
            return None
        config, counts = self.config, []
        for layer, place in self._place_of_layer.items():
            weights = self.weights.layers[layer].mlp
            assert isinstance(weights, MoeWeights)
            _, experts = self._model_ops.route(
                self._logits[place, : self.shape.ep_slice * rows],
                self._no_bias,
                config.n_group,
                config.topk_group,
                config.num_experts_per_tok,
                config.norm_topk_prob,
                config.routed_scaling_factor,
                held=range(weights.first_expert, weights.first_expert + weights.num_held),
            )
            counts.append(experts[experts >= 0].unique().numel())
        return sum(counts) / len(counts)

    def embed(self, token_ids: Tensor) -> Stream:
        """The model's; also one step of the queries' AR(1) process, and new router logits, for all layers at once."""
        if self.shape.uniform_routing and self._place_of_layer:
            self._logits.normal_()
        if self.shape.locality is not None:
            rho = self.shape.locality
            self._drift.mul_(rho).add_(torch.randn_like(self._drift), alpha=(1 - rho * rho) ** 0.5)
            self._queries, self._weights = self._drift.to(self.dtype), self._drift_weights
            if self.index_format.kind == "fp8":
                values, scale = self.ops.quantize_index_query(self._queries.flatten(0, 1), True)
                self._queries = values.unflatten(0, self._drift.shape[:2])
                self._weights = self._drift_weights * scale.view_as(self._drift_weights)
        return super().embed(token_ids)

    def index_query(self, layer: int, projected: Projected, angles: Angles) -> tuple[Tensor, Tensor]:
        """The model's, computed and replaced by the drifting one."""
        own = super().index_query(layer, projected, angles)
        if self.shape.locality is None:
            return own
        group, rows = self.config.layers[layer].selection_group, own[0].shape[0]
        return self._queries[group, :rows], self._weights[group, :rows]

    def ffn(self, layer: int, stream: Stream, valid: Tensor | None = None) -> Stream:
        """The model's; with `ep_slice` the experts also serve other workers' tokens, whose results go."""
        weights = self.weights.layers[layer].mlp
        if not isinstance(weights, MoeWeights):
            return super().ffn(layer, stream, valid)
        self._place = self._place_of_layer[layer]
        if self.shape.ep_slice == 1:
            return super().ffn(layer, stream, valid)
        rows = stream.hidden.shape[0]
        everyone, own = (_first_rows(self._everyone, n) for n in (self.shape.ep_slice * rows, rows))
        hidden, _ = self._norm(stream, self.weights.layers[layer].post_attention_norm, weights.experts.gate_up, out=own)
        if valid is not None and self._place == 0:  # the same in all layers of a step
            self._valid = F.pad(valid, (0, everyone.values.shape[0] - rows), value=True)
        mask = None if valid is None else self._valid
        out = moe(self.ops, self.config, weights, everyone, mask, num_shared=rows)
        return Stream(hidden, slice_rows(out, 0, rows))


def _first_rows(x: Activation, num_rows: int) -> Activation:
    return Activation(*(None if part is None else part[:num_rows] for part in x))  # type: ignore[arg-type]


def expert_slice(config: ModelConfig, ep_slice: int) -> range:
    """The experts that one of `ep_slice` workers holds (the first one's)."""
    assert config.n_routed_experts % ep_slice == 0, (config.n_routed_experts, ep_slice)
    return range(config.n_routed_experts // ep_slice)

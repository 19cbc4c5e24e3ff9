"""When to stop decoding and prefill: a pure function of what could be prefilled now. Knows no torch.

The goal is the makespan of the whole job. Prefilling a token costs the same whenever it is done, and so does a batch
row's own part of a decode step. Two costs depend on the moment. Every prefill group has a fixed cost (each weight is
read, a shared prefix is read from the host), which argues for few, large groups. Every decode step has a fixed cost
that its rows share, so a row that could run and does not makes the job longer by its share of a step; which argues for
starting at once. Waiting until what was missed equals the fixed cost of the group is the economic order quantity: the
best period for rows that become free at a steady rate, and at most twice the best cost whatever the rate.

Costs are modelled from the plan, not measured: the same job then makes the same batches, and so the same last bits.
"""

import math
from dataclasses import dataclass

from echo_batch.engine.memory import group_token_bytes, loaded_token_bytes, weight_bytes
from echo_batch.engine.plan import Plan
from echo_batch.models.sizes import prefill_flops

MAX_WAIT_STEPS = 256
"""Decode steps that a request which could start waits at most."""

_MEMORY_BYTES_PER_SECOND = {"cuda": 4e12, "cpu": 2e10}
_HOST_BYTES_PER_SECOND = {"cuda": 5e10, "cpu": 1e10}
"""For reading prefixes from the host pool."""
_PREFILL_FLOPS = 5e14
"""What prefill reaches per second, all its kernels together."""
_STEP_LAYER_SECONDS = {"cuda": 5e-5, "cpu": 1e-3}
_GROUP_LAYER_SECONDS = {"cuda": 1e-3, "cpu": 2e-3}
"""Launches and latencies of one layer: a captured decode step, and a prefill group, which is launched op by op."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The costs that depend on when prefill happens, in seconds.

    `step_seconds`: of a decode step, without what each row adds. `group_seconds`: of a prefill group, without what each
    token adds. `load_seconds`: of reading one prefix token (all layers) from the host pool.
    """

    step_seconds: float
    group_seconds: float
    load_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """The requests that have their place in the batch and could be prefilled together now.

    `complete`: waiting would not make the group larger (it is full, or no request is left). `missed_row_steps`: decode
    steps that its rows have missed, summed over rows; `waited_steps`: those that the first of them has missed.
    `groups_since_step`: groups that were prefilled since the last decode step.
    """

    num_rows: int
    num_running: int
    loaded_tokens: int
    complete: bool
    missed_row_steps: int
    waited_steps: int
    groups_since_step: int
    max_num_seqs: int


def should_prefill(group: GroupState, costs: Costs) -> bool:
    """Whether to prefill the whole group before the next decode step."""
    if not group.num_rows:
        return False
    if not group.num_running:
        return True
    if group.groups_since_step >= group.max_num_seqs:
        return False  # enough groups to fill the batch: requests that end with their first token must not stop the rest
    if group.complete or group.waited_steps >= MAX_WAIT_STEPS:
        return True
    missed = costs.step_seconds * group.missed_row_steps / (group.num_running + group.num_rows)
    return missed >= costs.group_seconds + costs.load_seconds * group.loaded_tokens


def modelled_costs(plan: Plan) -> Costs:
    """Costs of a worker of this plan, from the bytes that it must read."""
    model, kind = plan.model, plan.device
    total = plan.device_memory.weights
    parts = weight_bytes(model, dtype=plan.dtype, keep_fp8=kind == "cuda" and plan.dtype == "bfloat16")
    experts = total * (1 - parts.replicated / parts.per_worker(plan.num_workers))
    # A prefill chunk finds use for every expert, a decode step for those that some row was sent to.
    touched = 0.0
    if experts:
        touched = 1 - (1 - model.num_experts_per_tok / model.n_routed_experts) ** (plan.max_num_seqs * plan.num_workers)
    bandwidth, layers = _MEMORY_BYTES_PER_SECOND[kind], model.num_layers
    token_bytes = layers * plan.cache.row_format.row_bytes
    load_bandwidth = _HOST_BYTES_PER_SECOND[kind] if plan.cache.offload else bandwidth
    return Costs(
        step_seconds=(total - (1 - touched) * experts) / bandwidth + layers * _STEP_LAYER_SECONDS[kind],
        group_seconds=total / bandwidth + layers * _GROUP_LAYER_SECONDS[kind],
        load_seconds=token_bytes / load_bandwidth,
    )


def loaded_token_share(plan: Plan) -> float:
    """Memory of a prefix token that a prefill group reads from the host pool, as a share of a computed token's."""
    row, index = plan.cache.row_format, plan.cache.index_format
    computed = group_token_bytes(plan.model, dtype=plan.dtype, row=row, index=index)
    return loaded_token_bytes(plan.model, row=row, index=index) / computed


def streamed_per_token(plan: Plan) -> float:
    """Prefix tokens whose rows of a layer come from the host while that layer is computed for one token.

    A prefix up to so many times as long as what is computed is read whole, under the compute of the layer before.
    Beyond, reading it would take longer than the compute, and only what is selected is read.
    """
    if plan.device == "cpu" or not plan.cache.offload:
        return math.inf
    model, tokens = plan.model, 4096
    compute = prefill_flops(model, 0, tokens) / tokens / model.num_layers / _PREFILL_FLOPS
    return compute * _HOST_BYTES_PER_SECOND[plan.device] / plan.cache.row_format.row_bytes

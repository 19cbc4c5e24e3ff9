"""From a plan to an engine: load the weights, allocate the cache, pick the ops."""

from collections.abc import Callable
from pathlib import Path

import torch

from echo_batch.cache.manager import KVCache, make_cache
from echo_batch.config import RunConfig
from echo_batch.engine.batch import BatchState
from echo_batch.engine.core import EngineCore
from echo_batch.engine.plan import Plan
from echo_batch.engine.residency import resident_buckets, stays_resident
from echo_batch.engine.runner import EagerRunner, GraphRunner, Runner, StepShape
from echo_batch.engine.schedule import open_schedule
from echo_batch.engine.stops import Detokenizer
from echo_batch.kernels.ops import Ops
from echo_batch.kernels.select import select_ops
from echo_batch.models.config import ModelConfig
from echo_batch.models.loader import load_model
from echo_batch.models.model import Model

Progress = Callable[[int, int], None]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_core(
    model_config: ModelConfig,
    config: RunConfig,
    plan: Plan,
    *,
    make_detokenizer: Callable[[], Detokenizer] | None = None,
    progress: Progress | None = None,
) -> EngineCore:
    """Load the model that `plan` was made for and allocate its cache.

    `progress(bytes_read, bytes_total)` is told of weights as they load. Raises ModelError for a checkpoint that does
    not hold what its config promises and ConfigError for a host pool that the machine refuses.
    """
    plan.require_fit()
    schedule, plan = open_schedule(config.engine.schedule, plan)
    device = torch.device(plan.device)
    ops = select_ops(device)
    # The pools come first: they fail early and cheaply when the machine does not have what the plan counted on.
    residency = config.cache.residency == "auto"
    cache = make_cache(plan.cache, device, ops, poison=config.cache.poison, residency=residency)
    try:
        model = load_model(
            model_config,
            None if config.model.path is None else Path(config.model.path),
            device=device,
            dtype=DTYPES[plan.dtype],
            row_kind=plan.cache.row_format.kind,
            ops=ops,
            load_format=config.model.load_format,
            seed=config.sampling.seed,
            progress=progress,
        )
    except BaseException:
        cache.close()
        raise
    core = assemble_core(
        model, cache, ops, plan, eos_token_ids=model_config.eos_token_ids, make_detokenizer=make_detokenizer
    )
    core.schedule = schedule
    if isinstance(core.runner, GraphRunner):
        core.runner.capture(step_shapes(plan, residency=residency, greedy_only=config.sampling.temperature == 0))
    return core


def step_shapes(plan: Plan, *, residency: bool, greedy_only: bool) -> list[StepShape]:
    """The steps that a run is expected to launch: managed ones unless everything fits the GPU pool, and resident ones
    for the batches that fit it."""
    resident, managed = plan.decode_buckets, plan.decode_buckets
    if plan.cache.offload:
        resident = resident_buckets(plan) if residency else ()
        managed = () if residency and stays_resident(plan) else managed
    else:
        managed = ()
    return [
        StepShape(bucket=bucket, greedy_only=greedy_only, resident=kind)
        for kind, buckets in ((False, managed), (True, resident))
        for bucket in buckets
    ]


def assemble_core(
    model: Model,
    cache: KVCache,
    ops: Ops,
    plan: Plan,
    *,
    eos_token_ids: tuple[int, ...],
    make_detokenizer: Callable[[], Detokenizer] | None = None,
) -> EngineCore:
    """The engine over a loaded model and an allocated cache."""
    device = torch.device(plan.device)
    state = BatchState.allocate(plan.max_num_seqs, plan.max_model_len, plan.cache.num_groups, device)
    runner: Runner
    if device.type == "cuda":
        runner = GraphRunner(model, cache, ops, state, depth=plan.lookahead_steps + 1)
    else:
        runner = EagerRunner(model, cache, ops, state)
    return EngineCore(
        model=model,
        cache=cache,
        ops=ops,
        plan=plan,
        device=device,
        state=state,
        runner=runner,
        eos_token_ids=eos_token_ids,
        make_detokenizer=make_detokenizer,
    )

"""From a plan to an engine: load the weights, allocate the cache, pick the ops."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from echo_batch.cache.manager import KVCache, make_cache
from echo_batch.config import RunConfig
from echo_batch.engine.batch import BatchState
from echo_batch.engine.core import EngineCore
from echo_batch.engine.plan import Plan
from echo_batch.engine.precompile import Precompiler
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
    residency = config.cache.residency == "auto"
    shapes = step_shapes(plan, residency=residency, greedy_only=config.sampling.temperature == 0)
    started = time.perf_counter()
    with (
        _PoolsBeside(plan, config, device, ops) as pools,
        Precompiler(plan, shapes, select_ops(device)) as precompiler,
    ):

        def told(done: int, total: int) -> None:
            pools.raise_if_failed()
            if progress is not None:
                progress(done, total)

        model = load_model(
            model_config,
            None if config.model.path is None else Path(config.model.path),
            device=device,
            dtype=DTYPES[plan.dtype],
            row_kind=plan.cache.row_format.kind,
            ops=ops,
            load_format=config.model.load_format,
            seed=config.sampling.seed,
            progress=told,
            first_layers=precompiler.start if compiles_kernels(device) and config.engine.precompile == "auto" else None,
        )
        seconds = {"weights": time.perf_counter() - started}
        cache = pools.result()
        seconds["pools"] = pools.seconds
        # Before graphs are captured, as nobody else may allocate or compile meanwhile.
        precompiler.join()
        if precompiler.seconds is not None:
            seconds["compile"] = precompiler.seconds
        core = assemble_core(
            model, cache, ops, plan, eos_token_ids=model_config.eos_token_ids, make_detokenizer=make_detokenizer
        )
        core.schedule = schedule
        if isinstance(core.runner, GraphRunner):
            core.runner.capture(shapes)
            seconds["capture"] = core.runner.report.seconds
        core.startup_seconds = seconds
        pools.keep()
    return core


def compiles_kernels(device: torch.device) -> bool:
    """Whether ops of this device compile kernels at their first use."""
    return device.type == "cuda"


class _PoolsBeside:
    """The cache of a plan, made in a thread while the weights load: touching and pinning the host pool takes seconds
    per 10 GB and none of what loading needs. A context manager that closes the cache unless it is told to keep it."""

    def __init__(self, plan: Plan, config: RunConfig, device: torch.device, ops: Ops) -> None:
        self.seconds = 0.0
        self._kept = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pools")
        # Which device is current is a matter of each thread.
        index = torch.cuda.current_device() if device.type == "cuda" else -1

        def make() -> KVCache:
            started = time.perf_counter()
            with torch.cuda.device(index):
                cache = make_cache(
                    plan.cache,
                    device,
                    ops,
                    poison=config.cache.poison,
                    residency=config.cache.residency == "auto",
                )
            self.seconds = time.perf_counter() - started
            return cache

        self._making = self._thread.submit(make)

    def __enter__(self) -> "_PoolsBeside":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        if not self._kept and self._making.exception() is None:
            self._making.result().close()

    def raise_if_failed(self) -> None:
        """Loading need not go on when the machine does not have what the plan counted on."""
        if self._making.done():
            self._making.result()

    def result(self) -> KVCache:
        """The cache; waits for it."""
        return self._making.result()

    def keep(self) -> None:
        """The cache now belongs to someone else."""
        self._kept = True


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

"""Kernels of a run compiled while its weights still load: a few steps over the first layers, in a thread of their own.

A kernel is compiled at its first launch, for the shapes and sizes that it is launched with. So the thread launches what
the run will launch, decode steps of every bucket and a prefill, over layers that are loaded already (one of each kind)
and a small cache and a batch of its own. Nothing that the run computes comes from here, and without it the same kernels
are compiled later, at their first use.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import fields, replace
from functools import wraps
from typing import Any

import torch

from echo_batch.cache.manager import KVCache, make_cache
from echo_batch.cache.spec import CacheSpec
from echo_batch.engine.batch import BatchState
from echo_batch.engine.plan import Plan
from echo_batch.engine.prefill import Prompt, prefill
from echo_batch.engine.runner import EagerRunner, StepShape
from echo_batch.kernels.formats import BLOCK_SIZE
from echo_batch.kernels.ops import Ops
from echo_batch.models.model import Model
from echo_batch.sizes import round_up_to_block

logger = logging.getLogger("echo_batch")

_GPU_TOKENS = 4096
"""Of the small cache. Kernels see the sizes of pools as numbers of which only 'a multiple of 16' is compiled in."""


class Precompiler:
    """Compiles what steps of `shapes` and prefills launch; a context manager, at whose end no thread is left.

    `start` it with a model of some layers, then `join` before anything else compiles kernels or captures graphs. What
    goes wrong in between is logged and otherwise without consequence. `ops`: a set that nothing else uses.
    """

    def __init__(self, plan: Plan, shapes: Sequence[StepShape], ops: Ops) -> None:
        self.seconds: float | None = None
        """From start to end, once it has ended."""
        self._plan = plan
        self._shapes = sorted(shapes, key=lambda shape: -shape.bucket)
        self._stopping = threading.Event()
        self._ops = _stoppable(ops, self._stopping)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="precompile")
        self._running: Future[None] | None = None

    def __enter__(self) -> "Precompiler":
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.shutdown()

    def start(self, model: Model) -> None:
        """Begin with the layers of `model`, whose weights are there as soon as the current stream has come here."""
        assert self._running is None, "started twice"
        loaded = torch.cuda.current_stream(model.device).record_event() if model.device.type == "cuda" else None
        # Which device is current is a matter of each thread.
        index = torch.cuda.current_device() if model.device.type == "cuda" else -1
        self._running = self._thread.submit(self._run, model, index, loaded)

    def join(self) -> None:
        """Wait for the end, if it was started; its memory is free for others then."""
        if self._running is None:
            return
        self._running.result()
        if torch.cuda.is_initialized():
            # What the allocator keeps for the thread's stream would never be used again.
            torch.cuda.empty_cache()

    def _run(self, model: Model, index: int, loaded: "torch.cuda.Event | None") -> None:
        started = time.perf_counter()
        try:
            with torch.cuda.device(index):
                self._compile(model, loaded)
        except _Stopped:
            pass
        except Exception as error:  # whatever it is: the run itself will meet it again if it matters
            what = (str(error).splitlines() or [""])[0]
            logger.warning("kernels are compiled at their first use: %s: %s", type(error).__name__, what)
        self.seconds = time.perf_counter() - started

    def _compile(self, model: Model, loaded: "torch.cuda.Event | None") -> None:
        device = model.device
        model = Model(
            model.config, model.weights, self._ops, row_format=model.row_format, index_format=model.index_format
        )
        stream = None if loaded is None else torch.cuda.Stream(device)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            if stream is not None and loaded is not None:
                stream.wait_event(loaded)
            prompts = sample_prompts(self._plan, model.config.vocab_size)
            num_blocks = 1 + max(max(prompt.blocks) for prompt in prompts)
            spec = small_spec(self._plan.cache, model.config.group_layers, num_blocks * BLOCK_SIZE)
            with closing(make_cache(spec, device, self._ops)) as cache:
                try:
                    self._decode(model, cache)
                    self._prefill(model, cache, prompts)
                    cache.release(range(num_blocks))
                finally:
                    if stream is not None:
                        # The weights and the cache may go away now. All streams: a step may have been left on a branch.
                        torch.cuda.synchronize(device)

    def _decode(self, model: Model, cache: KVCache) -> None:
        """A step of each shape, over rows that are all inactive, as when graphs are captured."""
        plan = self._plan
        state = BatchState.allocate(plan.max_num_seqs, plan.max_model_len, cache.spec.num_groups, model.device)
        runner = EagerRunner(model, cache, self._ops, state)
        for shape in self._shapes:
            runner.launch(shape, max_blocks=state.block_table.shape[1], num_logprobs=None)

    def _prefill(self, model: Model, cache: KVCache, prompts: Sequence[Prompt]) -> None:
        """One prompt after the other: a later one may begin with blocks of an earlier one."""
        for prompt in prompts:
            chunk = self._plan.prefill_chunk_tokens
            for _ in prefill(model, cache, self._ops, [prompt], chunk_tokens=chunk, on_device=model.device):
                pass


def small_spec(planned: CacheSpec, group_layers: tuple[tuple[int, ...], ...], host_tokens: int) -> CacheSpec:
    """A cache of `host_tokens` (whole blocks) for other layers, for which the same kernels are compiled as for
    `planned`: of its sizes only the number of rows set aside for prefetch need not be a multiple of 16."""
    gpu_tokens = host_tokens
    if planned.offload:
        gpu_tokens = _GPU_TOKENS + (BLOCK_SIZE if planned.prefetch_rows % 16 else 0)
    return replace(planned, group_layers=group_layers, host_tokens=host_tokens, gpu_tokens=gpu_tokens)


def sample_prompts(plan: Plan, vocab_size: int) -> list[Prompt]:
    """A prompt that fills a chunk, and one whose number of tokens has no factor 16, behind a block of the first.

    Between them they meet everything that a prefill of this plan launches: long contexts, whose tokens are selected, if
    there can be such, and a prefix in the cache.
    """
    room = plan.max_model_len
    first = min(plan.prefill_chunk_tokens, room)
    prompts = [_prompt(first, vocab_size, blocks=list(range(-(-first // BLOCK_SIZE))))]
    second = min(round_up_to_block(plan.cache.index_topk) + BLOCK_SIZE + 1, room - 1 + room % 2)
    if second > BLOCK_SIZE < first:
        start = len(prompts[0].blocks)
        own = range(start, start - 1 + -(-second // BLOCK_SIZE))
        prompts.append(_prompt(second, vocab_size, blocks=[0, *own], num_cached=BLOCK_SIZE))
    return prompts


def _prompt(length: int, vocab_size: int, *, blocks: list[int], num_cached: int = 0) -> Prompt:
    # Different tokens, so that they reach different experts.
    return Prompt(token_ids=[i % vocab_size for i in range(length)], blocks=blocks, num_cached=num_cached)


class _Stopped(Exception):
    """Nobody needs the kernels any more."""


def _stoppable(ops: Ops, stopping: threading.Event) -> Ops:
    """The same ops, each of which raises _Stopped once `stopping` is set: a whole step may compile for many seconds."""

    def checked(op: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(op)
        def call(*arguments: Any, **options: Any) -> Any:
            if stopping.is_set():
                raise _Stopped
            return op(*arguments, **options)

        return call

    return replace(ops, **{field.name: checked(getattr(ops, field.name)) for field in fields(ops)})

"""Which variants of the Triton kernels a precompiler's decode steps launch, and which those of a run whose pools are
larger: `python -m tests.engine.launch_keys CHECKPOINT` prints both sets. Nothing is compiled or run: launches are only
looked at. Needs a process of its own: kernels are made by mode when they are imported."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from echo_batch.cache.manager import KVCache, make_cache
from echo_batch.cache.spec import CacheSpec
from echo_batch.engine.batch import BatchState
from echo_batch.engine.precompile import small_spec
from echo_batch.engine.runner import EagerRunner, StepShape
from echo_batch.kernels.cache_ops import triton_cache_ops
from echo_batch.kernels.gpu_ops import GpuLibraries, cuda_ops
from echo_batch.kernels.ops import reference_ops
from echo_batch.models.config import ModelConfig
from echo_batch.models.loader import load_model
from echo_batch.models.model import Model

CPU = torch.device("cpu")


def look_at_launches() -> set[str]:
    """From now on a launch only adds its kernel's name and variant to the set that is returned."""
    seen: set[str] = set()
    target = GPUTarget("cuda", 90, 32)
    driver = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: target
    )
    triton.runtime.driver.set_active(driver)
    run = JITFunction.run

    def look(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    def note(self: Any, key: Any, *_: Any) -> None:
        seen.add(f"{self.fn.__name__} {key}")

    JITFunction.run = look  # type: ignore[method-assign]
    JITFunction._do_compile = note  # type: ignore[method-assign]
    return seen


def launch(model: Model, cache: KVCache, shapes: list[StepShape]) -> None:
    """Steps as a precompiler or a capture makes them, and what the cache does after a prefill and at an end."""
    state = BatchState.allocate(8, 16384, cache.spec.num_groups, CPU)
    runner = EagerRunner(model, cache, model.ops, state)
    for shape in shapes:
        runner.launch(shape, max_blocks=state.block_table.shape[1], num_logprobs=None)
    rows = torch.zeros(64, cache.spec.row_format.row_bytes, dtype=torch.uint8)
    slots = torch.zeros(64, dtype=torch.int32)
    for group, layers in enumerate(cache.spec.group_layers):
        for layer in layers:
            cache.write_host(layer, slots, rows)
            cache.read_host(layer, slots)
        cache.warm(group, slots, [rows for _ in layers])
    cache.release([0, 1])


def main() -> None:
    seen = look_at_launches()
    path = Path(sys.argv[1])
    config = ModelConfig.from_dir(path)
    ops = cuda_ops(reference_ops(), GpuLibraries(None, None, False))
    told: list[Model] = []
    model = load_model(
        config, path, device=CPU, dtype=torch.bfloat16, row_kind="fp8", ops=ops, first_layers=told.append
    )
    planned = CacheSpec(
        group_layers=config.group_layers,
        row_format=model.row_format,
        index_format=model.index_format,
        index_topk=config.index_topk,
        host_tokens=1 << 17,
        gpu_tokens=(1 << 15) + 64,
    )
    shapes = [StepShape(bucket=b, greedy_only=True, resident=r) for b in (8, 3, 1) for r in (False, True)]
    found = []
    for of, spec in ((told[0], small_spec(planned, told[0].config.group_layers, 20_032)), (model, planned)):
        seen.clear()
        launch(of, make_cache(spec, CPU, ops, cache_ops=triton_cache_ops()), shapes)
        found.append(sorted(seen))
    print(json.dumps(found))


if __name__ == "__main__":
    main()

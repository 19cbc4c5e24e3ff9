"""Kernels are compiled beside loading: by the launches of a run, on layers of their own, and never to its harm."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from echo_batch.cache.spec import CacheSpec
from echo_batch.config import CacheConfig, EngineConfig, ModelSourceConfig, RunConfig, Size
from echo_batch.engine import build
from echo_batch.engine.plan import Plan, make_plan
from echo_batch.engine.precompile import Precompiler, sample_prompts, small_spec
from echo_batch.engine.runner import StepShape
from echo_batch.errors import ModelError
from echo_batch.kernels.formats import IndexFormat, RowFormat
from echo_batch.kernels.ops import Ops, reference_ops
from echo_batch.models.config import ModelConfig
from echo_batch.models.loader import load_model, num_first_layers
from echo_batch.models.model import Model
from echo_batch.request import Request
from tests.checkpoints import Family
from tests.engine.engines import CPU, GREEDY, make_requests, run_all, tiny_plan, tokens_of
from tests.geometries import GLM5, GLM52, V32
from tests.models.oracle import CheckpointFixture

SHAPES = [
    StepShape(bucket=bucket, greedy_only=greedy, resident=resident)
    for bucket, greedy, resident in ((1, True, False), (4, True, True), (2, False, False))
]


def spied(spy: Callable[[str], None], ops: Ops | None = None) -> Ops:
    """Ops that tell their name before they run."""
    ops = ops or reference_ops()

    def told(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            spy(name)
            return getattr(ops, name)(*arguments, **options)

        return call

    return replace(ops, **{field.name: told(field.name) for field in fields(ops)})


def requests() -> list[Request]:
    return make_requests(replace(GREEDY, max_tokens=4), lengths=(70,))


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Any:
    threads = threading.active_count()
    yield
    until = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() == threads


@pytest.fixture
def job(tiny_checkpoint: CheckpointFixture) -> tuple[ModelConfig, RunConfig, Plan]:
    path = tiny_checkpoint("v32", "bf16") / "model"
    config = RunConfig(
        model=ModelSourceConfig(path=str(path)),
        cache=CacheConfig(host_pool=Size("tokens", 1024), gpu_pool=Size("tokens", 320)),
        engine=EngineConfig(device="cpu", max_num_seqs=2, prefill_chunk_tokens=128),
    )
    model = ModelConfig.from_dir(path)
    return model, config, make_plan(model, config, CPU, None)


@pytest.fixture
def as_if_compiling(monkeypatch: pytest.MonkeyPatch) -> Callable[[Ops], None]:
    """Start engines as on a GPU, with these ops for what compiles."""

    def use(ops: Ops) -> None:
        monkeypatch.setattr(build, "compiles_kernels", lambda device: True)
        monkeypatch.setattr(build, "Precompiler", lambda plan, shapes, _: Precompiler(plan, shapes, ops))

    return use


def first_layers(path: Path) -> Model:
    told: list[Model] = []
    load_model(
        ModelConfig.from_dir(path),
        path,
        device=torch.device("cpu"),
        dtype=torch.float32,
        row_kind="fp32",
        ops=reference_ops(),
        first_layers=told.append,
    )
    return told[0]


@pytest.mark.parametrize("family", ["v32", "glm52"])
def test_it_launches_what_a_run_launches(tiny_checkpoint: CheckpointFixture, family: Family) -> None:
    calls = Counter[str]()
    model = first_layers(tiny_checkpoint(family, "bf16") / "model")
    plan = tiny_plan(model, chunk=128)
    with Precompiler(plan, SHAPES, spied(lambda name: calls.update([name]))) as precompiler:
        assert precompiler.seconds is None
        precompiler.start(model)
        precompiler.join()
    assert precompiler.seconds is not None and precompiler.seconds > 0
    groups = len(model.config.group_layers)
    assert (calls["greedy_sample"], calls["sample"]) == (2, 1)
    assert calls["index_scores_paged"] == calls["topk_positions"] == 3 * groups
    # Of a prefill: selection by score, a prefix read from the pools, and no op that nobody has launched.
    assert calls["index_scores_contiguous"] and calls["topk_rows"] and calls["read_index_keys"]
    unused = {"token_logprobs", "pack_kv_rows", "pack_index_keys", "quantize_index_query", "convert_kv_rows"}
    assert {field.name for field in fields(Ops)} - unused <= calls.keys()


def test_a_start_with_it_gives_the_same_tokens(
    job: tuple[ModelConfig, RunConfig, Plan],
    as_if_compiling: Callable[[Ops], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = tokens_of(run_all(build.build_core(*job), requests()))
    events: list[str] = []
    begun = threading.Event()
    as_if_compiling(spied(lambda name: (events.append(name), begun.set())[0]))

    def told(done: int, total: int) -> None:
        # The last tensor takes as long as the thread needs to begin: this checkpoint is read too fast.
        assert done < total or begun.wait(10)
        events.append("read")

    assemble = build.assemble_core

    def assembled(*arguments: Any, **options: Any) -> Any:
        events.append("assemble")
        return assemble(*arguments, **options)

    monkeypatch.setattr(build, "assemble_core", assembled)
    core = build.build_core(*job, progress=told)
    assert core.startup_seconds.keys() == {"weights", "pools", "compile"}
    assert core.startup_seconds["compile"] > 0
    # It begins before the last tensor is read and has ended when there is something to capture.
    ops = [i for i, event in enumerate(events) if event not in ("read", "assemble")]
    last_read = max(i for i, event in enumerate(events) if event == "read")
    assert ops[0] < last_read and ops[-1] < events.index("assemble")
    assert tokens_of(run_all(core, requests())) == expected


def test_a_failure_is_logged_and_nothing_else(
    job: tuple[ModelConfig, RunConfig, Plan],
    as_if_compiling: Callable[[Ops], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(name: str) -> None:
        if name == "sparse_mla":
            raise RuntimeError("no compiler\nand a long log")

    as_if_compiling(spied(fail))
    with caplog.at_level(logging.WARNING, logger="echo_batch"):
        core = build.build_core(*job)
    assert [r.getMessage() for r in caplog.records] == [
        "kernels are compiled at their first use: RuntimeError: no compiler"
    ]
    assert "compile" in core.startup_seconds
    assert len(tokens_of(run_all(core, requests()))[0]) == 4


def test_a_start_that_fails_does_not_wait_for_all_of_it(
    job: tuple[ModelConfig, RunConfig, Plan],
    as_if_compiling: Callable[[Ops], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun, failed = threading.Event(), threading.Event()
    calls: list[str] = []

    def slow(name: str) -> None:
        calls.append(name)
        begun.set()
        assert failed.wait(10)

    def told(done: int, total: int) -> None:
        if done == total:
            # The thread stands inside its first op, which ends only after the start has been given up.
            assert begun.wait(10)
            threading.Timer(0.1, failed.set).start()
            raise ModelError("broken file")

    as_if_compiling(spied(slow))
    with pytest.raises(ModelError, match="broken"):
        build.build_core(*job, progress=told)
    assert len(calls) == 1 and not caplog.records


@pytest.mark.parametrize("config", [V32, GLM5, GLM52], ids=["v32", "glm5", "glm52"])
def test_first_layers_have_every_kind(config: dict[str, object]) -> None:
    model = ModelConfig.from_hf_dict(config)
    number = num_first_layers(model)
    kinds = [(layer.mlp, layer.indexer) for layer in model.layers]
    assert set(kinds[:number]) == set(kinds) != set(kinds[: number - 1])
    assert number <= 7 and replace(model, layers=model.layers[:number]).group_layers[0] == (0,)


@pytest.mark.parametrize("gpu_tokens", [320, 4096 + 64, 65536, 131072 + 64, 350_016])
@pytest.mark.parametrize("prefetch", ["off", "fused"])
def test_sizes_of_the_small_cache_compile_the_same_kernels(gpu_tokens: int, prefetch: Any) -> None:
    """Triton compiles in whether an integer is 1 and whether it is a multiple of 16."""
    planned = CacheSpec(
        group_layers=((0,), (1,), (2,)),
        row_format=RowFormat("fp8"),
        index_format=IndexFormat("fp8"),
        index_topk=2048,
        host_tokens=1_800_000 // 64 * 64,
        gpu_tokens=gpu_tokens,
        prefetch=prefetch,
    )
    small = small_spec(planned, ((0,), (1,)), 20_032)
    assert small.gpu_pool_bytes < 10 << 20
    for name in ("host_tokens", "gpu_tokens", "prefetch_rows"):
        ours, theirs = getattr(small, name), getattr(planned, name)
        assert (ours % 16 == 0, ours == 1, ours == 0) == (theirs % 16 == 0, theirs == 1, theirs == 0), name
    everything = small_spec(
        replace(planned, offload=False, prefetch="off", gpu_tokens=planned.host_tokens), ((0,),), 640
    )
    assert everything.gpu_tokens == everything.host_tokens == 640


def test_a_run_launches_no_other_variants_of_kernels(tiny_checkpoint: CheckpointFixture) -> None:
    """Of decode steps and of what the cache does, with pools of other sizes and over all layers."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.engine.launch_keys", str(tiny_checkpoint("glm52", "bf16") / "model")],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    compiled, launched = json.loads(result.stdout)
    assert len(launched) > 30 and set(launched) == set(compiled)


@pytest.mark.parametrize("limit", [1, 64, 65, 100, 128, 500, 4096])
def test_sample_prompts_fit_any_limit(tiny_checkpoint: CheckpointFixture, limit: int) -> None:
    model = first_layers(tiny_checkpoint("v32", "bf16") / "model")
    plan = replace(tiny_plan(model), max_model_len=limit, prefill_chunk_tokens=256)
    prompts = sample_prompts(plan, 512)
    assert all(0 < len(p.token_ids) <= limit for p in prompts)
    assert len(prompts[0].token_ids) == min(256, limit)
    computed = [len(p.token_ids) - p.num_cached for p in prompts[1:]]
    assert len(computed) == (limit > 64) and all(n % 2 for n in computed)

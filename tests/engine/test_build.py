"""Starting an engine: the pools are made beside loading, and whatever fails leaves nothing behind."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from echo_batch.cache.manager import KVCache
from echo_batch.config import CacheConfig, EngineConfig, ModelSourceConfig, RunConfig, Size
from echo_batch.engine import build
from echo_batch.engine.plan import Plan, make_plan
from echo_batch.errors import ConfigError, ModelError
from echo_batch.models.config import ModelConfig
from tests.engine.engines import CPU, make_requests, run_all, tokens_of
from tests.models.oracle import CheckpointFixture


@pytest.fixture
def started(tiny_checkpoint: CheckpointFixture) -> tuple[ModelConfig, RunConfig, Plan]:
    path = tiny_checkpoint("v32", "bf16") / "model"
    config = RunConfig(
        model=ModelSourceConfig(path=str(path)),
        cache=CacheConfig(host_pool=Size("tokens", 1024), gpu_pool=Size("tokens", 320)),
        engine=EngineConfig(device="cpu", max_num_seqs=2),
    )
    model = ModelConfig.from_dir(path)
    return model, config, make_plan(model, config, CPU, None)


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[KVCache]]:
    """The caches that were made and closed again; no thread may outlive a start."""
    caches: list[KVCache] = []
    make = build.make_cache

    def spied(*arguments: object, **options: object) -> KVCache:
        cache = make(*arguments, **options)  # type: ignore[arg-type]
        close = cache.close
        monkeypatch.setattr(cache, "close", lambda: (caches.append(cache), close())[1])
        return cache

    monkeypatch.setattr(build, "make_cache", spied)
    threads = threading.active_count()
    yield caches
    assert threading.active_count() == threads


def test_a_start_keeps_its_pools_and_tells_its_parts(
    started: tuple[ModelConfig, RunConfig, Plan], closed: list[KVCache]
) -> None:
    told: list[tuple[int, int]] = []
    core = build.build_core(*started, progress=lambda done, total: told.append((done, total)))
    assert not closed and told[-1][0] == told[-1][1] > 0
    assert core.startup_seconds.keys() == {"weights", "pools"} and all(s > 0 for s in core.startup_seconds.values())
    assert len(tokens_of(run_all(core, make_requests(lengths=(70,))))[0]) == 64
    core.close()
    assert len(closed) == 1


def test_a_checkpoint_that_does_not_load_gives_the_pools_back(
    started: tuple[ModelConfig, RunConfig, Plan], closed: list[KVCache], tmp_path: Path
) -> None:
    model, config, plan = started
    with pytest.raises(ModelError, match="neither"):
        build.build_core(model, replace(config, model=replace(config.model, path=str(tmp_path))), plan)
    assert len(closed) == 1


def test_pools_that_the_machine_refuses_stop_the_loading(
    started: tuple[ModelConfig, RunConfig, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> KVCache:
        raise ConfigError("no memory")

    told: list[int] = []
    monkeypatch.setattr(build, "make_cache", refuse)
    with pytest.raises(ConfigError, match="no memory"):
        build.build_core(*started, progress=lambda done, total: told.append(done))
    assert len(told) < 50  # of some hundred tensors

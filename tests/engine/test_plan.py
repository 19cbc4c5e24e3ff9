"""Plans of full-size models on machines that are not here, and of small jobs on this kind of machine."""

from collections.abc import Mapping
from typing import Any

import pytest

from echo_batch.config import RunConfig
from echo_batch.config_file import make_config
from echo_batch.engine.hardware import Hardware, parse_hardware
from echo_batch.engine.plan import InputStats, Plan, context_limit, decode_buckets, make_plan, row_limit
from echo_batch.errors import ConfigError
from echo_batch.models.config import ModelConfig
from tests.geometries import GLM52, TINY, V32

TB = 10**12
MODELS = {name: ModelConfig.from_hf_dict(d) for name, d in (("v32", V32), ("glm52", GLM52), ("tiny", TINY))}
INFINITEBENCH = InputStats(
    num_rows=318,
    num_bad_rows=0,
    prompt_tokens=26_000_000,
    longest_prompt_tokens=98_304,
    longest_row_tokens=98_560,
    total_row_tokens=318 * 82_048,
)


def config(hardware: Hardware, options: Mapping[str, Any]) -> RunConfig:
    return make_config(options, defaults={"engine.data_parallel_size": hardware.num_devices})


def plan(
    model: str = "v32",
    options: Mapping[str, Any] | None = None,
    *,
    on: str = "8xh200",
    host: float = 1.5 * TB,
    stats: InputStats | None = None,
) -> Plan:
    hardware = parse_hardware(on, int(host))
    return make_plan(MODELS[model], config(hardware, options or {}), hardware, stats)


def small_job(rows: int = 8, row_tokens: int = 400) -> InputStats:
    return InputStats(
        num_rows=rows,
        num_bad_rows=0,
        prompt_tokens=rows * (row_tokens - 64),
        longest_prompt_tokens=row_tokens - 64,
        longest_row_tokens=row_tokens,
        total_row_tokens=rows * -(-row_tokens // 64) * 64,
    )


def test_v32_on_8xh200_by_hand() -> None:
    """The GPU's 141 GB at 0.9: weights 103.0, runtime 2.1, gaps 1.1, so 20.7 GB for activations and caches."""
    p = plan(options={"cache.host_pool": "1.8M"}, stats=INFINITEBENCH)
    memory, cache = p.device_memory, p.cache
    assert p.fits
    assert (p.device, p.dtype, cache.row_format.kind, cache.index_format.kind) == ("cuda", "bfloat16", "fp8", "fp8")
    assert memory.budget == 126_900_000_000
    assert memory.weights == pytest.approx(103.0e9, rel=0.01)
    assert cache.host_tokens == 1_800_000
    assert p.host_pool_bytes == 1_800_000 * 61 * 656 == 72_028_800_000
    assert memory.index_cache == 1_800_000 * 61 * 132 == 14_493_600_000
    assert memory.gpu_pool == cache.gpu_tokens * 61 * 656
    maps, lists, counters = 4 * 1_800_000 + 8 * cache.gpu_tokens, 2 * 4 * 32_768, 4 * (128 + 64) + 8 * 6
    prefetch, late = 8 * (cache.gpu_tokens // 32) + 4 * 8 + 8 * 5, 4 * 1152 * 32
    assert memory.metadata == 61 * (maps + lists + counters + prefetch + late) + 4 * 32 * 8 * 1024
    assert memory.host_pool == 0
    # The GPU pool takes what is left, to the last block.
    assert 0 <= memory.budget - memory.used < 64 * 61 * (656 + 8)
    assert (p.min_host_tokens, p.min_gpu_tokens) == (98_560, 2_112)
    assert p.max_model_len == 163_840
    assert p.lookahead_steps == 2


def test_glm52_counts_selection_groups() -> None:
    p = plan("glm52", {"model.max_model_len": 131_072, "cache.host_pool": "1M"})
    assert p.fits
    assert p.host_pool_bytes == 1_000_000 * 78 * 656
    assert p.device_memory.index_cache == 1_000_000 * 21 * 132
    maps = 21 * (4 * 1_000_000 + 8 * p.cache.gpu_tokens)
    assert maps < p.device_memory.metadata < maps + 21 * 300_000


def test_auto_pools_leave_a_useful_gpu_pool() -> None:
    p = plan()
    assert p.fits and not p.notes
    assert p.cache.host_tokens > 1_000_000
    assert p.cache.host_tokens / p.cache.gpu_tokens == pytest.approx(12, rel=0.01)
    assert p.device_memory.used <= p.device_memory.budget
    assert p.host_pool_bytes * 8 <= 0.6 * 1.5 * TB


def test_auto_host_pool_is_at_most_60_percent_of_free_memory() -> None:
    p = plan(host=0.2 * TB, stats=INFINITEBENCH)
    assert p.fits
    assert 0.59 < p.host_pool_bytes * 8 / (0.2 * TB) <= 0.6
    # The GPU memory that a larger host pool would have taken goes to the GPU pool.
    assert p.cache.gpu_tokens > plan(stats=INFINITEBENCH).cache.gpu_tokens


def test_auto_host_pool_is_at_most_what_the_input_can_use() -> None:
    stats = small_job(rows=80, row_tokens=4096)
    p = plan(stats=stats)
    assert p.fits
    assert p.cache.host_tokens == 80 * 4096 // 8
    assert p.max_num_seqs == 10
    # Everything fits on the GPU: one row more for each request's newest token.
    assert p.cache.host_tokens <= p.cache.gpu_tokens <= p.cache.host_tokens + 256


def test_offload_off_is_one_pool() -> None:
    p = plan(options={"cache.offload": "off"})
    assert p.cache.gpu_tokens == p.cache.host_tokens and not p.cache.offload
    assert p.host_pool_bytes == p.device_memory.metadata == 0
    assert 300_000 < p.cache.gpu_tokens < 400_000
    with pytest.raises(ConfigError, match="one pool"):
        plan(options={"cache.offload": "off", "cache.gpu_pool": "64K", "cache.host_pool": "65K"})


@pytest.mark.parametrize(
    ("options", "what", "suggestion"),
    [
        ({"cache.host_pool": "3M"}, "indexer cache", "--host-pool"),
        ({"cache.host_pool": "1.8M", "cache.gpu_pool": "200K"}, "GPU pool", "--gpu-pool"),
        ({"cache.gpu_pool": "1M"}, "GPU pool", "--gpu-pool"),
        ({"cache.gpu_pool": "1K"}, "cannot hold one row's selection", "--gpu-pool 2112"),
        ({"cache.gpu_pool": "1K", "cache.host_pool": "3M"}, "cannot hold one row's selection", "--host-pool"),
        ({"cache.host_pool": "200GB"}, "host memory has room for", "--host-pool"),
        ({"cache.offload": "off", "cache.gpu_pool": "1M"}, "pool of 1,000,000", "--gpu-pool"),
        ({"engine.data_parallel_size": 1}, "weights", "--dp 8"),
    ],
)
def test_what_does_not_fit_says_what_would(options: dict[str, Any], what: str, suggestion: str) -> None:
    p = plan(options=options, stats=INFINITEBENCH)
    assert not p.fits
    assert any(what in problem.what for problem in p.problems), p.problems
    assert all(suggestion in problem.suggestion for problem in p.problems), p.problems
    with pytest.raises(ConfigError, match="does not fit") as caught:
        p.require_fit()
    assert suggestion in str(caught.value) and caught.value.exit_code == 2
    # Following the advice works.
    words = p.problems[0].suggestion.split()
    keys = {"--host-pool": "cache.host_pool", "--gpu-pool": "cache.gpu_pool", "--dp": "engine.data_parallel_size"}
    advice = {keys[name]: value for name, value in zip(words[::2], words[1::2])}
    followed = plan(options=options | advice, stats=INFINITEBENCH)
    assert followed.fits, followed.problems


def test_percent_and_bytes_become_tokens_per_worker() -> None:
    row = 61 * 656
    assert plan(options={"cache.host_pool": "40GB"}).cache.host_tokens == 40 * 10**9 // row // 64 * 64
    half = plan(options={"cache.host_pool": "40%"}, host=TB)
    assert half.cache.host_tokens == int(0.4 * TB / 8) // row // 64 * 64
    with pytest.raises(ConfigError, match="less than one block"):
        plan(options={"cache.host_pool": "1MB"})


def test_a_long_context_that_does_not_fit_is_answered_with_the_longest_that_does() -> None:
    p = plan("glm52")
    assert not p.fits and "activations" in p.problems[0].what
    name, length = p.problems[0].suggestion.split()
    assert name == "--max-model-len"
    limit = row_limit(MODELS["glm52"], config(p.hardware, {}), p.hardware)
    assert int(length) == limit
    assert 131_072 < limit < 1_048_576
    shorter = plan("glm52", {"model.max_model_len": limit})
    assert shorter.fits and shorter.max_model_len == limit


def test_weights_too_large_for_the_node_name_a_larger_one() -> None:
    p = plan(on="8xh100")
    assert [problem.suggestion for problem in p.problems] == ["16 GPUs of this kind"]
    assert plan(on="16xh100", stats=INFINITEBENCH).fits


def test_limits_known_before_the_pools() -> None:
    hardware = parse_hardware("8xh200", int(1.5 * TB))
    v32 = MODELS["v32"]
    assert context_limit(v32, config(hardware, {})) == 163_840
    assert context_limit(v32, config(hardware, {"model.max_model_len": 1000})) == 1000
    assert context_limit(v32, config(hardware, {"cache.host_pool": "64Ki"})) == 65_536
    assert row_limit(v32, config(hardware, {"cache.host_pool": "1GB"}), hardware) == 10**9 // (61 * 656) // 64 * 64
    assert row_limit(v32, config(hardware, {}), hardware) == 163_840
    with pytest.raises(ConfigError, match="163840"):
        context_limit(v32, config(hardware, {"model.max_model_len": 200_000}))


def test_notes_on_small_gpu_pools_and_long_rows() -> None:
    (note,) = plan(options={"cache.host_pool": "1.8M"}).notes
    assert "hit rate" in note and "--host-pool" in note
    p = plan("tiny", {"cache.host_pool": "256"}, on="cpu", host=8e9, stats=small_job())
    assert p.fits and p.max_model_len == 256
    assert any("--host-pool 448" in note for note in p.notes)


def test_small_job_on_cpu_just_works() -> None:
    p = plan("tiny", on="cpu", host=8e9, stats=small_job())
    assert p.fits
    assert (p.device, p.dtype, p.cache.row_format.kind, p.cache.index_format.kind) == ("cpu", "float32", "fp32", "fp32")
    assert p.cache.host_tokens == 8 * 448
    assert p.cache.gpu_tokens >= p.cache.host_tokens
    assert p.max_num_seqs == 8
    assert p.lookahead_steps == 0
    assert p.prefill_group_tokens == 8 * 336
    assert p.device_memory.host_pool == p.host_pool_bytes == 8 * 448 * 4 * 2304


def test_the_smallest_pools_of_a_cpu_job() -> None:
    for host in ("4K", "448"):
        p = plan("tiny", {"cache.host_pool": host, "cache.gpu_pool": "320"}, on="cpu", host=8e9, stats=small_job())
        assert p.fits and p.cache.gpu_tokens == 320
        assert p.min_gpu_tokens == 64  # 32 selected and the new one
    refused = plan("tiny", {"cache.host_pool": "448"}, on="cpu", host=8e9, stats=small_job(row_tokens=448))
    assert refused.fits and refused.min_host_tokens == 448


def test_minimum_gpu_pool_counts_the_new_token_of_a_short_row() -> None:
    """A row of exactly 64 tokens with k above it needs 65 rows, so two blocks, though the host pool is one."""
    p = plan("tiny", {"cache.host_pool": "64"}, on="cpu", host=8e9)
    assert (p.max_model_len, p.min_gpu_tokens) == (64, 64)
    p = plan("v32", {"cache.host_pool": "64"})
    assert (p.max_model_len, p.min_gpu_tokens) == (64, 128)
    assert p.cache.gpu_tokens >= 128


def test_cpu_pools_share_memory_with_everything_else() -> None:
    tight = plan("tiny", on="cpu", host=2e9, stats=small_job(rows=100_000, row_tokens=4096))
    assert tight.fits
    assert tight.device_memory.used <= tight.device_memory.budget == int(0.8 * 2e9)
    assert tight.device_memory.host_pool > tight.device_memory.gpu_pool > 0
    too_big = plan("tiny", {"cache.host_pool": "1M"}, on="cpu", host=2e9)
    assert not too_big.fits and "--host-pool" in too_big.problems[0].suggestion


def test_without_input_a_cpu_plan_stays_small() -> None:
    p = plan("tiny", on="cpu", host=500e9)
    assert p.fits and p.cache.host_tokens == 4 * 4096


def test_formats_follow_machine_and_dtype() -> None:
    assert plan("tiny", on="a100", host=1e11).cache.row_format.kind == "bf16"
    assert plan("tiny", {"model.dtype": "float32"}, on="h200", host=1e11).cache.row_format.kind == "fp32"
    assert plan("tiny", {"model.dtype": "float32"}, on="h200", host=1e11).cache.index_format.kind == "fp32"
    fp8 = plan("tiny", {"cache.kv_cache_dtype": "fp8"}, on="cpu", host=1e11).cache
    assert (fp8.row_format.kind, fp8.index_format.kind) == ("fp8", "fp32")
    with pytest.raises(ConfigError, match="Hopper"):
        plan("tiny", {"cache.kv_cache_dtype": "fp8"}, on="a100", host=1e11)


def test_prefetch_is_on_where_it_was_measured_to_be_faster() -> None:
    def mode(model: str = "v32", pool: str = "1.8M", on: str = "8xh200", **options: Any) -> str:
        stats = None if pool == "90K" else INFINITEBENCH
        return plan(model, {"cache.host_pool": pool} | options, on=on, stats=stats).cache.prefetch

    assert mode() == mode(pool="600K") == "fused"
    assert mode(pool="90K") == mode(on="8xb200") == mode(on="8xa100") == "off"
    assert mode("glm52", "1M") == "off"  # 32 index heads
    assert mode(**{"cache.offload": False}, pool="auto") == "off"
    assert [mode(pool="600K", **{"cache.prefetch": p}) for p in ("off", "branch", "fused")] == [
        "off",
        "branch",
        "fused",
    ]


def test_the_machine_must_have_what_is_asked() -> None:
    with pytest.raises(ConfigError, match="--dp 9: there are 8 GPUs"):
        plan(options={"engine.data_parallel_size": 9})
    with pytest.raises(ConfigError, match="one worker"):
        plan("tiny", {"engine.data_parallel_size": 2}, on="cpu")
    with pytest.raises(ConfigError, match="--device cuda"):
        plan("tiny", {"engine.device": "cuda"}, on="cpu")


def test_settings_asked_for_are_kept() -> None:
    options = {
        "engine.max_num_seqs": 5,
        "engine.prefill_chunk_tokens": 48,
        "engine.prefill_group_tokens": 7,
        "engine.lookahead_steps": 1,
    }
    p = plan("tiny", options, on="cpu", host=8e9, stats=small_job())
    assert (p.max_num_seqs, p.prefill_chunk_tokens, p.lookahead_steps) == (5, 48, 1)
    assert p.prefill_group_tokens == 336  # one prompt is never split
    assert p.decode_buckets == (1, 2, 3, 4, 5)


def test_empty_and_all_bad_inputs_have_a_plan() -> None:
    for rows in (0, 3):
        stats = InputStats(
            num_rows=rows,
            num_bad_rows=rows,
            prompt_tokens=0,
            longest_prompt_tokens=0,
            longest_row_tokens=0,
            total_row_tokens=0,
        )
        assert plan("tiny", on="cpu", host=8e9, stats=stats).fits


@pytest.mark.parametrize(
    ("limit", "buckets"),
    [(1, (1,)), (2, (1, 2)), (5, (1, 2, 3, 4, 5)), (64, (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64))],
)
def test_decode_buckets(limit: int, buckets: tuple[int, ...]) -> None:
    assert decode_buckets(limit) == buckets


def test_bucket_is_the_smallest_that_holds() -> None:
    p = plan("tiny", {"engine.max_num_seqs": 10}, on="cpu", host=8e9)
    assert [p.bucket(n) for n in range(1, 11)] == [1, 2, 3, 4, 6, 6, 8, 8, 10, 10]

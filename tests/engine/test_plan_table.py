"""A plan as JSON and as tables."""

import io
import json

from rich.console import Console

from echo_batch.config_file import make_config
from echo_batch.engine.hardware import parse_hardware
from echo_batch.engine.plan import InputStats, Plan, make_plan
from echo_batch.engine.plan_table import plan_summary, plan_to_dict, print_plan
from echo_batch.models.config import ModelConfig
from tests.geometries import TINY, V32

STATS = InputStats(
    num_rows=10,
    num_bad_rows=2,
    prompt_tokens=30_000,
    longest_prompt_tokens=4_000,
    longest_row_tokens=4_064,
    total_row_tokens=32_000,
)


def plan(model: dict[str, object], hardware: str, stats: InputStats | None = None, **options: object) -> Plan:
    node = parse_hardware(hardware, 1_500_000_000_000)
    asked = {key.replace("__", "."): value for key, value in options.items()}
    config = make_config(asked, defaults={"engine.data_parallel_size": node.num_devices})
    return make_plan(ModelConfig.from_hf_dict(model), config, node, stats)


def shown(p: Plan) -> str:
    stream = io.StringIO()
    print_plan(p, Console(file=stream, width=120))
    return stream.getvalue()


def test_json_has_tokens_and_bytes_per_worker_and_in_total() -> None:
    p = plan(V32, "8xh200", cache__host_pool="1.8M")
    values = json.loads(json.dumps(plan_to_dict(p)))
    assert values["version"] == 1 and values["fits"] is True and values["problems"] == [] and values["input"] is None
    assert values["workers"] == 8
    assert values["kv_cache"]["host_pool_tokens"] == 1_800_000
    assert values["kv_cache"]["row_bytes"] == 656
    assert values["kv_cache"]["minimum_gpu_pool_tokens"] == 2_112
    assert values["bytes"]["per_worker"]["host_pool"] == 72_028_800_000
    assert values["bytes"]["total"]["host_pool"] == 8 * 72_028_800_000
    per_worker = values["bytes"]["per_worker"]
    parts = ("weights", "indexer_cache", "gpu_pool", "metadata", "activations", "allocator", "runtime")
    assert sum(per_worker[name] for name in parts) == per_worker["device_used"] <= per_worker["device_budget"]


def test_json_of_a_plan_that_does_not_fit() -> None:
    values = plan_to_dict(plan(V32, "8xh200", cache__host_pool="3M"))
    assert values["fits"] is False
    assert values["problems"][0]["suggestion"].startswith("--host-pool ")


def test_tables_name_every_part_and_the_remedy() -> None:
    text = shown(plan(V32, "8xh200", cache__host_pool="1.8M", cache__gpu_pool="200K"))
    for words in (
        "weights",
        "indexer cache",
        "1,800,000",
        "200,000",
        "cache metadata",
        "allocator's gaps",
        "72.0 GB",
        "576 GB",
        "8 x h200",
    ):
        assert words in text
    assert "does not fit" in text and "try: --gpu-pool" in text and "\nfits" not in text


def test_tables_of_a_cpu_plan_count_the_host_pool_once() -> None:
    text = shown(plan(TINY, "cpu", STATS))
    assert "10 rows (2 bad), 30,000 prompt tokens" in text and "fits" in text
    assert text.count("\nhost pool") == 1 and "allocator" not in text
    off = shown(plan(TINY, "cpu", STATS, cache__offload="off"))
    assert "cache metadata" not in off and "\nhost pool" not in off


def test_summary_is_one_line_with_tokens_and_bytes() -> None:
    line = plan_summary(plan(V32, "8xh200", cache__host_pool="1.8M"))
    assert "\n" not in line
    assert "host pool 1,800,000 tokens (72.0 GB)" in line and "on each of 8 GPUs" in line
    assert "no offload" in plan_summary(plan(TINY, "cpu", STATS, cache__offload="off"))

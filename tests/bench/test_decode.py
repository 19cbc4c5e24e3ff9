"""`bench decode` on a CPU: the whole path on a tiny model, and what its JSON holds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from echo_batch.bench.cli import app
from tests.models.oracle import CheckpointFixture

CASE = "--layers 3 --context 256 --batch 2,3 --gpu-pool 256 --host-pool 2048 --steps 4 --device cpu --dtype float32"


@pytest.fixture
def bench(tiny_checkpoint: CheckpointFixture, tmp_path: Path) -> Any:
    def run(options: str) -> dict[str, Any]:
        path = tmp_path / "out.json"
        model = str(tiny_checkpoint("v32", "fp8") / "model")
        result = CliRunner().invoke(
            app, ["decode", "--model", model, "--json", str(path), *CASE.split(), *options.split()]
        )
        assert result.exit_code == 0, result.output
        printed = [json.loads(line) for line in result.output.splitlines() if line.startswith("{")]
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        assert [line["step_ms"] for line in printed] == [case["step_ms"] for case in found["cases"]]
        return found

    return run


def test_counts_add_up(bench: Any) -> None:
    found = bench("--locality 0.9")
    assert found["model"]["layers"] == 3 and found["communication"] is None and found["capture"] is None
    for batch, case in zip((2, 3), found["cases"], strict=True):
        assert case["batch"] == case["active_rows_at_end"] == batch and not case["resident"]
        assert case["tok_s"] == pytest.approx(batch / case["step_ms"] * 1e3, rel=1e-2, abs=0.06)  # to a tenth
        assert 0 < case["hit_rate"] < 1 and len(case["hit_rate_per_group"]) == 3
        misses = 3 * batch * 32 * (1 - case["hit_rate"])
        assert case["recalled_rows_per_step"] == pytest.approx(misses, abs=0.2)
        assert case["recalled_bytes_per_step"] == case["recalled_rows_per_step"] * 4 * 576
        assert case["offloaded_rows_per_step"] == 3 * batch
        assert case["fallback_rows_per_step"] == 0, "after the warm-up every row has a prediction"
        assert 4 <= case["distinct_experts_per_layer"] <= min(16, 4 * batch)
        assert case["prefetch_rows_per_step"] is None


def test_prefetch_and_residency(bench: Any) -> None:
    found = bench("--locality 0.9 --prefetch fused --gpu-pool 1024 --residency off")
    for case in found["cases"]:
        counted = case["prefetch_rows_per_step"]
        assert 0 < counted["prefetched"] == counted["used"] + counted["wasted"]
    assert all(case["resident"] and case["hit_rate"] is None for case in bench("--gpu-pool 2048")["cases"])
    assert all(case["resident"] and case["hit_rate"] is None for case in bench("--offload off")["cases"])


def test_one_worker_of_four(bench: Any) -> None:
    found = bench("--ep-slice 4")
    # The first of 3 layers is dense; hidden size 256, three other workers.
    assert found["communication"] == [
        {"batch": batch, "all_gather_bytes": 2 * values, "reduce_scatter_bytes": 4 * values}
        for batch, values in ((2, 2 * 3 * 256 * 2), (3, 3 * 3 * 256 * 2))
    ]
    for case in found["cases"]:
        # 4 of 16 experts are here; 4 workers' tokens choose among them.
        assert 1 <= case["distinct_experts_per_layer"] <= 4


def test_what_does_not_fit_is_said(tiny_checkpoint: CheckpointFixture) -> None:
    model = str(tiny_checkpoint("v32", "fp8") / "model")
    result = CliRunner().invoke(app, ["decode", "--model", model, *CASE.split(), "--host-pool", "512"])
    assert result.exit_code == 2 and "give --host-pool" in result.output
    result = CliRunner().invoke(
        app, ["decode", "--model", model, *CASE.split(), "--prefetch", "fused", "--offload", "off"]
    )
    assert result.exit_code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_said(tiny_checkpoint: CheckpointFixture) -> None:
    model = str(tiny_checkpoint("v32", "fp8") / "model")
    result = CliRunner().invoke(app, ["decode", "--model", model, *CASE.split(), "--device", "cuda"])
    assert result.exit_code == 2 and "--device cpu" in result.output

"""The checkpoint that `bench load` makes is one that the loader takes, and the bench measures it."""

from pathlib import Path

import pytest

from echo_batch.bench.load import LoadBench, run_load_bench, write_checkpoint
from echo_batch.errors import ConfigError
from echo_batch.models.checkpoint import check_checkpoint
from echo_batch.models.config import ModelConfig
from tests.models.oracle import CheckpointFixture


def test_a_made_up_checkpoint_loads(tiny_checkpoint: CheckpointFixture, tmp_path: Path) -> None:
    geometry = tiny_checkpoint("v32", "fp8") / "model"
    options = LoadBench(model=str(geometry), num_layers=2, directory=str(tmp_path / "made"), device="cpu", repeats=1)
    result = run_load_bench(options)
    config = ModelConfig.from_dir(tmp_path / "made")
    checkpoint = check_checkpoint(config, tmp_path / "made")
    assert config.num_layers == 2 and result["checkpoint_bytes"] == checkpoint.num_bytes
    assert len(checkpoint.quantized) == sum(".weight_scale_inv" in name for name in checkpoint.tensors) > 50
    assert [run["page_cache"] for run in result["runs"]] == ["dropped", "warm"]
    assert all(run["plain_gb_s"] > 0 and run["load_gb_s"] > 0 for run in result["runs"])
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "made").iterdir()}
    run_load_bench(options)
    assert stamps == {path: path.stat().st_mtime_ns for path in (tmp_path / "made").iterdir()}


def test_a_disk_that_is_too_small(
    tiny_checkpoint: CheckpointFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(ConfigError, match="1000 are free"):
        write_checkpoint(tiny_checkpoint("v32", "fp8") / "model", tmp_path, None)
    assert not list(tmp_path.glob("*.safetensors"))

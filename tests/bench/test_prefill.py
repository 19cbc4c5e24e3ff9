"""`bench prefill` on a CPU: the whole path on a tiny model, and what its JSON holds."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from echo_batch.bench.cli import app
from tests.models.oracle import CheckpointFixture

CASE = (
    "--layers 2 --context 192 --prompts 3 --chunk 128 --slice 64 --group 384 --gpu-pool 256 --device cpu "
    "--dtype float32"
)


@pytest.fixture
def bench(tiny_checkpoint: CheckpointFixture, tmp_path: Path) -> Any:
    def run(options: str) -> dict[str, Any]:
        path = tmp_path / "out.json"
        model = str(tiny_checkpoint("v32", "fp8") / "model")
        arguments = ["prefill", "--model", model, "--json", str(path), *CASE.split(), *options.split()]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    return run


def test_prompts_apart_and_with_a_shared_prefix(bench: Any) -> None:
    apart, shared = bench(""), bench("--prefix 128")
    assert apart["prompt_tokens"] == shared["prompt_tokens"] == apart["computed_tokens"] == 3 * 192
    # The prefix of two blocks is computed once.
    assert shared["computed_tokens"] == 192 + 2 * 64
    for found in (apart, shared):
        assert found["tok_s"] == pytest.approx(found["prompt_tokens"] / found["seconds"], rel=1e-2)


def test_groups_follow_the_option(bench: Any) -> None:
    assert bench("")["groups"] == 2 and bench("--group 192")["groups"] == 3


def test_a_prefix_as_long_as_the_prompt_is_refused(tiny_checkpoint: CheckpointFixture) -> None:
    model = str(tiny_checkpoint("v32", "fp8") / "model")
    result = CliRunner().invoke(app, ["prefill", "--model", model, *CASE.split(), "--prefix", "192"])
    assert result.exit_code == 2 and "--prefix" in result.output

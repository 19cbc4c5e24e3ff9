"""Offloading on weights that mean something: the demo model finds its passkeys, with the bits of a run without it.

Noise that random weights would hide (they answer with noise anyway) makes a trained model wrong.
"""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from echo_batch import Engine, SamplingParams
from echo_batch.errors import ScheduleDivergedError
from echo_batch.request import Completion

EXAMPLES = Path(__file__).parent.parent / "examples" / "demo.parquet"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def questions(count: int) -> list[dict[str, str]]:
    """The first passkey questions over 2K tokens, which the shipped weights answer."""
    rows: list[dict[str, str]] = pq.read_table(EXAMPLES).to_pylist()
    return [row for row in rows if row["id"].startswith("passkey-2048")][:count]


def answers(prompts: list[str], device: str, schedule: str, **settings: Any) -> tuple[list[Completion], Engine]:
    """Completions by an engine with room for two at once."""
    cache = {f"cache.{name}": value for name, value in settings.items()}
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    with Engine(
        "demo",
        device=device,  # type: ignore[arg-type]
        max_num_seqs=2,
        settings={"engine.schedule": schedule, "cache.poison": True, **cache},
    ) as engine:
        return engine.generate(prompts, greedy), engine


@pytest.mark.parametrize("device", DEVICES)
def test_offloading_changes_no_bit_of_right_answers(device: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    rows = questions(2)
    prompts = [row["prompt"] for row in rows]
    expected, _ = answers(prompts, device, f"record:{path}", offload=False, host_pool=8192)
    for row, completion in zip(rows, expected, strict=True):
        assert completion.text is not None and completion.text.strip().startswith(row["answer"])
    # The selections of two rows and their newest tokens, 2 x (256 + 1), fill the smaller pool.
    others = [(576, "auto"), (8192, "auto"), (8192, "off")]
    for gpu_pool, residency in others[:1] if device == "cpu" else others:
        settings = dict(host_pool=8192, gpu_pool=gpu_pool, residency=residency)
        got, engine = answers(prompts, device, f"replay:{path}", **settings)
        assert [c.token_ids for c in got] == [c.token_ids for c in expected]
        counters = engine._core.cache.counters()
        assert (sum(counters.evicted_rows) > 0) == (gpu_pool == 576)
        assert (engine._core.stats.resident_steps > 0) == (gpu_pool == 8192 and residency == "auto")


def test_noise_is_noticed(tmp_path: Path) -> None:
    """The test above can fail: rows of another precision are such noise."""
    path = tmp_path / "steps.jsonl"
    prompts = [questions(1)[0]["prompt"][:1000]]
    answers(prompts, "cpu", f"record:{path}", offload=False, host_pool=8192, kv_cache_dtype="bfloat16")
    text = path.read_text(encoding="utf-8").replace('"rows":"bf16"', '"rows":"fp32"', 1)
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ScheduleDivergedError, match="prefill group 0, row 0"):
        answers(prompts, "cpu", f"replay:{path}", offload=False, host_pool=8192, kv_cache_dtype="float32")

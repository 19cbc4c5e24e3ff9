"""Offloading on weights that mean something: the demo model finds what it is asked for, with the bits of a run without.

Noise that random weights would hide (they answer with noise anyway) makes a trained model wrong.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from echo_batch.config import CacheConfig, EngineConfig, ModelSourceConfig, RunConfig, Size
from echo_batch.engine.build import build_core
from echo_batch.engine.core import EngineStats
from echo_batch.engine.hardware import detect_hardware
from echo_batch.engine.plan import make_plan
from echo_batch.errors import ScheduleDivergedError
from echo_batch.models.config import ModelConfig
from echo_batch.request import Request, SamplingParams
from tests.engine.engines import run_all, tokens_of
from tools.train_tiny.tasks import BUNDLED_MODEL, NUM_DIGITS, TaskName, load_generator

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
QUESTIONS: tuple[tuple[TaskName, int], ...] = (("kv", 800), ("passkey", 384))
"""Tasks and their tokens: more than index_topk, 256."""
HOST_TOKENS = 1280
MINIMUM_GPU_TOKENS = 576
"""The selections of two rows and their newest tokens, 2 x (256 + 1), in whole blocks."""


@lru_cache(maxsize=1)
def questions() -> list[tuple[Request, tuple[int, ...]]]:
    """Requests, and the tokens that their answers begin with."""
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    generator = load_generator(seed=11)
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    found = []
    for row, (task, tokens) in enumerate(QUESTIONS):
        made = generator.make(task, 0, tokens)
        request = Request(row_id=row, prompt_token_ids=tokenizer.encode(made.prompt).ids, sampling=sampling)
        answer = tokenizer.encode(made.answer, add_special_tokens=False).ids
        found.append((request, tuple(answer[:NUM_DIGITS])))
    return found


def run(
    requests: list[Request], device: Any, schedule: str, *, gpu_tokens: int = HOST_TOKENS, **cache: Any
) -> tuple[dict[int, tuple[int, ...]], int, EngineStats]:
    """Tokens by row, evicted rows and counters of an engine with room for two rows."""
    config = RunConfig(
        model=ModelSourceConfig(path=str(BUNDLED_MODEL)),
        cache=CacheConfig(
            host_pool=Size("tokens", HOST_TOKENS), gpu_pool=Size("tokens", gpu_tokens), poison=True, **cache
        ),
        engine=EngineConfig(device=device, max_num_seqs=2, schedule=schedule),
    )
    model = ModelConfig.from_dir(BUNDLED_MODEL)
    core = build_core(model, config, make_plan(model, config, detect_hardware(device), None))
    try:
        tokens = tokens_of(run_all(core, requests))
        return tokens, sum(core.cache.counters().evicted_rows), core.stats
    finally:
        core.close()


@pytest.mark.parametrize("device", DEVICES)
def test_offloading_changes_no_bit_of_right_answers(device: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    requests = [request for request, _ in questions()]
    expected, _, _ = run(requests, device, f"record:{path}", offload=False)
    for row, (_, answer) in enumerate(questions()):
        assert expected[row][:NUM_DIGITS] == answer
    others = [(MINIMUM_GPU_TOKENS, "auto"), (HOST_TOKENS, "auto"), (HOST_TOKENS, "off")]
    for gpu_tokens, residency in others[:1] if device == "cpu" else others:
        tokens, evicted, stats = run(requests, device, f"replay:{path}", gpu_tokens=gpu_tokens, residency=residency)
        assert tokens == expected
        assert (evicted > 0) == (gpu_tokens == MINIMUM_GPU_TOKENS)
        assert (stats.resident_steps > 0) == (gpu_tokens == HOST_TOKENS and residency == "auto")


def test_noise_is_noticed(tmp_path: Path) -> None:
    """The test above can fail: rows of another precision are such noise."""
    path = tmp_path / "steps.jsonl"
    request, _ = questions()[1]
    run([request], "cpu", f"record:{path}", offload=False, kv_cache_dtype="bfloat16")
    text = path.read_text(encoding="utf-8").replace('"rows":"bf16"', '"rows":"fp32"', 1)
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ScheduleDivergedError, match="prefill group 0, row 0"):
        run([request], "cpu", f"replay:{path}", offload=False, kv_cache_dtype="float32")

"""`from echo_batch import Engine, SamplingParams`."""

import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_batch import Engine, SamplingParams
from echo_batch.errors import ConfigError, ModelError
from echo_batch.request import DEFAULT_MAX_TOKENS
from tests.engine.engines import assert_greedy
from tests.models.oracle import CheckpointFixture, random_ids

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SETTINGS: dict[str, Any] = dict(
    device="cpu", dtype="float32", host_pool=1024, gpu_pool=320, max_num_seqs=4, max_model_len=512
)


@pytest.fixture(scope="module")
def directory(tiny_checkpoint: CheckpointFixture) -> Path:
    return tiny_checkpoint("v32", "fp32")


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[Engine]:
    # transformers, the oracle, hard-codes this eps.
    with Engine(directory / "model", **SETTINGS, settings={"model.rms_norm_eps_latent": 1e-6}) as engine:
        yield engine


def test_results_are_in_the_order_of_the_prompts(engine: Engine, directory: Path) -> None:
    prompts = [random_ids(n, seed=n).tolist() for n in (90, 3, 70, 40, 12, 60)]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 2, 5, 1, 12, 4)]
    out = engine.generate(prompts, params)
    assert [c.row_id for c in out] == list(range(6))
    assert [len(c.token_ids) for c in out] == [9, 2, 5, 1, 12, 4]
    for prompt, completion in zip(prompts, out, strict=True):
        assert completion.num_input_tokens == len(prompt) and completion.text is not None
        assert_greedy(directory, prompt, completion.token_ids)


def test_texts_chats_and_arrays(engine: Engine) -> None:
    chat = [{"role": "user", "content": "hello"}]
    ids = np.array([20, 21, 22])
    out = engine.generate(["some text", chat, ids, [20, 21, 22]], GREEDY)
    assert [c.failure for c in out] == [None] * 4
    assert out[2].token_ids == out[3].token_ids
    assert out[1].num_input_tokens > 3


def test_a_bad_prompt_fails_alone(engine: Engine) -> None:
    bad: list[tuple[Any, str]] = [
        ("", "empty_prompt"),
        ([], "empty_prompt"),
        ([1, 512], "bad_token"),
        ([1, -1], "bad_token"),
        (["a"], "bad_token"),
        (None, "no_prompt"),
        (3.5, "no_prompt"),
        ([7] * 512, "too_long"),
        ([{"role": "user"}, 3], "bad_params"),
    ]
    good = "a good prompt"
    prompts = [item for prompt, _ in bad for item in (prompt, good)]
    out = engine.generate(prompts, GREEDY)
    assert [c.failure and c.failure.code for c in out[0::2]] == [code for _, code in bad]
    assert {c.token_ids for c in out[1::2]} == {engine.generate([good], GREEDY)[0].token_ids}
    only = engine.generate([good, good], [GREEDY, SamplingParams(stop_token_ids=(600,))])
    assert only[0].failure is None and only[1].failure is not None and only[1].failure.code == "bad_params"


def test_samples_repeat_and_differ_by_position(engine: Engine) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    first = engine.generate(["same"] * 3, params)
    assert [c.token_ids for c in engine.generate(["same"] * 3, params)] == [c.token_ids for c in first]
    assert len({c.token_ids for c in first}) == 3


def test_without_params_the_model_s_generation_config_counts(engine: Engine) -> None:
    sampling = engine.default_sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (1.0, 0.95, DEFAULT_MAX_TOKENS)


def test_stream_gives_what_is_finished(engine: Engine) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (12, 1, 6)]
    stream = engine.stream(["a", "b", "c"], params)
    assert next(stream).row_id == 1
    with pytest.raises(RuntimeError, match="busy"):
        engine.generate(["d"])
    assert [c.row_id for c in stream] == [2, 0]
    # A stream that is closed leaves nothing behind.
    expected = engine.generate(["a"], GREEDY)
    stream = engine.stream(["a", "b", "c"], params)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert engine.generate(["a"], GREEDY) == expected
    assert engine.generate([], GREEDY) == []


def test_wrong_calls(engine: Engine) -> None:
    with pytest.raises(TypeError, match="list"):
        engine.generate("text")
    with pytest.raises(ValueError, match="2 prompts and 1"):
        engine.generate(["a", "b"], [GREEDY])


def test_wrong_settings(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        Engine(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="unknown key"):
        Engine(directory / "model", settings={"cache.hostpool": 1})
    with pytest.raises(ConfigError, match=r"output\.path"):
        Engine(directory / "model", settings={"output.path": "x"})
    with pytest.raises(ConfigError, match="does not fit"):
        Engine(directory / "model", device="cpu", host_pool="100TB")


def test_a_closed_engine_says_so(directory: Path) -> None:
    with Engine(directory / "model", **SETTINGS) as engine:
        pass
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.generate(["a"])


def test_the_example(directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parent.parent / "examples" / "python_api.py"
    lines = example.read_text(encoding="utf-8").split('"""', 2)[2].strip().splitlines()
    assert len([line for line in lines if line]) <= 10
    monkeypatch.setattr(sys, "argv", [str(example), str(directory / "model")])
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.count("->") == 2


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, echo_batch; from echo_batch import SamplingParams; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

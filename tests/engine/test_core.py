"""What the engine does beside the right tokens: how rows end, sampling, failures of one row, loss of the device."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from echo_batch.cache.manager import OffloadedCache, slots_of_blocks
from echo_batch.engine.core import EngineCore
from echo_batch.errors import EngineLostError
from echo_batch.io.tokenizer import load_tokenizer
from echo_batch.models.model import Model
from echo_batch.request import Completion, Request, SamplingParams
from tests.engine.engines import cached_model, make_core, make_requests, oracle_logits, run_all, tiny_plan, tokens_of
from tests.models.oracle import CheckpointFixture, load_fp32, random_ids

SHORT = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@pytest.fixture
def directory(tiny_checkpoint: CheckpointFixture) -> Path:
    return tiny_checkpoint("v32", "fp32")


@pytest.fixture
def model(directory: Path) -> Model:
    return cached_model(directory / "model")


def request(row_id: int = 0, *, prompt: int = 40, thinking_end: str | None = None, **sampling: Any) -> Request:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 16, "ignore_eos": True} | sampling)
    ids = random_ids(prompt, seed=100 + row_id).tolist()
    return Request(row_id=row_id, prompt_token_ids=ids, sampling=params, thinking_end=thinking_end)


def run_one(core: EngineCore, row: Request) -> Completion:
    return run_all(core, [row])[row.row_id]


# --- how rows end ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [0, 2])
def test_max_tokens_is_exact(model: Model, lookahead: int) -> None:
    core = make_core(model, tiny_plan(model, lookahead=lookahead))
    rows = [request(i, max_tokens=n) for i, n in enumerate((1, 2, 3, 7))]
    out = run_all(core, rows)
    assert [len(out[i].token_ids) for i in range(4)] == [1, 2, 3, 7]
    assert {c.finish_reason for c in out.values()} == {"length"}
    assert all(c.num_input_tokens == 40 and c.text is None for c in out.values())


def test_max_tokens_none_goes_up_to_the_context_limit(model: Model) -> None:
    core = make_core(model, tiny_plan(model, host=64, gpu=64))
    out = run_one(core, request(max_tokens=None, prompt=40))
    assert len(out.token_ids) == 64 - 40 and out.finish_reason == "length"


@pytest.mark.parametrize("prompt", [64, 65])
def test_without_max_tokens_a_prompt_that_leaves_no_room_fails_alone(model: Model, prompt: int) -> None:
    core = make_core(model, tiny_plan(model, host=64, gpu=64))
    out = run_all(core, [request(0, max_tokens=None, prompt=prompt), request(1, max_tokens=None, prompt=63)])
    assert out[0].failure is not None and out[0].failure.code == "too_long"
    assert len(out[1].token_ids) == 1


@pytest.mark.parametrize("lookahead", [0, 2])
def test_rows_of_a_step_are_those_that_it_gave_a_token(model: Model, lookahead: int) -> None:
    core = make_core(model, tiny_plan(model, lookahead=lookahead))
    run_all(core, [request(i, max_tokens=n) for i, n in enumerate((1, 3, 5))])
    # The first token of each is prefill's; steps that were launched behind the last token have no rows.
    stats = core.stats
    assert (stats.decode_steps, stats.decode_row_steps, stats.generated_tokens) == (4 + lookahead, 2 + 4, 1 + 3 + 5)


@pytest.mark.parametrize("lookahead", [0, 2])
def test_eos_and_stop_ids_end_a_row_and_are_its_last_token(model: Model, lookahead: int) -> None:
    plan = tiny_plan(model, lookahead=lookahead)
    free = run_one(make_core(model, plan), request()).token_ids
    eos = free[9]
    at = free.index(eos)
    core = make_core(model, plan, eos=(eos, 511))
    out = run_all(core, [request(0, ignore_eos=False), request(1), request(2, ignore_eos=False, max_tokens=1)])
    assert (out[0].token_ids, out[0].finish_reason) == (free[: at + 1], "stop")
    ignoring = run_one(core, request())
    assert (ignoring.token_ids, ignoring.finish_reason) == (free, "length")
    stopped = run_one(core, request(stop_token_ids=(3, eos)))
    assert (stopped.token_ids, stopped.finish_reason) == (free[: at + 1], "stop")


def test_too_many_stop_ids_fail_the_row_alone(model: Model) -> None:
    out = run_all(make_core(model), [request(0, stop_token_ids=tuple(range(40))), request(1)])
    assert out[0].failure is not None and out[0].failure.code == "bad_params"
    assert out[1].failure is None


@pytest.mark.parametrize("lookahead", [0, 2])
def test_stop_strings_cut_the_text(model: Model, directory: Path, lookahead: int) -> None:
    tokenizer = load_tokenizer(directory / "model")
    assert tokenizer is not None
    core = make_core(model, tiny_plan(model, lookahead=lookahead), make_detokenizer=tokenizer.make_detokenizer)
    free = run_one(core, request(max_tokens=24))
    assert free.text == tokenizer.decode(free.token_ids)
    stop = free.text[len(free.text) // 2 :][:3]
    out = run_one(core, request(max_tokens=24, stop=(stop, "never there")))
    assert out.finish_reason == "stop"
    assert out.text == free.text[: free.text.index(stop)]
    # The tokens are those that made the stop string, and no more, however late it was seen.
    assert out.token_ids == free.token_ids[: len(out.token_ids)]
    assert stop in tokenizer.decode(out.token_ids) and stop not in tokenizer.decode(out.token_ids[:-1])
    # A whole answer inside the thinking part: the stop string sleeps.
    asleep = run_one(core, request(max_tokens=24, stop=(stop,), thinking_end="</think>"))
    assert (asleep.finish_reason, asleep.text, asleep.reasoning_text) == ("length", "", free.text)


def test_what_can_never_fit_fails_alone(model: Model) -> None:
    core = make_core(model, tiny_plan(model, host=128, gpu=64))
    out = run_all(core, [request(0, prompt=120, max_tokens=9), request(1, prompt=120, max_tokens=8)])
    assert out[0].failure is not None and out[0].failure.code == "too_long" and out[0].token_ids == ()
    assert len(out[1].token_ids) == 8


def test_requests_are_pulled_only_when_they_may_soon_run(model: Model) -> None:
    pulled = finished = 0

    def source() -> Iterator[Request]:
        nonlocal pulled
        for i in range(12):
            pulled += 1
            yield request(i, max_tokens=3)

    core = make_core(model, tiny_plan(model, seqs=2))
    for completion in core.run(source()):
        finished += completion is not None
        assert pulled - finished <= 2 + 2 + 1  # running, just finished but not yielded yet, first in line
    assert finished == 12


# --- sampling -------------------------------------------------------------------------------------------------------


def test_samples_do_not_depend_on_the_batch(model: Model) -> None:
    ways = [
        dict(temperature=1.0),
        dict(temperature=0.8, top_p=0.9),
        dict(temperature=1.3, min_p=0.05),
        dict(temperature=1.0, top_k=20, top_p=0.95, min_p=0.01, seed=5),
        dict(temperature=0.0),
    ]
    rows = [request(i, **way) for i, way in enumerate(ways)]
    together = tokens_of(run_all(make_core(model), rows))
    alone = make_core(model, tiny_plan(model, seqs=1, gpu=64))
    assert tokens_of(run_all(alone, reversed(rows))) == together
    assert together[0] != run_one(alone, request(0, temperature=1.0, seed=1)).token_ids
    assert together[0] != run_one(alone, request(0, temperature=0.0)).token_ids


def test_same_prompt_other_row_other_samples(model: Model) -> None:
    first = request(0, temperature=1.0)
    second = Request(row_id=1, prompt_token_ids=first.prompt_token_ids, sampling=first.sampling)
    out = tokens_of(run_all(make_core(model), [first, second]))
    assert out[0] != out[1]


def test_logprobs_are_the_oracle_s(model: Model, directory: Path) -> None:
    rows = [request(0, logprobs=3), request(1), request(2, logprobs=0, temperature=1.0)]
    out = run_all(make_core(model), rows)
    assert out[1].logprobs is None
    for row in (rows[0], rows[2]):
        completion = out[row.row_id]
        assert completion.logprobs is not None and len(completion.logprobs) == 16
        expected = oracle_logits(directory, row.prompt_token_ids, completion.token_ids).log_softmax(-1)
        for i, entry in enumerate(completion.logprobs):
            assert entry.token_id == completion.token_ids[i]
            assert entry.logprob == pytest.approx(float(expected[i, entry.token_id]), abs=1e-4)
            assert len(entry.top) == row.sampling.logprobs
            if entry.top:
                values, ids = expected[i].topk(3)
                assert [token for token, _ in entry.top] == ids.tolist()
                assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)


# --- wrong rows -----------------------------------------------------------------------------------------------------


def test_a_corrupted_host_row_changes_the_output(model: Model) -> None:
    """The mutation that all comparisons rest on: what was evicted really comes back from the host."""
    plan = tiny_plan(model, host=192, gpu=64)
    row = request(prompt=96, max_tokens=24)

    def resident(core: EngineCore) -> torch.Tensor:
        assert isinstance(core.cache, OffloadedCache)
        return core.cache.maps.host_to_gpu[0] >= 0

    # First run: find a slot that was resident, was evicted, and is recalled in a later step.
    core = make_core(model, plan)
    was_resident, before = torch.zeros(192, dtype=torch.bool), torch.zeros(192, dtype=torch.bool)
    found: tuple[int, int] | None = None
    expected: Completion | None = None
    for step, completion in enumerate(core.run([row])):
        now = resident(core)
        recalled = (now & ~before & was_resident).nonzero()
        if found is None and len(recalled):
            found = (step, int(recalled[0]))
        was_resident |= now
        before = now.clone()
        expected = completion or expected
    assert found is not None and expected is not None

    # Second run: corrupt that one host row of the first layer right before it is recalled.
    at, slot = found
    core = make_core(model, plan)
    changed: Completion | None = None
    num_known = 0
    for step, completion in enumerate(core.run([row])):
        if step == at - 1:
            assert not bool(resident(core)[slot])
            assert isinstance(core.cache, OffloadedCache)
            core.cache.host_rows(0)[slot].view(torch.float32).fill_(20.0)
            num_known = core.stats.generated_tokens
        changed = completion or changed
    assert changed is not None and changed.token_ids != expected.token_ids
    assert num_known > 0 and changed.token_ids[:num_known] == expected.token_ids[:num_known]


def test_a_non_finite_row_fails_alone_in_decode(model: Model) -> None:
    rows = make_requests(SHORT, lengths=(96, 70, 50))
    expected = tokens_of(run_all(make_core(model), rows))
    core = make_core(model)
    done: dict[int, Completion] = {}
    for step, completion in enumerate(core.run(rows)):
        if step == 8:
            assert isinstance(core.cache, OffloadedCache)
            table = core.state.block_table[core.state.row_id == 0].flatten()
            slots = slots_of_blocks(table[table >= 0])[:96]
            for layer in range(model.config.num_layers):
                core.cache.host_rows(layer).view(torch.float32)[slots] = float("nan")
        if completion is not None:
            done[completion.row_id] = completion
    failure = done[0].failure
    assert failure is not None and failure.code == "engine_failed" and "non-finite" in failure.message
    assert done[0].token_ids == () and done[0].text is None
    assert {i: done[i].token_ids for i in (1, 2)} == {i: expected[i] for i in (1, 2)}
    assert tokens_of(run_all(core, rows)) == expected  # and nothing of it stays behind


def test_a_non_finite_row_fails_alone_in_prefill(directory: Path) -> None:
    model = load_fp32(directory / "model")
    rows = make_requests(SHORT, lengths=(20, 96, 30))
    expected = tokens_of(run_all(make_core(model), rows))
    seen = {t for i in (0, 2) for t in (*rows[i].prompt_token_ids, *expected[i])}
    unique = next(t for t in rows[1].prompt_token_ids if t not in seen)
    model.weights.embedding[unique] = float("nan")
    out = run_all(make_core(model), rows)
    failure = out[1].failure
    assert failure is not None and failure.code == "engine_failed"
    assert {i: out[i].token_ids for i in (0, 2)} == {i: expected[i] for i in (0, 2)}


# --- leaving and losing ---------------------------------------------------------------------------------------------


def test_an_abandoned_run_leaves_nothing_behind(model: Model) -> None:
    core = make_core(model)
    expected = run_one(core, request(0))
    steps = core.run([request(1), request(2, prompt=100)])
    for _ in range(5):
        next(steps)
    steps.close()
    core.cache.check_invariants(live_blocks=[])
    assert run_one(core, request(0)) == expected


class LostDevice:
    """A runner whose device is lost at its second step."""

    def __init__(self, core: EngineCore, error: Exception) -> None:
        self._runner, self._error, self._steps = core.runner, error, 0

    def launch(self, *args: Any, **kwargs: Any) -> Any:
        self._steps += 1
        if self._steps == 2:
            raise self._error
        return self._runner.launch(*args, **kwargs)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore lines"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_lost_device_is_an_engine_loss(model: Model, error: Exception) -> None:
    core = make_core(model)
    core.runner = LostDevice(core, error)  # type: ignore[assignment]
    with pytest.raises(EngineLostError) as caught:
        run_all(core, [request(0), request(1)])
    assert "\n" not in str(caught.value) and caught.value.exit_code == 75


def test_a_bug_is_not_an_engine_loss(model: Model) -> None:
    core = make_core(model)
    core.runner = LostDevice(core, RuntimeError("shapes do not match"))  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="shapes"):
        run_all(core, [request(0)])

"""A recorded schedule, replayed in other pools and modes: the same bits, or an error that says where they differ."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from echo_batch.cache.manager import make_cache
from echo_batch.engine.build import assemble_core
from echo_batch.engine.checksum import row_checksums
from echo_batch.engine.core import EngineCore
from echo_batch.engine.plan import Plan
from echo_batch.engine.schedule import open_schedule
from echo_batch.errors import ConfigError, ScheduleDivergedError
from echo_batch.kernels.cache_ops import CacheOps, reference_cache_ops
from echo_batch.kernels.contracts import GroupMaps, Resolution
from echo_batch.kernels.ops import reference_ops
from echo_batch.models.model import Model
from echo_batch.request import Completion, Request, SamplingParams
from tests.engine.engines import cached_model, run_all, tiny_plan
from tests.models.oracle import CheckpointFixture, random_ids

CPU = torch.device("cpu")
RECORDED = dict(host=1024, gpu=1024, seqs=3, group=300, chunk=100, lookahead=2)


@pytest.fixture(scope="module")
def model(tiny_checkpoint: CheckpointFixture) -> Model:
    return cached_model(tiny_checkpoint("v32", "fp32") / "model")


def ids(length: int, seed: int) -> list[int]:
    return random_ids(length, seed=seed).tolist()


def request(row_id: int, prompt: list[int], **sampling: Any) -> Request:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 30, "ignore_eos": True} | sampling)
    return Request(row_id=row_id, prompt_token_ids=prompt, sampling=params)


BOOK = ids(64, 1)
REQUESTS = [
    request(0, BOOK + ids(90, 2)),
    request(1, BOOK + ids(10, 3), temperature=0.9, top_p=0.9, max_tokens=12),
    request(2, ids(40, 4), max_tokens=1),
    request(9, ids(1000, 5), max_tokens=100),  # never fits
    request(3, ids(140, 6)),
    request(4, BOOK + ids(33, 7), logprobs=2, max_tokens=20),
    request(5, ids(30, 8), max_tokens=5),
]


def core_of(
    model: Model,
    plan: Plan,
    schedule: str | None,
    *,
    residency: bool = True,
    cache_ops: CacheOps | None = None,
    eos: tuple[int, ...] = (),
) -> EngineCore:
    opened, plan = open_schedule(schedule, plan)
    ops = reference_ops()
    cache = make_cache(plan.cache, CPU, ops, poison=True, residency=residency, cache_ops=cache_ops)
    core = assemble_core(model, cache, ops, plan, eos_token_ids=eos)
    core.schedule = opened
    return core


def run(core: EngineCore, requests: Sequence[Request] = REQUESTS) -> dict[int, Completion]:
    try:
        done = run_all(core, requests)
    finally:
        core.close()
    return {row: dataclasses.replace(completion, seconds=0.0) for row, completion in done.items()}


@pytest.fixture(scope="module")
def recorded(model: Model, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Completion]]:
    path = tmp_path_factory.mktemp("schedule") / "steps.jsonl"
    core = core_of(model, tiny_plan(model, **RECORDED), f"record:{path}")
    done = run(core)
    assert core.stats.resident_steps == core.stats.decode_steps > 30
    return path, done


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def changed(recorded: tuple[Path, dict[int, Completion]], tmp_path: Path, values: list[dict[str, Any]]) -> str:
    """The option that replays a changed copy."""
    path = tmp_path / "changed.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in values), encoding="utf-8")
    return f"replay:{path}"


def test_the_file_says_what_the_engine_did(recorded: tuple[Path, dict[int, Completion]]) -> None:
    path, done = recorded
    header, *events = lines(path)
    assert header["schedule"] == 1 and header["lookahead_steps"] == 2 and header["prefill_chunk_tokens"] == 100
    kinds = [event["event"] for event in events]
    assert kinds[-1] == "end" and {"prefill", "step", "release", "refuse"} < set(kinds)
    assert events[-1]["requests"] == len(REQUESTS)
    assert [e["step"] for e in events if e["event"] == "step"] == list(range(kinds.count("step")))
    (refused,) = [e for e in events if e["event"] == "refuse"]
    assert (refused["request"], refused["code"]) == (9, "too_long")
    tokens: dict[int, list[int]] = {}
    for event in events:
        if event["event"] in ("prefill", "step"):
            rows = [r["request"] if event["event"] == "prefill" else r[1] for r in event["rows"]]
            assert all(len(text) == 16 for text in event["result"]["logits"])
            for row, token in zip(rows, event["result"]["tokens"], strict=True):
                if token >= 0:
                    tokens.setdefault(row, []).append(token)
    assert {row: tuple(t) for row, t in tokens.items()} == {r: c.token_ids for r, c in done.items() if not c.failure}


@pytest.mark.parametrize(
    ("settings", "residency"),
    [
        (dict(host=1024, gpu=128), True),  # the smallest pool for this batch: leaves residency in the first group
        (dict(host=1024, gpu=320), True),
        (dict(host=768, gpu=768), False),
        (dict(host=1024, offload=False), True),
    ],
    ids=["minimum pool", "small pool", "residency off", "offload off"],
)
def test_other_pools_and_modes_give_the_same_bits(
    model: Model, recorded: tuple[Path, dict[int, Completion]], settings: dict[str, Any], residency: bool
) -> None:
    path, expected = recorded
    # Chunk, lookahead and batch limits are the recorded ones, whatever this run would have chosen.
    plan = tiny_plan(model, **{"seqs": 8, "chunk": 64, "lookahead": 0} | settings)
    core = core_of(model, plan, f"replay:{path}", residency=residency)
    assert run(core) == expected
    assert core.plan.prefill_chunk_tokens == 100 and core.plan.lookahead_steps == 2
    evicted = sum(core.cache.counters().evicted_rows)
    assert (evicted > 0) == (settings.get("gpu", 1024) < 768), evicted
    assert core.stats.decode_steps == sum(line.get("event") == "step" for line in lines(path))


def corrupting(at_step: int) -> CacheOps:
    """Cache ops whose recalls of one step bring wrong bytes: the bug that all of this is there to find."""
    ops = reference_cache_ops()

    def resolve(
        maps: GroupMaps, selected: Tensor, step: Tensor, host_rows: Tensor, gpu_rows: Tensor, *, skip: int | None = None
    ) -> Resolution:
        resolution = ops.resolve(maps, selected, step, host_rows, gpu_rows, skip=skip)
        if int(step) == at_step and len(resolution.miss_rows):
            gpu_rows[resolution.miss_rows[0], :4] ^= 1
        return resolution

    return dataclasses.replace(ops, resolve=resolve)


def test_a_corrupted_recall_is_caught(model: Model, recorded: tuple[Path, dict[int, Completion]]) -> None:
    path, expected = recorded
    plan = tiny_plan(model, host=1024, gpu=128)
    with pytest.raises(ScheduleDivergedError, match=r"^step 1\d, row \d \(request \d\): ") as caught:
        run(core_of(model, plan, f"replay:{path}", residency=False, cache_ops=corrupting(12)))
    assert caught.value.exit_code == 11
    assert run(core_of(model, plan, f"replay:{path}", residency=False, cache_ops=corrupting(-1))) == expected


def test_the_first_difference_is_named(
    model: Model, recorded: tuple[Path, dict[int, Completion]], tmp_path: Path
) -> None:
    plan = tiny_plan(model, **RECORDED)

    def diverges(change: Any) -> str:
        values = lines(recorded[0])
        change(values)
        with pytest.raises(ScheduleDivergedError) as caught:
            run(core_of(model, plan, changed(recorded, tmp_path, values)))
        return str(caught.value)

    def step(values: list[dict[str, Any]], number: int) -> dict[str, Any]:
        return next(v for v in values if v.get("step") == number)

    def other_logits(values: list[dict[str, Any]]) -> None:
        step(values, 7)["result"]["logits"][0] = "0" * 16
        step(values, 9)["result"]["tokens"][0] += 1

    def other_token(values: list[dict[str, Any]]) -> None:
        for i in range(2):
            step(values, 7)["result"]["tokens"][i] ^= 1

    row, other = step(lines(recorded[0]), 7)["rows"][:2]
    tokens = step(lines(recorded[0]), 7)["result"]["tokens"]
    said = diverges(other_logits)
    assert said == f"step 7, row {row[0]} (request {row[1]}): other logits (the same token {tokens[0]})"
    said = diverges(other_token)
    assert said.startswith(f"step 7, row {row[0]} (request {row[1]}): token {tokens[0]} where the schedule has")
    assert "2 of " in said and other[1] != row[1]

    def other_group(values: list[dict[str, Any]]) -> None:
        next(v for v in values if v.get("event") == "prefill")["result"]["codes"][0] = 1

    assert diverges(other_group).startswith("prefill group 0, row 0 (request 0): another end")

    def other_batch(values: list[dict[str, Any]]) -> None:
        step(values, 7)["bucket"] += 1

    assert diverges(other_batch).startswith("step 7: another batch runs: bucket ")

    def longer(values: list[dict[str, Any]]) -> None:
        last = max(v.get("step", -1) for v in values)
        values.insert(-2, step(values, last) | {"step": last + 1})

    assert "no row runs any more" in diverges(longer)


def test_what_cannot_be_replayed_is_refused_before_the_run(
    model: Model, recorded: tuple[Path, dict[int, Completion]], tmp_path: Path
) -> None:
    path = recorded[0]
    good = tiny_plan(model, **RECORDED)

    def refused(schedule: str, plan: Plan = good) -> str:
        with pytest.raises(ConfigError) as caught:
            open_schedule(schedule, plan)
        return str(caught.value)

    assert "cannot read the schedule" in refused(f"replay:{tmp_path / 'nowhere'}")
    (tmp_path / "text").write_text("hello\n")
    assert "is not a schedule" in refused(f"replay:{tmp_path / 'text'}")
    values = lines(path)
    assert "has no end" in refused(changed(recorded, tmp_path, values[:-1]))
    assert "line 3: not an event" in refused(changed(recorded, tmp_path, [*values[:2], {"event": "dance"}, *values]))
    assert "line 3: not an event" in refused(changed(recorded, tmp_path, [*values[:2], 5]))
    damaged = tmp_path / "damaged"
    damaged.write_bytes(path.read_bytes().replace(b'"event":"end"', b'"event":"e\xffd"'))
    assert "not an event" in refused(f"replay:{damaged}")
    assert "version 2" in refused(changed(recorded, tmp_path, [values[0] | {"schedule": 2}, *values[1:]]))
    assert "recorded with dtype bfloat16" in refused(
        changed(recorded, tmp_path, [values[0] | {"dtype": "bfloat16"}, *values[1:]])
    )
    assert "--gpu-pool 128" in refused(f"replay:{path}", tiny_plan(model, host=1024, gpu=64))
    assert "--host-pool" in refused(f"replay:{path}", tiny_plan(model, host=256, gpu=256))
    assert "--gpu-pool" in refused(f"replay:{path}", tiny_plan(model, host=256, offload=False))


def test_another_input_is_refused(model: Model, recorded: tuple[Path, dict[int, Completion]]) -> None:
    plan, replay = tiny_plan(model, **RECORDED), f"replay:{recorded[0]}"
    for requests, message in (
        (REQUESTS[:-1], "request 5 of the schedule .* is not in the input"),
        ([*REQUESTS, request(8, ids(5, 9))], "request 8 is not in the schedule"),
        ([request(0, BOOK + ids(90, 3)), *REQUESTS[1:]], "request 0 had another prompt"),
        ([request(0, BOOK + ids(90, 2), max_tokens=31), *REQUESTS[1:]], "184 tokens at its longest, here 185"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(core_of(model, plan, replay), requests)


def test_inputs_of_a_replay_are_forced(
    model: Model, recorded: tuple[Path, dict[int, Completion]], tmp_path: Path
) -> None:
    """The engine is fed the recorded tokens, not its own: with results read two steps late, a token changed in the file
    is the next step's input before the difference is noticed."""
    values = lines(recorded[0])
    at = next(v for v in values if v.get("step") == 7)
    assert at["rows"][0][0] == 0
    at["result"]["tokens"][0] ^= 1
    core = core_of(model, tiny_plan(model, **RECORDED), changed(recorded, tmp_path, values))
    fed: list[int] = []
    launch = core.runner.launch

    def spy(*args: Any, **kwargs: Any) -> Any:
        fed.append(int(core.state.token_ids[0]))
        return launch(*args, **kwargs)

    core.runner = type("Spy", (), {"launch": staticmethod(spy)})()  # type: ignore[assignment]
    with pytest.raises(ScheduleDivergedError, match=r"^step 7, row 0"):
        run(core)
    assert fed[8] == at["result"]["tokens"][0] and len(fed) == 10


def test_several_runs_of_one_engine(model: Model, tmp_path: Path) -> None:
    path, plan = tmp_path / "two.jsonl", tiny_plan(model, **RECORDED)
    results = []
    for mode in ("record", "replay"):
        core = core_of(model, plan, f"{mode}:{path}")
        first = {r: c.token_ids for r, c in run_all(core, REQUESTS[:2]).items()}
        second = {r: c.token_ids for r, c in run_all(core, REQUESTS[4:]).items()}
        core.close()
        results.append((first, second))
    assert results[0] == results[1]


# --- checksums ------------------------------------------------------------------------------------------------------


def test_checksums_see_every_bit() -> None:
    logits = torch.randn(3, 70_000, generator=torch.Generator().manual_seed(0))
    before = row_checksums(logits)
    assert before.dtype == torch.int64 and len(set(before.tolist())) == 3
    assert torch.equal(row_checksums(logits.flip(0)), before.flip(0))
    assert torch.equal(row_checksums(torch.cat([logits, logits], 1)[:, :70_000]), before)  # strides do not matter
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        place, bit = (int(torch.randint(n, (), generator=generator)) for n in (70_000, 32))
        other = logits.clone()
        other.view(torch.int32)[1, place] ^= -(1 << 31) if bit == 31 else 1 << bit
        assert (row_checksums(other) != before).tolist() == [False, True, False]
    swapped = logits.clone()
    swapped[0, [3, 69_000]] = swapped[0, [69_000, 3]]
    assert (row_checksums(swapped) != before).tolist() == [True, False, False]
    zeros = torch.zeros(2, 5)
    zeros[1, 2] = -0.0
    assert len(set(row_checksums(zeros).tolist())) == 2

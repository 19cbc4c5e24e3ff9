from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_batch.cache.blocks import BlockAllocator
from echo_batch.engine.scheduler import Limits, Scheduler
from echo_batch.engine.sequence import Sequence
from echo_batch.request import Request, RowFailure, SamplingParams

LIMITS = Limits(
    max_num_seqs=4, gpu_tokens=128, index_topk=32, max_model_len=640, prefill_group_tokens=300, offload=True
)


def sequence(row_id: int, prompt: int, max_tokens: int) -> Sequence:
    request = Request(
        row_id=row_id,
        prompt_token_ids=range(1000 * row_id, 1000 * row_id + prompt),
        sampling=SamplingParams(max_tokens=max_tokens),
    )
    return Sequence(request, max_tokens)


def scheduler(*shapes: tuple[int, int], blocks: int = 10, limits: Limits = LIMITS) -> Scheduler:
    source = (sequence(i, p, m) for i, (p, m) in enumerate(shapes))
    return Scheduler(source, BlockAllocator(blocks), limits)


def ids(sequences: list[Sequence]) -> list[int]:
    return [s.request.row_id for s in sequences]


def admit(s: Scheduler) -> tuple[list[Sequence], list[tuple[Sequence, RowFailure]]]:
    """What joins now, without waiting for more."""
    staged = s.stage()
    return s.start(), staged.refused


def test_admission_waits_for_host_slots_and_goes_on_in_order() -> None:
    s = scheduler((100, 28), (500, 12), (10, 10))  # 2, 8 and 1 blocks of 10
    admitted, refused = admit(s)
    assert ids(admitted) == [0] and not refused  # 100 + 500 exceeds the prefill group
    admitted, _ = admit(s)
    assert ids(admitted) == [1]
    assert admit(s) == ([], [])  # no block left: row 2 waits
    assert ids(list(s.waiting)) == [2] and s.max_waiting == 1
    freed = s.finish(s.running[0])
    assert len(freed) == 2
    admitted, _ = admit(s)
    assert ids(admitted) == [2] and set(admitted[0].blocks) <= set(freed)


def test_nobody_overtakes_the_head_of_the_line() -> None:
    s = scheduler((300, 20), (400, 20), (5, 5))
    assert ids(admit(s)[0]) == [0]
    assert admit(s)[0] == []  # row 1 does not fit beside row 0; row 2 would
    assert ids(list(s.waiting)) == [1]


def test_gpu_minimum_bounds_the_batch() -> None:
    s = scheduler(*[(60, 4)] * 4)  # min(32, 64) + 1 = 33 rows each: three fit into 128
    assert ids(admit(s)[0]) == [0, 1, 2]
    assert s.gpu_tokens_reserved == 99
    without = scheduler(
        *[(60, 4)] * 4,
        limits=Limits(
            max_num_seqs=4, gpu_tokens=128, index_topk=32, max_model_len=640, prefill_group_tokens=300, offload=False
        ),
    )
    assert ids(admit(without)[0]) == [0, 1, 2, 3]


def test_rows_bound_the_batch_and_are_reused_lowest_first() -> None:
    s = scheduler(*[(3, 1)] * 6)
    s.limits = Limits(max_num_seqs=4, gpu_tokens=1000, index_topk=32, max_model_len=640, prefill_group_tokens=300)
    assert [q.row for q in admit(s)[0]] == [0, 1, 2, 3]
    s.finish(s.running[2])
    s.finish(s.running[1])
    assert [(q.request.row_id, q.row) for q in admit(s)[0]] == [(4, 1), (5, 2)]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "word"),
    [(630, 20, "limit"), (600, 30, "host slots"), (40, 10, "GPU rows")],
)
def test_what_can_never_fit_is_refused_with_the_reason(prompt: int, max_tokens: int, word: str) -> None:
    limits = (
        LIMITS
        if word != "GPU rows"
        else Limits(max_num_seqs=4, gpu_tokens=32, index_topk=32, max_model_len=640, prefill_group_tokens=300)
    )
    s = scheduler((prompt, max_tokens), (10, 5), blocks=9, limits=limits)
    admitted, refused = admit(s)
    assert [(q.request.row_id, word in failure.message) for q, failure in refused] == [(0, True)]
    assert ids(admitted) == [1]


def test_requests_are_pulled_only_when_they_may_run() -> None:
    pulled = []

    def source() -> Iterator[Sequence]:
        for i in range(100):
            pulled.append(i)
            yield sequence(i, 60, 4)

    s = Scheduler(source(), BlockAllocator(10), LIMITS)
    admit(s)
    assert len(pulled) == 4  # three run, one waits


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 100)), max_size=30), st.randoms(use_true_random=False))
def test_everything_that_fits_finishes_and_nothing_leaks(shapes: list[tuple[int, int]], random: Random) -> None:
    s = scheduler(*shapes)
    done: list[int] = []
    for _ in range(10_000):
        if s.done:
            break
        _, refused = admit(s)
        done += ids([q for q, _ in refused])
        assert len({q.row for q in s.running.values()}) == len(s.running) <= 4
        assert s.gpu_tokens_reserved <= 128
        used = [b for q in s.running.values() for b in q.blocks]
        assert len(set(used)) == len(used) == 10 - s.blocks.num_free
        assert s.running or refused, "nothing runs and nothing was refused: a hang"
        if s.running:
            victim = random.choice(sorted(s.running))
            done.append(s.running[victim].request.row_id)
            s.finish(s.running[victim])
    assert sorted(done) == list(range(len(shapes)))
    assert s.blocks.num_free == 10 and s.gpu_tokens_reserved == 0

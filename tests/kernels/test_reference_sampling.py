import math

import pytest
import torch

from echo_batch.kernels.reference import sampling as reference
from echo_batch.kernels.reference.sampling import (
    LENGTH,
    NO_BLOCK,
    NON_FINITE,
    RUNNING,
    STOPPED,
    SamplingTensors,
    advance_rows,
    filter_logits,
    greedy_sample,
    gumbel_noise,
    philox,
    sample,
    token_logprobs,
)


def params(batch: int, **values: float | list[float]) -> SamplingTensors:
    defaults = dict(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, row_id=0, position=0)
    types = dict(temperature=torch.float32, top_p=torch.float32, top_k=torch.int32, min_p=torch.float32)
    types |= dict(seed=torch.int64, row_id=torch.int64, position=torch.int32)
    made = {}
    for name, default in defaults.items():
        value = values.get(name, default)
        made[name] = torch.tensor(value if isinstance(value, list) else [value] * batch, dtype=types[name])
    return SamplingTensors(**made)


def t(*values: int) -> list[torch.Tensor]:
    return [torch.tensor([v], dtype=torch.int64) for v in values]


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [  # known-answer vectors of the Random123 distribution
        (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (-1, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(key: int, counter: tuple[int, ...], expected: tuple[int, ...]) -> None:
    words = philox(*t(key), *t(*counter))
    assert tuple(int(w) for w in words) == expected


def test_noise_is_a_function_of_seed_row_position_and_token_only() -> None:
    whole = gumbel_noise(params(3, seed=[1, 2, 1], row_id=[7, 7, 2**40], position=[5, 5, 5]), 37)
    alone = gumbel_noise(params(1, seed=2, row_id=7, position=5), 40)
    assert torch.equal(whole[1], alone[0, :37])
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(whole[0], whole[2])
    assert torch.isfinite(whole).all()


def test_sampling_follows_the_distribution() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().repeat(20_000, 1)
    tokens, _ = sample(logits, params(20_000, position=list(range(20_000))))
    share = torch.bincount(tokens, minlength=4) / 20_000
    assert torch.allclose(share, torch.tensor([0.5, 0.25, 0.125, 0.125]), atol=0.015)


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [2.0, 2.0, 1.0]])
    assert sample(logits, params(2, temperature=0.0))[0].tolist() == [1, 0]
    assert greedy_sample(logits)[0].tolist() == [1, 0]


def test_mixed_batch_keeps_greedy_rows_greedy() -> None:
    logits = torch.randn(4, 50)
    tokens, _ = sample(logits, params(4, temperature=[0.0, 1.0, 0.0, 2.0]))
    assert tokens[0] == logits[0].argmax() and tokens[2] == logits[2].argmax()


def kept(logits: list[float], **values: float) -> list[int]:
    row = filter_logits(torch.tensor([logits]), params(1, **values))[0]
    return [i for i, v in enumerate(row.tolist()) if v != -math.inf]


def test_filters() -> None:
    logits = [math.log(p) for p in (0.1, 0.4, 0.3, 0.2)]
    assert kept(logits, top_k=2) == [1, 2]
    assert kept(logits, top_p=0.5) == [1, 2]
    assert kept(logits, top_p=0.4) == [1]
    assert kept(logits, top_p=1e-9) == [1]
    assert kept(logits, min_p=0.6) == [1, 2]
    assert kept(logits, min_p=1.0) == [1]
    assert kept(logits, top_k=3, top_p=0.45) == [1, 2]  # 0.4/0.9 = 0.444 alone does not reach 0.45
    assert kept([1.0, 1.0, 1.0], top_k=2) == [0, 1]
    assert kept(logits) == [0, 1, 2, 3]


def test_rows_that_are_not_finite_are_flagged_alone() -> None:
    logits = torch.randn(3, 50)
    logits[1, 7] = math.nan
    tokens, finite = sample(logits, params(3))
    assert finite.tolist() == [True, False, True] and ((tokens >= 0) & (tokens < 50)).all()
    assert torch.equal(tokens[[0, 2]], sample(logits[[0, 2]], params(2))[0])


def test_noise_of_all_random_bits_set_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    for word in (0, 0xFFFFFFFF):
        words = torch.full((1, 1), word, dtype=torch.int64)
        monkeypatch.setattr(reference, "philox", lambda *_, words=words: (words,) * 4)
        assert torch.isfinite(gumbel_noise(params(1), 4)).all()


def test_temperature_divides_logits() -> None:
    row = filter_logits(torch.tensor([[2.0, 4.0]]), params(1, temperature=2.0))
    assert row.tolist() == [[1.0, 2.0]]


def test_token_logprobs() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.3, 0.2]]).log() + 3.0
    chosen, values, ids = token_logprobs(logits, torch.tensor([2]), 2)
    assert chosen.exp().item() == pytest.approx(0.3, rel=1e-5)
    assert ids.tolist() == [[1, 2]]
    assert values.exp()[0].tolist() == pytest.approx([0.4, 0.3], rel=1e-5)


def test_greedy_flags_rows_that_are_not_finite() -> None:
    logits = torch.randn(4, 9)
    logits[1, 3], logits[2, 0], logits[3, 8] = float("nan"), float("inf"), float("-inf")
    tokens, finite = greedy_sample(logits)
    assert finite.tolist() == [True, False, False, False]
    assert ((tokens >= 0) & (tokens < 9)).all()


def test_advance_rows() -> None:
    state = dict(
        token_ids=torch.tensor([1, 2, 3, 4, 5, 6]),
        positions=torch.tensor([10, 10, 10, 10, 10, 10], dtype=torch.int32),
        active=torch.tensor([True, True, True, True, True, False]),
    )
    told, codes = advance_rows(
        torch.tensor([7, 8, 9, 7, 7, 7]),
        torch.tensor([True, True, True, False, True, True]),
        torch.tensor([True, True, True, True, False, True]),
        stop_ids=torch.tensor([[8, -1]] * 6),
        last_position=torch.tensor([20, 20, 11, 20, 20, 20], dtype=torch.int32),
        **state,
    )
    assert told.tolist() == [7, 8, 9, 7, 7, -1]
    assert codes.tolist() == [RUNNING, STOPPED, LENGTH, NON_FINITE, NO_BLOCK, RUNNING]
    assert state["token_ids"].tolist() == [7, 8, 9, 7, 7, 6]
    assert state["positions"].tolist() == [11, 11, 11, 11, 11, 10]
    assert state["active"].tolist() == [True, False, False, False, False, False]

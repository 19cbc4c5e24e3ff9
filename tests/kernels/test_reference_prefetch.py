"""The rules of prefetch, on the torch reference."""

import pytest
import torch

from echo_batch.kernels.prefetch_state import CANDIDATES, PREFETCHED, make_prefetch_state
from echo_batch.kernels.reference import cache_ops, prefetch
from tests.kernels.prefetch_scenario import Scenario, check_resolve, check_step

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_above", [8, 40])
@pytest.mark.parametrize("set_aside", [64, 16, 0])
def test_steps(num_above: int, set_aside: int) -> None:
    scenario = Scenario(CPU, set_aside=set_aside)
    for _ in range(3):
        totals = check_step(
            scenario, cache_ops, prefetch, prefetch.index_scores_prefetch, scenario.threshold(num_above)
        )
        check_resolve(scenario, cache_ops.resolve, num_above + 4)
        cache_ops.release(scenario.maps, torch.tensor([int(scenario.table[0, 0])], dtype=torch.int32))
        # The newest tokens are appended again in the next round.
        for slot in scenario.new_slots().tolist():
            row = int(scenario.maps.host_to_gpu[0, slot]) if slot >= 0 else -1
            if row >= 0:
                scenario.maps.host_to_gpu[0, slot] = scenario.maps.gpu_to_host[0, row] = -1
                scenario.maps.priority[0, row] = -1
    assert set_aside == 0 or totals[PREFETCHED] > 0


def test_nothing_is_prefetched_without_a_prediction() -> None:
    scenario = Scenario(CPU)
    unknown = torch.full((5,), float("nan"))
    assert check_step(scenario, cache_ops, prefetch, prefetch.index_scores_prefetch, unknown) == [0, 0, 0, 0]


def test_the_newest_token_is_left_out() -> None:
    scenario = Scenario(CPU)
    low = torch.full((5,), -1e9)
    totals = check_step(scenario, cache_ops, prefetch, prefetch.index_scores_prefetch, low)
    assert totals[CANDIDATES] == sum(max(0, length - 1) for length in scenario.lengths.tolist())


def test_rows_in_use_are_not_set_aside() -> None:
    scenario = Scenario(CPU, gpu_tokens=64)
    maps, step = scenario.maps, scenario.step
    cache_ops.begin_step(maps, step)
    cache_ops.append(maps, torch.arange(60, dtype=torch.int32), step)
    prefetch.set_aside(maps, scenario.state, step, 0)
    assert int((scenario.state.rows >= 0).sum()) == 4
    assert bool((maps.host_to_gpu[0, :60] >= 0).all())


def test_parts_split_the_rows() -> None:
    state = make_prefetch_state(1, 10, CPU)
    state.rows.copy_(torch.arange(10))
    parts = [state.part(i, 3) for i in range(3)]
    assert [part.rows.tolist()[0] for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]
    parts[1].taken.fill_(2)
    assert state.taken[0, :3].tolist() == [0, 2, 0]

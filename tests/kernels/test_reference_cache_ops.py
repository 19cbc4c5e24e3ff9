from collections import OrderedDict
from random import Random

import pytest
import torch

from echo_batch.kernels.cache_layout import EVICTED, FREE, MISSING, OFFLOADED, RECALLED, SELECTED
from echo_batch.kernels.contracts import GroupMaps, make_maps
from echo_batch.kernels.formats import IndexFormat
from echo_batch.kernels.reference import cache_ops, rows

CPU = torch.device("cpu")


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def maps_of(gpu_tokens: int, host_tokens: int, groups: int = 1) -> GroupMaps:
    return make_maps(groups, gpu_tokens=gpu_tokens, host_tokens=host_tokens, num_candidates=8, device=CPU)


def resolve(maps: GroupMaps, *selected: int, step: int) -> list[int]:
    host = torch.arange(maps.host_to_gpu.shape[1], dtype=torch.int32)[:, None].view(torch.uint8)
    gpu = torch.full((maps.priority.shape[1], 4), 0xFF, dtype=torch.uint8)
    result = cache_ops.resolve(maps, ints(*selected)[None], ints(step), host, gpu)
    assert gpu[result.miss_rows].view(torch.int32)[:, 0].tolist() == result.miss_slots.tolist()
    return result.rows[0].tolist()


def test_free_rows_go_first_then_the_least_recently_used() -> None:
    maps = maps_of(4, 32)
    assert resolve(maps, 10, 11, 12, step=1) == [0, 1, 2]
    assert resolve(maps, 11, step=2) == [1]
    assert resolve(maps, 13, step=3) == [3], "row 3 is still free"
    assert resolve(maps, 14, step=4) == [0], "rows 0 and 2 are oldest; ties by row"
    assert resolve(maps, 15, step=5) == [2]
    assert resolve(maps, 16, step=6) == [1]
    assert maps.gpu_to_host[0].tolist() == [14, 16, 15, 13]
    assert maps.totals[0, EVICTED] == 3
    assert not cache_ops.violations(maps, ints(6)).any()


def test_hits_are_marked_before_anything_is_evicted() -> None:
    maps = maps_of(4, 32)
    resolve(maps, 10, 11, 12, 13, step=1)
    resolve(maps, 11, 12, 13, step=2)
    # Slot 10's row is the oldest; it is selected in the same step that needs three rows.
    assert resolve(maps, 20, 21, 22, 10, step=3)[3] == 0
    assert maps.gpu_to_host[0].tolist() == [10, 20, 21, 22]


def test_a_slot_missed_by_several_rows_is_claimed_once() -> None:
    maps = maps_of(8, 32)
    assert resolve(maps, 5, 6, 5, -1, 5, step=1) == [0, 1, 0, -1, 0]
    totals = maps.totals[0]
    assert [int(totals[c]) for c in (SELECTED, MISSING, RECALLED, EVICTED)] == [4, 4, 2, 0]


def test_too_small_a_pool_is_an_assertion() -> None:
    maps = maps_of(4, 32)
    cache_ops.append(maps, ints(1), ints(1))
    with pytest.raises(AssertionError, match="no evictable row"):
        resolve(maps, 2, 3, 4, 5, step=1)


def test_append_protects_in_its_step_and_covers_all_groups() -> None:
    maps = maps_of(4, 32, groups=2)
    resolve(maps.group(1), 10, 11, 12, 13, step=1)
    rows = cache_ops.append(maps, ints(20, -1, 21), ints(2))
    assert rows.tolist() == [[0, -1, 1], [0, -1, 1]]
    assert maps.totals[:, OFFLOADED].tolist() == [2, 2] and maps.totals[:, EVICTED].tolist() == [0, 2]
    assert resolve(maps.group(1), 10, 11, step=2) == [2, 3], "the new rows stay"
    with pytest.raises(AssertionError, match="already resident"):
        cache_ops.append(maps, ints(20), ints(3))


def test_warm_takes_free_rows_only() -> None:
    maps = maps_of(4, 32)
    resolve(maps, 10, 11, step=1)
    assert cache_ops.warm(maps, ints(20, 10, -1, 20, 21, 22), ints(1)).tolist() == [2, -1, -1, -1, 3, -1]
    assert maps.gpu_to_host[0].tolist() == [10, 11, 20, 21]
    assert cache_ops.warm(maps, ints(23), ints(1)).tolist() == [-1]


def test_release_clears_whole_blocks() -> None:
    maps = maps_of(8, 192, groups=2)
    for g in range(2):
        resolve(maps.group(g), 1, 63, 64, 130, step=1)
    cache_ops.release(maps, ints(0, 2))
    assert maps.gpu_to_host.tolist() == [[-1, -1, 64, -1] + [-1] * 4] * 2
    assert maps.priority.tolist() == [[FREE, FREE, 1, FREE] + [FREE] * 4] * 2
    assert not cache_ops.violations(maps, ints(1)).any()


def test_copies_skip_what_is_not_there() -> None:
    source = torch.arange(8, dtype=torch.uint8)[:, None].expand(8, 4).contiguous()
    target = torch.full((6, 4), 99, dtype=torch.uint8)
    cache_ops.copy_rows(source, ints(7, -1, 5, 4, 3), target, ints(0, 1, -1, 3, 4), ints(4))
    assert target[:, 0].tolist() == [7, 99, 99, 4, 99, 99]
    cache_ops.copy_rows(source, None, target, ints(5, -1), None)
    cache_ops.copy_rows(source, ints(6, 6), target, None, None)
    assert target[:, 0].tolist() == [6, 6, 99, 4, 99, 0]
    cache_ops.fill_rows(target, ints(2, -1))
    assert target[:, 0].tolist() == [6, 6, 255, 4, 99, 0]
    host = torch.zeros((8, 4), dtype=torch.uint8)
    cache_ops.write_rows(source[3:5], target, ints(1, -1), host, ints(-1, 2))
    assert target[1, 0] == 3 and host[:, 0].tolist() == [0, 0, 4, 0, 0, 0, 0, 0]


def test_new_tokens_are_written_everywhere_at_once() -> None:
    fmt = IndexFormat("fp32", head_dim=2)
    kv_rows, keys = torch.tensor([[5] * 4, [6] * 4], dtype=torch.uint8), torch.tensor([[7] * 8, [8] * 8]).byte()
    gpu, host = torch.zeros((3, 4), dtype=torch.uint8), torch.zeros((128, 4), dtype=torch.uint8)
    pages = torch.zeros((2, fmt.page_bytes), dtype=torch.uint8)
    cache_ops.write_tokens(kv_rows, gpu, ints(2, -1), host, ints(65, -1), keys, pages, fmt)
    assert gpu[:, 0].tolist() == [0, 0, 5] and host[65, 0] == 5 and int(host.count_nonzero()) == 4
    assert rows.read_index_keys(pages, ints(65), fmt).tolist() == [[7] * 8] and int(pages.count_nonzero()) == 8
    cache_ops.write_tokens(kv_rows, gpu, ints(0, 1), None, ints(0, 1), keys, pages, fmt)
    assert gpu[:, 0].tolist() == [5, 6, 5] and int(host.count_nonzero()) == 4


def test_eviction_is_exactly_lru() -> None:
    """Against an ordered dict, over a trace with drifting popularity."""
    random = Random(1)
    maps = maps_of(48, 512)
    lru: OrderedDict[int, int] = OrderedDict()  # slot -> last step, least recent first
    for step in range(1, 300):
        center = random.randrange(480) if step % 40 == 0 else step
        selected = sorted({(center + int(random.expovariate(0.05))) % 512 for _ in range(20)})
        resolve(maps, *selected, step=step)
        misses = [s for s in selected if s not in lru]
        for slot in selected:
            lru[slot] = step
            lru.move_to_end(slot)
        num_evicted = max(0, len(lru) - 48)
        oldest = sorted((last, slot) for slot, last in lru.items())
        resident = {int(s) for s in maps.gpu_to_host[0] if s >= 0}
        gone = set(lru) - resident
        assert len(gone) == num_evicted <= len(misses)
        # Rows of equal age may go in any order.
        assert all(lru[slot] <= oldest[max(num_evicted - 1, 0)][0] for slot in gone)
        for slot in gone:
            del lru[slot]
    assert int(maps.totals[0, EVICTED]) > 500

"""Whole cache steps replayed as one CUDA graph: races, host writes under replay, and evictions at the minimum pool."""

import dataclasses
import functools
from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import Tensor

from echo_batch.cache.blocks import BlockAllocator
from echo_batch.cache.manager import OffloadedCache, make_cache, slots_of_blocks
from echo_batch.kernels.cache_layout import EVICTED, FAILED, NUM_TOTALS
from echo_batch.kernels.cache_ops import CacheOps, triton_cache_ops
from echo_batch.kernels.contracts import make_maps
from echo_batch.kernels.ops import reference_ops
from tests.cache.driver import small_spec

pytestmark = pytest.mark.gpu

BATCH, K = 4, 15
CUDA = torch.device("cuda")


def delayed_ops(max_delay: int) -> CacheOps:
    """The cache ops with waits of different lengths in the programs of a resolve."""
    ops = triton_cache_ops()
    return dataclasses.replace(ops, resolve=functools.partial(ops.resolve, max_delay=max_delay))  # type: ignore[call-arg]


def capture(body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    body()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


class Replayed:
    """A decode step of BATCH rows on 64 GPU rows, exactly the minimum, as a graph with static inputs."""

    def __init__(self, cache: OffloadedCache) -> None:
        self.cache = cache
        spec = cache.spec
        row_bytes, layers = spec.row_format.row_bytes, spec.num_layers
        self.new = torch.full((BATCH,), -1, dtype=torch.int32, device=CUDA)
        self.selected = torch.full((spec.num_groups, BATCH, K), -1, dtype=torch.int32, device=CUDA)
        self.kv_rows = torch.zeros((layers, BATCH, row_bytes), dtype=torch.uint8, device=CUDA)
        self.rows = torch.empty_like(self.selected)
        self.gathered = torch.zeros((layers, BATCH, K, row_bytes), dtype=torch.uint8, device=CUDA)
        self.violations = torch.zeros((spec.num_groups, 4), dtype=torch.int32, device=CUDA)
        self.graph = capture(self.body)
        cache.reset()

    def body(self) -> None:
        cache = self.cache
        cache.begin_step()
        for group, layers in enumerate(cache.spec.group_layers):
            new_rows = cache.append(group, self.new)
            resolution = None
            for layer in layers:
                cache.write(layer, self.new, new_rows, self.kv_rows[layer])
                if resolution is None:
                    resolution = cache.resolve(group, self.selected[group])
                    self.rows[group] = resolution.rows
                cache.recall(layer, resolution)
                self.gathered[layer] = cache.gpu_rows(layer)[resolution.rows.clamp(min=0)]
            self.violations += cache._cache_ops.violations(cache.maps, cache.step)


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("max_delay", [0, 24])
def test_replays_move_the_right_bytes(poison: bool, max_delay: int) -> None:
    spec = small_spec(groups=((0,), (1, 2)), host_blocks=16)
    cache = make_cache(spec, CUDA, reference_ops(), poison=poison, cache_ops=delayed_ops(max_delay))
    assert isinstance(cache, OffloadedCache)
    step = Replayed(cache)
    random, generator = Random(7), torch.Generator().manual_seed(7)
    blocks = BlockAllocator(spec.num_blocks)
    host = torch.zeros((spec.num_layers, spec.host_tokens, spec.row_format.row_bytes), dtype=torch.uint8)
    requests: list[tuple[list[int], int]] = []

    def random_rows(n: int) -> Tensor:
        return torch.randint(0, 255, (n, spec.row_format.row_bytes), dtype=torch.uint8, generator=generator)

    for number in range(240):
        while len(requests) < BATCH - 1:
            own = blocks.allocate(3)
            assert own is not None
            slots = slots_of_blocks(torch.tensor(own, dtype=torch.int32))
            for layer in range(spec.num_layers):
                host[layer, slots[:130]] = random_rows(130)
                cache.write_host(layer, slots[:130].to(CUDA), host[layer, slots[:130]].to(CUDA))
            cache.warm(0, slots[100:110].to(CUDA), [host[0, slots[100:110]].to(CUDA)])
            requests.append((own, 130))
        new = torch.full((BATCH,), -1, dtype=torch.int32)
        selected = torch.full((spec.num_groups, BATCH, K), -1, dtype=torch.int32)
        for b, (own, length) in enumerate(requests):
            slots = slots_of_blocks(torch.tensor(own, dtype=torch.int32))[: length + 1]
            new[b] = slots[-1]
            for group in range(spec.num_groups):
                lately = [length - 1 - i for i in range(8)]
                selected[group, b] = slots[random.sample(sorted({*range(0, length, 3), *lately}), K - 1) + [length]]
            requests[b] = (own, length + 1)
        kv_rows = random_rows(spec.num_layers * BATCH).view(spec.num_layers, BATCH, -1)
        for layer in range(spec.num_layers):
            host[layer, new[new >= 0]] = kv_rows[layer, new >= 0]
        for static, value in ((step.new, new), (step.selected, selected), (step.kv_rows, kv_rows)):
            static.copy_(value)
        step.graph.replay()
        torch.cuda.synchronize()
        valid = selected >= 0
        assert torch.equal(step.rows.cpu() >= 0, valid), number
        for group, layers in enumerate(spec.group_layers):
            for layer in layers:
                got = step.gathered[layer].cpu()[valid[group]]
                assert torch.equal(got, host[layer, selected[group][valid[group]]]), (number, layer)
                assert torch.equal(cache.host_rows(layer)[new[new >= 0]], host[layer, new[new >= 0]]), (number, layer)
        if number % 10 == 9:
            # The oldest request goes: each has room for 62 tokens and lives 30 steps.
            own, length = requests.pop(0)
            cache.release(blocks.free(own))
            cache.check_invariants(blocks.live_blocks())
    assert not step.violations.any()
    for own, length in requests:
        slots = slots_of_blocks(torch.tensor(own, dtype=torch.int32))[:length]
        for layer in range(spec.num_layers):
            assert torch.equal(cache.read_host(layer, slots.to(CUDA)).cpu(), host[layer, slots])
    counters = cache.counters()
    assert min(counters.evicted_rows) > 3000 and min(counters.recalled_rows) > 3000
    # The same test must be able to fail: corrupt the host rows of one request that are not resident.
    own, length = requests[0]
    slots = slots_of_blocks(torch.tensor(own, dtype=torch.int32))[:length]
    gone = slots[cache.maps.host_to_gpu[0].cpu()[slots] < 0]
    cache.host_rows(0)[gone] ^= 1
    step.new.fill_(-1)
    step.selected.fill_(-1)
    step.selected[0, 0] = gone[:K]
    step.graph.replay()
    assert not torch.equal(step.gathered[0, 0].cpu(), host[0, gone[:K]])
    cache.close()


def test_ten_thousand_replays_at_the_minimum_pool() -> None:
    """All checks inside the graph: 256 rows for eight requests of top-31, shared slots, delays, releases."""
    batch, k, num_rows, old_slots, ring = 8, 31, 256, 1024, 64
    ops = triton_cache_ops()
    resolve = functools.partial(ops.resolve, max_delay=12)  # type: ignore[call-arg]
    maps = make_maps(1, gpu_tokens=num_rows, host_tokens=2048, num_candidates=512, device=CUDA)
    words = torch.arange(2048, dtype=torch.int32)[:, None].expand(-1, 4).contiguous()
    host = words.view(torch.uint8).pin_memory()
    gpu = torch.full((num_rows, 16), 0xFF, dtype=torch.uint8, device=CUDA)
    step = torch.zeros(1, dtype=torch.int32, device=CUDA)
    generator = torch.Generator().manual_seed(0)
    selections = torch.randint(0, old_slots, (ring, batch, k), dtype=torch.int32, generator=generator)
    selections[:, :, 10:] = torch.randint(0, 60, (ring, batch, k - 10), dtype=torch.int32, generator=generator)
    selections[torch.rand((ring, batch, k), generator=generator) < 0.05] = -1
    selections[:, 6] = torch.randint(0, old_slots, (ring, k), dtype=torch.int32, generator=generator)
    selections[:, 7] = selections[:, 6]
    selections = selections.to(CUDA)
    lanes = torch.arange(batch, dtype=torch.int32, device=CUDA)
    wrong = torch.zeros(5, dtype=torch.int64, device=CUDA)

    def body() -> None:
        # New slots cycle through the upper half of the host pool; a block is released before its turn comes.
        ops.release(maps, ((step * batch // 64 + 1) % 16 + 16).to(torch.int32))
        ops.begin_step(maps, step)
        new = (((step - 1) * batch + lanes) % 1024 + 1024).to(torch.int32)
        new_rows = ops.append(maps, new, step)[0]
        new_words = new[:, None].expand(-1, 4).contiguous().view(torch.uint8)
        ops.write_rows(new_words, gpu, new_rows, host, new)
        selected = selections[(step % ring).long()][0].contiguous()
        selected[:, 0] = new
        rows = resolve(maps, selected, step, host, gpu).rows
        gathered = gpu.view(torch.int32)[rows.clamp(min=0)]
        valid = selected >= 0
        wrong[0] += ((gathered != selected[..., None]).any(-1) & valid).sum()
        wrong[1] += ((rows >= 0) != valid).sum()
        wrong[2] += (gpu.view(torch.int32)[new_rows] != new[:, None]).sum()
        wrong[3] += ops.violations(maps, step).sum()
        wrong[4] += ((maps.priority[0][rows.clamp(min=0)] != step) & valid).sum()

    graph = capture(body)
    maps.reset()
    step.zero_()
    wrong.zero_()
    for _ in range(10_000):
        graph.replay()
    assert wrong.tolist() == [0] * 5
    totals = maps.totals[0] + maps.counts[0, :NUM_TOTALS]
    assert int(totals[EVICTED]) > 500_000 and int(maps.counts[0, FAILED]) == 0

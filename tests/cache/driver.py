"""Drives a cache as the engine does, with random requests, and holds every cache rule against a plain model of it.

Works for any implementation of the cache ops: which row a slot gets is free, what its bytes are is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor

from echo_batch.cache.blocks import BlockAllocator
from echo_batch.cache.manager import OffloadedCache, slots_of_blocks
from echo_batch.cache.spec import CacheSpec, minimum_gpu_tokens
from echo_batch.kernels.formats import BLOCK_SIZE, IndexFormat, RowFormat

ROWS = RowFormat("fp32", latent_dim=6, rope_dim=2)
GROUPS = ((0,), (1, 2, 3))


def small_spec(
    *,
    groups: tuple[tuple[int, ...], ...] = GROUPS,
    k: int = 15,
    host_blocks: int = 12,
    gpu_tokens: int = 64,
    offload: bool = True,
) -> CacheSpec:
    return CacheSpec(
        group_layers=groups,
        row_format=ROWS,
        index_format=IndexFormat("fp32"),
        index_topk=k,
        host_tokens=host_blocks * BLOCK_SIZE,
        gpu_tokens=gpu_tokens,
        offload=offload,
    )


@dataclass
class Running:
    blocks: list[int]
    length: int


@dataclass
class Driver:
    """`running` requests over `cache`; every public method checks the rules when it is done."""

    cache: OffloadedCache
    seed: int
    padded_rows: int = 1
    free_rows_first: bool = True
    running: list[Running] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)
        spec = self.cache.spec
        self.blocks = BlockAllocator(spec.num_blocks)
        self.host = torch.zeros((spec.num_layers, spec.host_tokens, spec.row_format.row_bytes), dtype=torch.uint8)
        self.selected = self.recalled = self.offloaded = 0
        self.num_left = self.resident_steps = 0

    def admit(self, length: int, extra: int, *, shared_with: int | None = None, warm: int = 0) -> bool:
        """Prefill a request of `length` tokens with room for `extra` more; False if it has to wait."""
        spec = self.cache.spec
        shared: list[int] = []
        if shared_with is not None:
            other = self.running[shared_with]
            shared = other.blocks[: min(length, other.length) // BLOCK_SIZE]
        lengths = [length + extra, *(len(r.blocks) * BLOCK_SIZE for r in self.running)]
        if minimum_gpu_tokens(lengths, spec.index_topk) > spec.gpu_tokens:
            return False
        if not self.running and self.cache.may_be_resident and not self.cache.resident:
            self.cache.enter_residency()
        own = self.blocks.allocate(-(-(length + extra) // BLOCK_SIZE) - len(shared))
        if own is None:
            return False
        room = spec.gpu_tokens // BLOCK_SIZE
        if self.cache.resident and max([*shared, *own]) >= room:
            self.leave(min(room, max((max(r.blocks) for r in self.running), default=-1) + 1))
        self.blocks.share(shared)
        request = Running([*shared, *own], length)
        slots = self.slots(request, range(len(shared) * BLOCK_SIZE, length))
        for layer in range(spec.num_layers):
            rows = self.random_rows(slots.numel())
            self.host[layer, slots] = rows
            self.cache.write_host(layer, self.on_device(slots), self.on_device(rows))
        self.running.append(request)
        before = self.cache.counters().evicted_rows
        for group, layers in enumerate(spec.group_layers):
            chosen = self.slots(request, [self.random.randrange(length) for _ in range(warm)])
            layer_rows = [self.on_device(self.host[layer, chosen]) for layer in layers]
            self.cache.warm(group, self.on_device(chosen), layer_rows)
        assert self.cache.counters().evicted_rows == before, "warming evicted"
        self.check()
        return True

    def leave(self, num_blocks: int) -> None:
        """Leave residency with everything that the running requests have written."""
        written = [self.slots(r, range(r.length)) for r in self.running]
        nothing = torch.tensor([-1], dtype=torch.int32)
        self.cache.leave_residency(num_blocks, self.on_device(torch.cat([nothing, *written])))
        self.num_left += 1
        for group in range(self.cache.spec.num_groups):
            for slots in written:
                assert torch.equal(self.rows_of(group, slots), slots), "a written row did not stay where it was"

    def finish(self, which: int) -> None:
        """Drop a request and give its blocks back."""
        self.cache.release(self.blocks.free(self.running.pop(which).blocks))
        self.check()

    def step(self) -> None:
        """One decode step of every request that has room; also with padded rows, duplicates and short selections."""
        batch = [r for r in self.running if r.length < len(r.blocks) * BLOCK_SIZE]
        spec, cache, k = self.cache.spec, self.cache, self.cache.spec.index_topk
        if cache.resident:
            self.resident_step(batch)
            return
        padding = [-1] * self.padded_rows
        new = torch.tensor([int(self.slots(r, [r.length])) for r in batch] + padding, dtype=torch.int32)
        for request in batch:
            request.length += 1
        cache.begin_step()
        for group, layers in enumerate(spec.group_layers):
            evicted, free = cache.counters().evicted_rows[group], self.num_free(group)
            new_rows = cache.append(group, self.on_device(new))
            assert ((new_rows.cpu() >= 0) == (new >= 0)).all()
            selection = torch.full((len(new), k), -1, dtype=torch.int32)
            for b, request in enumerate(batch):
                n = min(k, request.length)
                chosen = self.random.sample(range(request.length), n)
                if self.random.random() < 0.8:  # real selections keep coming back to the same tokens
                    chosen = list({*range(n), request.length - 1})[-n:]
                selection[b, : len(chosen)] = self.slots(request, chosen)
            chosen_slots = selection[selection >= 0].unique()
            num_missed = int((self.rows_of(group, chosen_slots) < 0).sum())
            # The fast version passes over one listed row for each padded row and each duplicate of a miss.
            missing_entries = int((self.rows_of(group, selection[selection >= 0]) < 0).sum())
            wasted = 0 if self.free_rows_first else len(padding) + missing_entries - num_missed
            resolution = None
            for layer in layers:
                rows = self.random_rows(len(new))
                self.host[layer, new[new >= 0]] = rows[new >= 0]
                cache.write(layer, self.on_device(new), new_rows, self.on_device(rows))
                if resolution is None:
                    resolution = cache.resolve(group, self.on_device(selection))
                cache.recall(layer, resolution)
                self.check_gathered(layer, selection, resolution.rows)
            assert (self.rows_of(group, new[new >= 0]) >= 0).all(), "a new row was evicted in its step"
            needed = len(batch) + num_missed
            evictions = cache.counters().evicted_rows[group] - evicted
            assert max(0, needed - free) <= evictions <= max(0, needed + wasted - free)
            self.recalled += num_missed
            self.selected += int((selection >= 0).sum())
            self.offloaded += len(batch)
        self.check()

    def resident_step(self, batch: list[Running]) -> None:
        """A step without the cache manager: rows are slots."""
        spec, cache = self.cache.spec, self.cache.for_step(True)
        new = torch.tensor([int(self.slots(r, [r.length])) for r in batch] + [-1] * self.padded_rows, dtype=torch.int32)
        for request in batch:
            request.length += 1
        cache.begin_step()
        new_rows = cache.append_all(self.on_device(new))
        for group, layers in enumerate(spec.group_layers):
            selection = torch.full((len(new), spec.index_topk), -1, dtype=torch.int32)
            for b, request in enumerate(batch):
                n = min(spec.index_topk, request.length)
                selection[b, :n] = self.slots(request, self.random.sample(range(request.length), n))
            for layer in layers:
                rows = self.random_rows(len(new))
                self.host[layer, new[new >= 0]] = rows[new >= 0]
                cache.write(layer, self.on_device(new), new_rows[group], self.on_device(rows))
                resolution = cache.resolve(group, self.on_device(selection))
                cache.recall(layer, resolution)
                self.check_gathered(layer, selection, resolution.rows)
        self.resident_steps += 1
        self.check()

    def check_gathered(self, layer: int, selection: Tensor, rows: Tensor) -> None:
        """Every selected slot has a row with its bytes, everything else none."""
        rows = rows.cpu()
        assert rows.dtype == torch.int32 and ((rows >= 0) == (selection >= 0)).all()
        valid = selection >= 0
        gathered = self.cache.gpu_rows(layer).cpu()[rows[valid]]
        assert torch.equal(gathered, self.host[layer, selection[valid]])

    def check(self) -> None:
        """The rules that hold between two operations."""
        spec, cache = self.cache.spec, self.cache
        cache.check_invariants(self.blocks.live_blocks())
        counters = cache.counters()
        assert sum(counters.selected_rows) == self.selected
        assert sum(counters.recalled_rows) == self.recalled
        assert sum(counters.offloaded_rows) == self.offloaded
        held = torch.cat([self.slots(r, range(r.length)) for r in self.running] or [torch.empty(0, dtype=torch.int32)])
        dead = slots_of_blocks(
            torch.tensor(sorted(set(range(spec.num_blocks)) - set(self.blocks.live_blocks())), dtype=torch.int32)
        )
        for group, layers in enumerate(spec.group_layers):
            free_rows = (cache.maps.gpu_to_host[group] < 0).cpu()
            for layer in layers:
                if cache.resident:
                    rows = cache.gpu_rows(layer).cpu()
                    assert torch.equal(rows[held], self.host[layer, held]), "rows are not what was written"
                    assert not cache.poison or (rows[dead[dead < spec.gpu_tokens]] == 0xFF).all()
                    continue
                host = cache.host_rows(layer)
                assert torch.equal(host[held], self.host[layer, held]), "host rows are not what was written"
                if cache.poison:
                    assert (host[dead] == 0xFF).all() and (cache.gpu_rows(layer).cpu()[free_rows] == 0xFF).all()

    def num_free(self, group: int) -> int:
        return int((self.cache.maps.priority[group] == -1).sum())

    def rows_of(self, group: int, slots: Tensor) -> Tensor:
        return self.cache.maps.host_to_gpu[group].cpu()[slots]

    def slots(self, request: Running, positions: Sequence[int]) -> Tensor:
        where = torch.tensor(list(positions), dtype=torch.int32)
        return torch.tensor(request.blocks, dtype=torch.int32)[where // BLOCK_SIZE] * BLOCK_SIZE + where % BLOCK_SIZE

    def random_rows(self, n: int) -> Tensor:
        return torch.randint(
            0, 255, (n, self.cache.spec.row_format.row_bytes), dtype=torch.uint8, generator=self.generator
        )

    def on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.cache.device)


def run_trace(driver: Driver, operations: int) -> None:
    """A random life: requests come (some with a shared prefix), decode, and go."""
    random = driver.random
    for _ in range(operations):
        what = random.random()
        if what < 0.25 or not driver.running:
            shared = random.randrange(len(driver.running)) if driver.running and random.random() < 0.5 else None
            length = random.choice([1, 10, 63, 64, 65, 130, 200])
            driver.admit(length, random.choice([1, 5, 60]), shared_with=shared, warm=random.choice([0, 8, 40]))
        elif what < 0.35:
            driver.finish(random.randrange(len(driver.running)))
        else:
            driver.step()

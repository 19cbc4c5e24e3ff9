"""Times the cache ops on one GPU by replaying CUDA graphs: `python -m echo_batch.bench.cache_ops [--json PATH]`.

The GPU pool is full and every replay recalls fresh rows, so that each miss evicts. Contexts lie over the whole host
pool in blocks, and selected and missing tokens are scattered over the contexts: rows side by side would come faster,
because the GPU translates fewer addresses for them. Unless said otherwise the L2 cache is overwritten before each
replay, as the rest of a decode step does. Times are medians in microseconds, without the graph's own launch: the
difference between graphs of many and of few layers, divided by the difference in layers.

What the cache adds to a layer is measured with the top-k, because that does the look-up: a layer with top-k, look-up,
recall and (on a branch) the new rows, minus the top-k alone. The scores are the same in all layers, so that the top-k
finds them in L2, where the indexer would have left them.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from echo_batch.cache.manager import CacheCounters, OffloadedCache, make_cache, slots_of_blocks
from echo_batch.cache.spec import NUM_CANDIDATES, CacheSpec
from echo_batch.kernels.cache_ops import select_cache_ops
from echo_batch.kernels.contracts import make_maps
from echo_batch.kernels.cuda.topk import topk_positions
from echo_batch.kernels.formats import BLOCK_SIZE, IndexFormat, RowFormat
from echo_batch.kernels.ops import reference_ops
from echo_batch.kernels.reference.slots import positions_to_slots

BATCH = 13
TOPK = 2048
CONTEXT = 98304
MODEL_LAYERS = 61
GRAPH_LAYERS = 12
FEW_LAYERS = 4
REPLAYS = 40
L2_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table; `gb_s` only where bytes cross the link."""

    name: str
    us: float
    gb_s: float | None = None


def capture(body: Callable[[], None], *, again: Callable[[], None] = lambda: None) -> torch.cuda.CUDAGraph:
    """Run `body` once to compile its kernels, then `again`, then capture `body`."""
    body()
    again()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, before: Callable[[], None], *, replays: int = REPLAYS) -> float:
    """Median time of a replay in microseconds; `before` is launched ahead of each and not timed."""
    times = []
    for _ in range(replays):
        before()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times[3:])


class Workload:
    """A full GPU pool, a batch whose selection is resident but for some fresh slots, and new tokens."""

    def __init__(self, *, host_tokens: int, gpu_tokens: int, row_format: RowFormat) -> None:
        device = torch.device("cuda")
        self.spec = CacheSpec(
            group_layers=tuple((layer,) for layer in range(GRAPH_LAYERS)),
            row_format=row_format,
            index_format=IndexFormat("fp8"),
            index_topk=TOPK,
            host_tokens=host_tokens,
            gpu_tokens=gpu_tokens,
        )
        torch.zeros(1, device=device)  # starts CUDA
        start = time.perf_counter()
        cache = make_cache(self.spec, device, dataclasses.replace(reference_ops(), topk_positions=topk_positions))
        self.pin_gib_s = self.spec.host_pool_bytes / 2**30 / (time.perf_counter() - start)
        assert isinstance(cache, OffloadedCache)
        self.cache = cache
        num_blocks = host_tokens // BLOCK_SIZE
        # A block a row is left for new tokens.
        blocks_each = min(CONTEXT // BLOCK_SIZE, num_blocks // BATCH - 1)
        length = blocks_each * BLOCK_SIZE
        blocks = torch.randperm(num_blocks, device=device).to(torch.int32)
        self.block_table = blocks[: BATCH * blocks_each].view(BATCH, blocks_each).contiguous()
        self.lengths = torch.full((BATCH,), length, dtype=torch.int32, device=device)
        self.unused = slots_of_blocks(blocks[BATCH * blocks_each :])
        # Of every row: positions that are selected unless others are, that are resident too, and that are not.
        self.order = torch.rand(BATCH, length, device=device).argsort(1)
        self.num_resident = gpu_tokens // BATCH
        assert TOPK < self.num_resident < length, (gpu_tokens, length)
        kept = self.slots(self.order[:, : self.num_resident])
        self.resident = torch.cat((kept[:, :TOPK].flatten(), kept[:, TOPK:].flatten()))
        noise = torch.randn(BATCH, length, device=device).sort(1, descending=True).values
        self.high, low = noise[:, :TOPK].contiguous(), noise[:, TOPK:]
        self.low = low.gather(1, torch.randint(low.shape[1], (BATCH, length), device=device))
        self.scores = torch.empty_like(self.low)
        self.selected = torch.empty((BATCH, TOPK), dtype=torch.int32, device=device)
        self.predicted = self.high[:, -1].expand(GRAPH_LAYERS, -1).contiguous()
        self.new = torch.empty((BATCH,), dtype=torch.int32, device=device)
        self.kv_rows = torch.zeros((BATCH, row_format.row_bytes), dtype=torch.uint8, device=device)
        self.rows = torch.zeros((GRAPH_LAYERS, BATCH), dtype=torch.int32, device=device)
        self.flush = torch.empty(L2_BYTES, dtype=torch.uint8, device=device)
        self.num_inputs = 0
        self.num_fresh = 0

    def slots(self, positions: Tensor) -> Tensor:
        """Token slots of positions [B, n]."""
        return positions_to_slots(positions.to(torch.int32), self.block_table)

    def fill(self) -> None:
        """The pool full of rows of the contexts: those of the selection recently used, the others long ago."""
        self.cache.reset()
        maps, num = self.cache.maps, self.resident.shape[0]
        rows = torch.randperm(self.spec.gpu_tokens, device="cuda").to(torch.int32)
        slots = torch.cat((self.resident, self.unused[self.unused.shape[0] - rows.shape[0] + num :]))
        maps.gpu_to_host[:, rows] = slots
        maps.host_to_gpu[:, slots] = rows
        maps.priority.copy_(torch.randint(1, 900, maps.priority.shape, dtype=torch.int32, device="cuda"))
        maps.priority[:, rows[: BATCH * TOPK]] = 1000
        self.cache.step.fill_(1000)
        self.num_inputs = self.num_fresh = 0
        for _ in range(2):
            self.inputs(0)
            self.cache.begin_step()

    def inputs(self, num_misses: int) -> None:
        """New static inputs: `num_misses` slots of the selection, and all new tokens, are not resident.

        What makes room for them goes round, so that nothing of the selection stays away long enough to be evicted.
        """
        length = self.order.shape[1]
        positions = self.order[:, :TOPK].clone()
        shares = [num_misses * (row + 1) // BATCH - num_misses * row // BATCH for row in range(BATCH)]
        most = max(shares)
        assert most <= TOPK // 2, "half of the selection is the most that can miss"
        if self.num_resident + self.num_fresh + most > length:
            self.num_fresh = 0
        first = self.num_resident + self.num_fresh
        for row, share in enumerate(shares):
            where = (self.num_fresh + torch.arange(share, device="cuda")) % TOPK
            positions[row, where] = self.order[row, first : first + share]
        self.num_fresh += most
        self.selected.copy_(self.slots(positions.sort(1).values))
        self.scores.copy_(self.low)
        self.scores.scatter_(1, positions, self.high)
        first = self.num_inputs * BATCH
        self.new.copy_(self.unused[first : first + BATCH])
        self.num_inputs += 1

    def topk(self, num_layers: int) -> None:
        """The selection alone, as slots."""
        for layer in range(num_layers):
            topk_positions(
                self.scores, self.lengths, TOPK, self.predicted[layer], update=True, block_table=self.block_table
            )

    def select(self, num_layers: int) -> None:
        """Top-k with look-up, and the copy of what was missing."""
        for layer in range(num_layers):
            self.cache.select(layer, self.scores, self.lengths, self.predicted[layer], self.block_table)

    def select_apart(self, num_layers: int) -> None:
        """The same with the look-up in a launch of its own."""
        for layer in range(num_layers):
            slots, _ = topk_positions(
                self.scores, self.lengths, TOPK, self.predicted[layer], update=True, block_table=self.block_table
            )
            self.cache.resolve(layer, slots)

    def resolve(self, num_layers: int) -> None:
        """Boundaries A and B of `num_layers` layers, with the copy of what was missing."""
        for layer in range(num_layers):
            self.cache.resolve(layer, self.selected)

    def append(self, num_layers: int) -> None:
        """GPU rows for the new tokens, layer by layer."""
        for layer in range(num_layers):
            self.cache.append(layer, self.new)

    def write(self, num_layers: int) -> None:
        """Rows of the new tokens into both pools (at the rows of an earlier append)."""
        for layer in range(num_layers):
            self.cache.write(layer, self.new, self.rows[layer], self.kv_rows)

    def serial(self, num_layers: int) -> None:
        """Per layer: allocate, write to both pools, select and copy, one after the other."""
        for layer in range(num_layers):
            rows = self.cache.append(layer, self.new)
            self.cache.write(layer, self.new, rows, self.kv_rows)
            self.cache.select(layer, self.scores, self.lengths, self.predicted[layer], self.block_table)

    def branched(self, num_layers: int) -> None:
        """Per layer: the writes beside top-k and copy, joined after both. Rows were allocated before."""
        side = torch.cuda.Stream()
        for layer in range(num_layers):
            side.wait_stream(torch.cuda.current_stream())
            self.cache.select(layer, self.scores, self.lengths, self.predicted[layer], self.block_table)
            with torch.cuda.stream(side):
                self.cache.write(layer, self.new, self.rows[layer], self.kv_rows)
            torch.cuda.current_stream().wait_stream(side)

    def per_layer(
        self, body: Callable[[int], None], *, num_misses: int, cold: bool = True, allocate: bool = False
    ) -> float:
        """Time of `body` per layer. The step is started (and with `allocate` all rows appended) before the clock."""

        def before() -> None:
            self.inputs(num_misses)
            self.cache.begin_step()
            if allocate:
                self.rows.copy_(self.cache.append_all(self.new))
            if cold:
                self.flush.zero_()

        times = []
        for num_layers in (FEW_LAYERS, GRAPH_LAYERS):
            self.fill()
            before()
            graph = capture(partial(body, num_layers), again=self.cache.begin_step)
            self.fill()
            counted = self.cache.counters()
            times.append(replay_us(graph, before))
            self.check(counted, num_misses, num_layers)
        return (times[1] - times[0]) / (GRAPH_LAYERS - FEW_LAYERS)

    def check(self, before: CacheCounters, num_misses: int, num_layers: int) -> None:
        """What was timed is what was meant: the misses were misses, and every row that was taken evicted another."""
        after = self.cache.counters()
        for layer in range(num_layers):
            recalled, taken, evicted = (
                getattr(after, name)[layer] - getattr(before, name)[layer]
                for name in ("recalled_rows", "offloaded_rows", "evicted_rows")
            )
            wanted = REPLAYS * num_misses
            counts = f"{recalled} of {wanted} rows recalled, {taken} new ones, {evicted} evicted"
            assert recalled in (wanted, 0) and evicted == recalled + taken, counts


def time_step_start(gpu_tokens: int, host_tokens: int, *, appended: bool) -> float:
    """Start of a step for the groups of a whole model; with `appended` also the rows of its new tokens."""
    device = torch.device("cuda")
    cache_ops = select_cache_ops(device)
    maps = make_maps(
        MODEL_LAYERS, gpu_tokens=gpu_tokens, host_tokens=host_tokens, num_candidates=NUM_CANDIDATES, device=device
    )
    identity = torch.arange(gpu_tokens, dtype=torch.int32, device=device)
    maps.gpu_to_host.copy_(identity.expand_as(maps.gpu_to_host))
    maps.host_to_gpu[:, :gpu_tokens] = identity
    maps.priority.copy_(torch.randint(1, 900, maps.priority.shape, dtype=torch.int32, device=device))
    step = torch.full((1,), 1000, dtype=torch.int32, device=device)
    new = torch.arange(gpu_tokens, gpu_tokens + BATCH, dtype=torch.int32, device=device)
    flush = torch.empty(L2_BYTES, dtype=torch.uint8, device=device)

    def body() -> None:
        cache_ops.begin_step(maps, step)
        if appended:
            cache_ops.append(maps, new, step)

    def before() -> None:
        new.add_(BATCH)
        flush.zero_()

    return replay_us(capture(body), before)


def time_copies(work: Workload, num_rows: int, *, num_copies: int = 8) -> Result:
    """Random rows of the host pool to random rows of the GPU pool."""
    spec, row_bytes = work.spec, work.spec.row_format.row_bytes
    copy_rows = select_cache_ops(torch.device("cuda")).copy_rows
    sources = torch.empty((num_copies, num_rows), dtype=torch.int32, device="cuda")
    targets = [torch.randperm(spec.gpu_tokens, device="cuda")[:num_rows].to(torch.int32) for _ in range(num_copies)]

    def body() -> None:
        for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
            layer = i % GRAPH_LAYERS
            copy_rows(work.cache.host_rows(layer), source, work.cache.gpu_rows(layer), target, None)

    def before() -> None:
        # New rows each time: those of the last replay would come faster.
        torch.randint(spec.host_tokens, sources.shape, dtype=torch.int32, out=sources)

    before()
    us = replay_us(capture(body), before) / num_copies
    return Result(f"copy {num_rows} rows of {row_bytes} B", us, num_rows * row_bytes / us / 1000)


def run(*, host_tokens: int, gpu_tokens: int, misses: Sequence[int], row_format: RowFormat) -> list[Result]:
    """All measurements; prints each as it comes."""
    work = Workload(host_tokens=host_tokens, gpu_tokens=gpu_tokens, row_format=row_format)
    row_bytes = row_format.row_bytes
    results: list[Result] = []

    def add(result: Result) -> None:
        results.append(result)
        link = "" if result.gb_s is None else f"{result.gb_s:8.1f} GB/s"
        print(f"{result.name:58s} {result.us:9.2f} us {link}", flush=True)

    print(f"{torch.cuda.get_device_name()}; B={BATCH} k={TOPK} N_H={host_tokens} N_G={gpu_tokens} {row_bytes} B rows")
    print(f"host pool taken and pinned at {work.pin_gib_s:.1f} GiB/s")
    topk = work.per_layer(work.topk, num_misses=0)
    add(Result("top-k alone", topk))
    add(Result("top-k alone, L2 warm", work.per_layer(work.topk, num_misses=0, cold=False)))
    layer_us = {}
    for n in (0, *misses):
        us = work.per_layer(work.branched, num_misses=n, allocate=True)
        add(Result(f"layer with top-k, writes on a branch, {n} misses", us))
        layer_us[n] = us - topk
        link = n * row_bytes / (us - topk) / 1000 if n else None
        add(Result(f"of it the cache (without top-k), {n} misses", us - topk, link))
    n = misses[0]
    us = work.per_layer(work.branched, num_misses=n, allocate=True, cold=False)
    add(Result(f"layer with top-k, writes on a branch, {n} misses, L2 warm", us))
    add(Result(f"layer with top-k, one after the other, {n} misses", work.per_layer(work.serial, num_misses=n)))
    for n in (0, *misses):
        us = work.per_layer(work.select, num_misses=n)
        add(Result(f"top-k with look-up, place and copy, {n} misses", us))
        us = work.per_layer(work.select_apart, num_misses=n)
        add(Result(f"top-k, look-up, place and copy, {n} misses", us))
        us = work.per_layer(work.resolve, num_misses=n)
        add(Result(f"look-up, place and copy, {n} misses", us, n * row_bytes / us / 1000 if n else None))
    add(Result(f"append {BATCH} rows", work.per_layer(work.append, num_misses=0)))
    add(Result(f"write {BATCH} new rows to both pools", work.per_layer(work.write, num_misses=0, allocate=True)))
    for n in (37, 256, 2048, 4423, 13312, 26624):
        add(time_copies(work, n))
    work.cache.close()
    start = time_step_start(gpu_tokens, host_tokens, appended=False)
    add(Result(f"start of a step, {MODEL_LAYERS} layers", start))
    whole = time_step_start(gpu_tokens, host_tokens, appended=True)
    add(Result(f"append {BATCH} rows in {MODEL_LAYERS} layers", whole - start))
    for n, us in layer_us.items():
        # Of the lines above: the layers of a step come one after the other.
        add(Result(f"whole manager, {MODEL_LAYERS} layers with {n} misses (sum)", whole + MODEL_LAYERS * us))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--host-tokens", type=int, default=1_800_000)
    parser.add_argument("--gpu-tokens", type=int, default=200_000)
    parser.add_argument("--rows", choices=("fp8", "bf16"), default="fp8")
    parser.add_argument("--misses", type=int, nargs="+", default=[37, 500, 1300, 2662, 4423, 13312])
    options = parser.parse_args()
    row_format = RowFormat(options.rows)
    results = run(
        host_tokens=options.host_tokens, gpu_tokens=options.gpu_tokens, misses=options.misses, row_format=row_format
    )
    if options.json is not None:
        versions = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
        lines = [asdict(result) for result in results]
        options.json.write_text(json.dumps({"versions": versions, "results": lines}, indent=1))


if __name__ == "__main__":
    main()

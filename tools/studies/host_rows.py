"""What scattered reads of pinned host memory cost beside a model's weights (docs/benchmarks.md, Cache operations).

    python -m tools.studies.host_rows [--pool-gib 24] [--weights-gib 44] [--memory registered,allocated,mapped]

A GPU kernel reads random rows of 656 bytes, in each of 61 layers from that layer's part of the host memory: alone, and
with that layer's share of the weights read in between, as in a decode step. The rows lie in the first bytes of each
part, or all over it. Memory: `registered` (huge pages, cudaHostRegister, as the host pool has it), `allocated`
(cuMemHostAlloc), `mapped` (cuMemCreate on the host, in 2 MB). Times are medians of graph replays, a layer. Needs a GPU.
"""

import argparse
import ctypes
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from echo_batch.bench.cache_ops import capture, replay_us
from echo_batch.cache.host_pool import pinned_memory

LAYERS, ROW_WORDS, REPLAYS = 61, 164, 9
STREAM_WORDS, STREAM_ROUNDS = 4096, 8


@triton.jit
def gather_kernel(pool, index, out, n, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    while i < n:
        row = tl.load(index + i).to(tl.int64)
        words = tl.load(pool + row * WORDS + columns, mask=columns < WORDS, cache_modifier=".cg")
        tl.store(out + i.to(tl.int64) * WORDS + columns, words, mask=columns < WORDS)
        i += tl.num_programs(0)


@triton.jit
def stream_kernel(weights, out, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.int32)
    for i in range(ROUNDS):
        total += tl.load(weights + (program * ROUNDS + i) * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + program, tl.sum(total))


def registered(num_bytes: int) -> tuple[Tensor, Any]:
    memory, flat = pinned_memory(num_bytes, None)
    return flat, memory


def allocated(num_bytes: int) -> tuple[Tensor, Any]:
    from cuda.bindings import driver

    status, address = driver.cuMemHostAlloc(num_bytes, 0)
    assert int(status) == 0, status
    return _tensor(int(address), num_bytes), None


def mapped(num_bytes: int) -> tuple[Tensor, Any]:
    from cuda.bindings import driver

    def ok(result: tuple[Any, ...]) -> Any:
        assert int(result[0]) == 0, result[0]
        return result[1] if len(result) > 1 else None

    places = driver.CUmemLocationType
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type, properties.location.id = places.CU_MEM_LOCATION_TYPE_HOST_NUMA, 0
    address = ok(driver.cuMemAddressReserve(num_bytes, 1 << 30, 0, 0))
    for start in range(0, num_bytes, 1 << 30):
        handle = ok(driver.cuMemCreate(1 << 30, properties, 0))
        ok(driver.cuMemMap(int(address) + start, 1 << 30, 0, handle, 0))
    grants = []
    for kind in (places.CU_MEM_LOCATION_TYPE_DEVICE, places.CU_MEM_LOCATION_TYPE_HOST_NUMA):
        grant = driver.CUmemAccessDesc()
        grant.location.type, grant.location.id = kind, 0
        grant.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        grants.append(grant)
    ok(driver.cuMemSetAccess(address, num_bytes, grants, len(grants)))
    flat = _tensor(int(address), num_bytes)
    return flat.fill_(1), None


MEMORY = {"registered": registered, "allocated": allocated, "mapped": mapped}


def _tensor(address: int, num_bytes: int) -> Tensor:
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.uint8)


def us_a_layer(body: Callable[[], None]) -> float:
    return replay_us(capture(body), lambda: None, replays=REPLAYS) / LAYERS


def measure(flat: Tensor, weights: Tensor) -> None:
    pool = flat.view(torch.int32)
    rows_a_layer = pool.numel() // ROW_WORDS // LAYERS
    generator = torch.Generator("cuda").manual_seed(1)
    out = torch.empty(8192 * ROW_WORDS, dtype=torch.int32, device="cuda")
    sums = torch.empty(1 << 16, dtype=torch.int32, device="cuda")
    programs = weights.shape[1] // STREAM_WORDS // STREAM_ROUNDS
    first = torch.arange(LAYERS, dtype=torch.int32, device="cuda")[:, None] * rows_a_layer
    for num_rows in (155, 2048, 8192):
        for span in (1000, rows_a_layer // 6, rows_a_layer):
            index = torch.randint(span, (LAYERS, num_rows), device="cuda", generator=generator, dtype=torch.int32)
            index += first

            def run(gathers: bool, streams: bool, index: Tensor = index, num_rows: int = num_rows) -> None:
                for layer in range(LAYERS):
                    if gathers:
                        gather_kernel[(512,)](pool, index[layer], out, num_rows, ROW_WORDS, 256, num_warps=1)
                    if streams:
                        stream_kernel[(programs,)](weights[layer], sums, STREAM_WORDS, STREAM_ROUNDS, num_warps=8)

            alone, weights_alone, both = (
                us_a_layer(lambda kind=kind: run(*kind)) for kind in ((True, False), (False, True), (True, True))
            )
            print(
                f"  {num_rows:5d} rows within {span * LAYERS * 4 * ROW_WORDS / 2**30:6.2f} GiB: alone {alone:7.2f} us "
                f"({num_rows * 4 * ROW_WORDS / alone / 1e3:4.1f} GB/s), beside weights {both - weights_alone:7.2f} us",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pool-gib", type=int, default=24)
    parser.add_argument("--weights-gib", type=int, default=44)
    parser.add_argument("--memory", default="registered,allocated,mapped")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this study needs a GPU")
    torch.zeros(1, device="cuda")
    unit = STREAM_WORDS * STREAM_ROUNDS
    words = options.weights_gib * 2**28 // LAYERS // unit * unit
    weights = torch.ones(LAYERS, words, dtype=torch.int32, device="cuda")
    for name in options.memory.split(","):
        start = time.perf_counter()
        flat, _memory = MEMORY[name](options.pool_gib << 30)
        rate = options.pool_gib / (time.perf_counter() - start)
        print(f"{torch.cuda.get_device_name()}; {name}: {options.pool_gib} GiB taken at {rate:.1f} GiB/s", flush=True)
        measure(flat, weights)  # the memory goes with the process


if __name__ == "__main__":
    main()

"""`echo-batch bench load`: how fast a checkpoint is loaded, beside plain reads of the same files.

The checkpoint is made here: the geometry's tensors with arbitrary finite values, in fp8 with block scales where a
released checkpoint has them.
"""

import json
import os
import shutil
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import local
from typing import Any

import torch

from echo_batch.bench.setup import bench_device
from echo_batch.errors import ConfigError
from echo_batch.kernels.select import select_ops
from echo_batch.kernels.weights import block_shape
from echo_batch.models.checkpoint import INDEX_FILE, check_checkpoint
from echo_batch.models.config import ModelConfig
from echo_batch.models.loader import load_model
from echo_batch.models.streaming import NUM_THREADS, PIECE_BYTES
from echo_batch.models.tensors import expected_tensors, scale_name
from echo_batch.report.metrics import versions

_TILE_BYTES = 8 << 20
_SHARD_BYTES = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBench:
    """Options of `bench load`. `directory` receives the checkpoint, unless a run before has left it there."""

    model: str
    num_layers: int | None
    directory: str
    device: str
    repeats: int = 2


def run_load_bench(options: LoadBench) -> dict[str, Any]:
    """Measure with the files out of the page cache and in it; returns what `--json` writes."""
    directory = Path(options.directory)
    if not (directory / INDEX_FILE).exists():
        write_checkpoint(Path(options.model), directory, options.num_layers)
    config = ModelConfig.from_dir(directory)
    num_bytes = check_checkpoint(config, directory).num_bytes
    device = bench_device(options.device)
    if device.type == "cuda":
        torch.zeros(1, device=device)  # the context is not part of loading
    runs = []
    for state in ("dropped", "warm"):
        for _ in range(options.repeats):
            if state == "dropped":
                drop_from_page_cache(directory)
            plain = num_bytes / _plain_read_seconds(directory)
            if state == "dropped":
                drop_from_page_cache(directory)
            started = time.perf_counter()
            model = load_model(
                config, directory, device=device, dtype=torch.bfloat16, row_kind="fp8", ops=select_ops(device)
            )
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            load = num_bytes / (time.perf_counter() - started)
            del model
            runs.append(
                {
                    "page_cache": state,
                    "plain_gb_s": round(plain / 1e9, 3),
                    "load_gb_s": round(load / 1e9, 3),
                    "share": round(load / plain, 3),
                }
            )
    return {
        "bench": "load",
        "options": asdict(options),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": versions(),
        "checkpoint_bytes": num_bytes,
        "runs": runs,
    }


def write_checkpoint(geometry: Path, directory: Path, num_layers: int | None) -> None:
    """Write a checkpoint of the config in `geometry`, cut to its first layers. ConfigError if the disk is too small."""
    raw = json.loads((geometry / "config.json").read_text(encoding="utf-8"))
    if num_layers is not None:
        raw["num_hidden_layers"] = num_layers
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    tensors = list(_stored(ModelConfig.from_dir(directory)))
    need, free = sum(size for *_, size in tensors), shutil.disk_usage(directory).free
    if need > free:
        raise ConfigError(f"{directory}: the checkpoint takes {need} bytes, {free} are free")
    # Bytes up to 0x3f are small finite numbers in fp8, bf16 and fp32 alike.
    tile = torch.randint(0x40, (_TILE_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    view = tile.numpy().data
    weight_map: dict[str, str] = {}
    while tensors:
        shard: list[tuple[str, str, tuple[int, ...], int]] = []
        size = 0
        while tensors and (not shard or size + tensors[0][3] <= _SHARD_BYTES):
            shard.append(tensors.pop(0))
            size += shard[-1][3]
        name = f"model-{len(set(weight_map.values())):05d}.safetensors"
        weight_map |= {tensor: name for tensor, *_ in shard}
        header, at = {}, 0
        for tensor, dtype, shape, tensor_bytes in shard:
            header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + tensor_bytes]}
            at += tensor_bytes
        text = json.dumps(header).encode()
        with (directory / name).open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for start in range(0, at, _TILE_BYTES):
                file.write(view[: at - start])
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


def _stored(config: ModelConfig) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """Name, dtype, shape and bytes of what a released checkpoint of this config holds."""
    for spec in expected_tensors(config):
        if spec.role == "linear":
            yield spec.name, "F8_E4M3", spec.shape, spec.num_elements
            scales = block_shape(spec.shape)
            yield scale_name(spec.name), "F32", scales, 4 * scales[0] * scales[1]
        else:
            is_fp32 = spec.role == "fp32"
            yield spec.name, "F32" if is_fp32 else "BF16", spec.shape, spec.num_elements * (4 if is_fp32 else 2)


def drop_from_page_cache(directory: Path) -> None:
    """Make the next reads of the checkpoint come from the disk (clean pages need no privilege)."""
    for path in directory.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDWR)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _plain_read_seconds(directory: Path) -> float:
    """All files by as many threads and in pieces as large as the loader's, into buffers that are used again."""
    files = {path: os.open(path, os.O_RDONLY) for path in sorted(directory.glob("*.safetensors"))}
    pieces = [(file, at) for path, file in files.items() for at in range(0, path.stat().st_size, PIECE_BYTES)]
    own = local()

    def read(piece: tuple[int, int]) -> None:
        if not hasattr(own, "buffer"):
            own.buffer = bytearray(PIECE_BYTES)
        os.preadv(piece[0], [own.buffer], piece[1])

    started = time.perf_counter()
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        for _ in threads.map(read, pieces):
            pass
    seconds = time.perf_counter() - started
    for file in files.values():
        os.close(file)
    return seconds

"""Checkpoint directories checked from safetensors headers alone, before any memory is taken. No torch, no pickle."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from echo_batch.errors import ModelError
from echo_batch.models.config import ModelConfig
from echo_batch.models.fields import read_json_object
from echo_batch.models.tensors import TensorSpec, expected_tensors, scale_name

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
QUANT_BLOCK = 128

_DTYPE_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is and what it looks like on disk."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    offset: int
    """of its first byte in the file"""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checked checkpoint: all tensors that the model needs are there, and these are the quantized ones."""

    tensors: dict[str, StoredTensor]
    """The model's tensors and their scales by name"""
    quantized: frozenset[str]
    """Names of the weights stored in fp8 with block scales"""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())


def check_checkpoint(config: ModelConfig, path: str | Path) -> Checkpoint:
    """Find every tensor of `config` under `path` and check shape, dtype and file length.

    Reads the shard index and safetensors headers only. ModelError names the tensor or file that is missing, truncated,
    misshapen or of an unsupported dtype; pickled weights are refused.
    """
    stored = _stored_tensors(Path(path))
    tensors: dict[str, StoredTensor] = {}
    quantized: set[str] = set()
    for spec in expected_tensors(config):
        tensor = stored.get(spec.name)
        if tensor is None:
            raise ModelError(f"{path}: tensor {spec.name} is missing")
        if tensor.shape != spec.shape:
            raise ModelError(f"{tensor.file}: tensor {spec.name} has shape {tensor.shape}, expected {spec.shape}")
        tensors[spec.name] = tensor
        scales = stored.get(scale_name(spec.name))
        if scales is not None:
            _check_scales(spec, tensor, scales)
            tensors[scale_name(spec.name)] = scales
            quantized.add(spec.name)
        elif tensor.dtype not in ("F32", "BF16"):
            hint = f" (no {scale_name(spec.name)} beside it)" if tensor.dtype.startswith("F8") else ""
            raise ModelError(
                f"{tensor.file}: tensor {spec.name} has dtype {tensor.dtype}{hint}, and only F32 and BF16 are supported"
            )
    return Checkpoint(tensors, frozenset(quantized))


def _check_scales(spec: TensorSpec, tensor: StoredTensor, scales: StoredTensor) -> None:
    name = scale_name(spec.name)
    if spec.role != "linear":
        raise ModelError(f"{scales.file}: tensor {spec.name} is quantized, which is not supported for this tensor")
    if tensor.dtype != "F8_E4M3":
        raise ModelError(f"{tensor.file}: tensor {spec.name} has scales and dtype {tensor.dtype}, expected F8_E4M3")
    if scales.dtype != "F32":
        raise ModelError(f"{scales.file}: tensor {name} has dtype {scales.dtype}, and only F32 is supported")
    blocks = tuple(-(-size // QUANT_BLOCK) for size in spec.shape)
    if scales.shape != blocks:
        raise ModelError(
            f"{scales.file}: tensor {name} has shape {scales.shape}, expected {blocks} "
            f"(one scale per {QUANT_BLOCK} x {QUANT_BLOCK} block of {spec.shape})"
        )


def _stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """All tensors of the directory by name; with an index file, those that it lists."""
    if not path.is_dir():
        raise ModelError(f"model directory {path} does not exist")
    index_path = path / INDEX_FILE
    if not index_path.exists():
        if (path / SINGLE_FILE).exists():
            return dict(read_header(path / SINGLE_FILE))
        raise _no_weights(path)
    weight_map = read_json_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index_path}: weight_map must be an object that maps tensor names to files")
    headers: dict[str, dict[str, StoredTensor]] = {}
    stored: dict[str, StoredTensor] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _is_inside(file):
            raise ModelError(f"{index_path}: tensor {name} is mapped to {file!r}, which is no file of this directory")
        if file not in headers:
            headers[file] = dict(read_header(path / file))
        if name not in headers[file]:
            raise ModelError(f"{path / file}: tensor {name} is missing, though {INDEX_FILE} says it is there")
        stored[name] = headers[file][name]
    return stored


def _is_inside(file: str) -> bool:
    parts = PurePosixPath(file).parts
    return bool(parts) and not file.startswith("/") and ".." not in parts and "\0" not in file


def _no_weights(path: Path) -> ModelError:
    pickled = sorted(file.name for pattern in PICKLE_PATTERNS for file in path.glob(pattern))
    if pickled:
        return ModelError(
            f"{path}: weights are only read from safetensors, and only pickled files are here ({pickled[0]}); "
            "convert them first"
        )
    return ModelError(f"{path}: neither {INDEX_FILE} nor {SINGLE_FILE} is here")


def read_header(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Names and descriptions of the tensors of one safetensors file; ModelError if it is missing or damaged."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise ModelError(f"{path} is truncated: {file_bytes} bytes")
            (header_bytes,) = struct.unpack("<Q", prefix)
            if header_bytes > MAX_HEADER_BYTES:
                raise ModelError(f"{path} is no safetensors file: its header would have {header_bytes} bytes")
            raw = file.read(header_bytes)
    except FileNotFoundError:
        raise ModelError(f"shard {path} is missing") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if len(raw) < header_bytes:
        raise ModelError(f"{path} is truncated: {file_bytes} bytes, and its header alone has {header_bytes}")
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        raise ModelError(f"{path} is no safetensors file: its header is not JSON") from None
    if not isinstance(header, dict):
        raise ModelError(f"{path} is no safetensors file: its header is not an object")
    header.pop("__metadata__", None)
    end = 0
    for name, entry in header.items():
        tensor, tensor_end = _parse_entry(path, name, entry, 8 + header_bytes)
        end = max(end, tensor_end)
        yield name, tensor
    expected_bytes = 8 + header_bytes + end
    if file_bytes < expected_bytes:
        raise ModelError(f"{path} is truncated: {file_bytes} of {expected_bytes} bytes")
    if file_bytes > expected_bytes:
        raise ModelError(f"{path} is damaged: {file_bytes} bytes, and its header describes {expected_bytes}")


def _parse_entry(path: Path, name: str, entry: Any, data_start: int) -> tuple[StoredTensor, int]:
    """One header entry -> the tensor and where it ends, counted from the start of the data."""
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        num_elements = 1
        for size in shape:
            num_elements *= size
        num_bytes = end - start
        well_formed = start >= 0 and all(isinstance(size, int) and size >= 0 for size in shape)
    except (KeyError, TypeError, ValueError):
        raise ModelError(f"{path} is damaged: its header describes tensor {name} wrongly") from None
    bits = _DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    # Tensors of dtypes unknown here are nobody's business unless the model needs them (then the dtype check speaks).
    if not well_formed or (bits is not None and num_bytes != num_elements * bits // 8):
        raise ModelError(f"{path} is damaged: its header describes tensor {name} wrongly")
    return StoredTensor(path, str(dtype), shape, num_bytes, data_start + start), end

"""Checkpoints checked from headers: each kind of damage is one error that names the tensor or file."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from echo_batch.errors import ModelError
from echo_batch.models.checkpoint import INDEX_FILE, check_checkpoint
from echo_batch.models.config import ModelConfig
from echo_batch.models.tensors import expected_tensors
from tests.checkpoints import FAMILIES, Family
from tests.models.oracle import CheckpointFixture

O_PROJ = "model.layers.1.self_attn.o_proj.weight"


@pytest.fixture
def copied(tiny_checkpoint: CheckpointFixture, tmp_path: Path) -> Path:
    """A private copy of the fp8 V3.2 checkpoint."""
    return Path(shutil.copytree(tiny_checkpoint("v32", "fp8") / "model", tmp_path / "model"))


def check(path: Path) -> None:
    check_checkpoint(ModelConfig.from_dir(path), path)


def shard_of(path: Path, name: str) -> Path:
    weight_map: dict[str, str] = json.loads((path / INDEX_FILE).read_text())["weight_map"]
    return path / weight_map[name]


def edit_index(path: Path, edit: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((path / INDEX_FILE).read_text())
    edit(index["weight_map"])
    (path / INDEX_FILE).write_text(json.dumps(index))


def replace_tensor(path: Path, name: str, tensor: torch.Tensor) -> None:
    shard = shard_of(path, name)
    state = {key: value.clone() for key, value in load_file(shard).items()}
    state[name] = tensor
    save_file(state, shard)


@pytest.mark.parametrize("family", FAMILIES)
def test_good_checkpoints(tiny_checkpoint: CheckpointFixture, family: Family) -> None:
    for kind in ("fp32", "bf16", "fp8"):
        path = tiny_checkpoint(family, kind) / "model"
        config = ModelConfig.from_dir(path)
        checkpoint = check_checkpoint(config, path)
        linears = {spec.name for spec in expected_tensors(config) if spec.role == "linear"}
        assert checkpoint.quantized == (linears if kind == "fp8" else set())
        assert not any(name.startswith(f"model.layers.{config.num_layers}.") for name in checkpoint.tensors)


def test_expected_names_are_those_of_a_checkpoint(tiny_checkpoint: CheckpointFixture) -> None:
    for family in FAMILIES:
        path = tiny_checkpoint(family, "bf16") / "model"
        config = ModelConfig.from_dir(path)
        on_disk = set(json.loads((path / INDEX_FILE).read_text())["weight_map"])
        mtp = {name for name in on_disk if name.startswith(f"model.layers.{config.num_layers}.")}
        assert {spec.name for spec in expected_tensors(config)} == on_disk - mtp and mtp


def test_single_file(tiny_checkpoint: CheckpointFixture, tmp_path: Path) -> None:
    source = tiny_checkpoint("v32", "bf16") / "model"
    state: dict[str, torch.Tensor] = {}
    for shard in source.glob("*.safetensors"):
        state |= load_file(shard)
    save_file(state, tmp_path / "model.safetensors")
    shutil.copy(source / "config.json", tmp_path)
    check(tmp_path)


def test_missing_tensor(copied: Path) -> None:
    edit_index(copied, lambda weight_map: weight_map.pop(O_PROJ))
    with pytest.raises(ModelError, match=f"tensor {O_PROJ} is missing"):
        check(copied)


def test_tensor_missing_in_its_shard(copied: Path) -> None:
    shards = sorted(path.name for path in copied.glob("*.safetensors"))
    other = next(name for name in shards if name != shard_of(copied, O_PROJ).name)
    edit_index(copied, lambda weight_map: weight_map.update({O_PROJ: other}))
    with pytest.raises(ModelError, match=rf"{other}: tensor {O_PROJ} is missing"):
        check(copied)


def test_missing_shard(copied: Path) -> None:
    shard = shard_of(copied, O_PROJ)
    shard.unlink()
    with pytest.raises(ModelError, match=f"shard .*{shard.name} is missing"):
        check(copied)


@pytest.mark.parametrize("keep_bytes", [0, 5, 100, -1])
def test_truncated_shard(copied: Path, keep_bytes: int) -> None:
    shard = shard_of(copied, O_PROJ)
    content = shard.read_bytes()
    shard.write_bytes(content[:keep_bytes])
    with pytest.raises(ModelError, match=f"{shard.name} is truncated"):
        check(copied)


def test_bytes_after_the_end(copied: Path) -> None:
    shard = shard_of(copied, O_PROJ)
    shard.write_bytes(shard.read_bytes() + b"\0")
    with pytest.raises(ModelError, match=f"{shard.name} is damaged"):
        check(copied)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b'{"x": 3}',
        b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
        b'{"x": {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]}}',
    ],
)
def test_damaged_header(copied: Path, header: bytes) -> None:
    shard = shard_of(copied, O_PROJ)
    shard.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    with pytest.raises(ModelError, match=shard.name):
        check(copied)


def test_huge_header(copied: Path) -> None:
    shard = shard_of(copied, O_PROJ)
    shard.write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    with pytest.raises(ModelError, match=f"{shard.name} is no safetensors file"):
        check(copied)


def test_misshapen_tensor(copied: Path) -> None:
    replace_tensor(copied, "model.norm.weight", torch.ones(255))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \(255,\), expected \(256,\)"):
        check(copied)


def test_wrong_dtype(copied: Path) -> None:
    replace_tensor(copied, "lm_head.weight", torch.zeros(512, 256, dtype=torch.int32))
    with pytest.raises(ModelError, match=r"lm_head\.weight has dtype I32"):
        check(copied)


def test_fp8_without_scales(copied: Path) -> None:
    scale = O_PROJ + "_scale_inv"
    edit_index(copied, lambda weight_map: weight_map.pop(scale))
    with pytest.raises(ModelError, match=rf"{O_PROJ} has dtype F8_E4M3 \(no {scale} beside it\)"):
        check(copied)


def test_misshapen_scales(copied: Path) -> None:
    replace_tensor(copied, O_PROJ + "_scale_inv", torch.ones(4, 4))
    with pytest.raises(ModelError, match=rf"{O_PROJ}_scale_inv has shape \(4, 4\), expected \(2, 4\)"):
        check(copied)


def test_scales_of_a_weight_that_is_not_fp8(copied: Path) -> None:
    replace_tensor(copied, O_PROJ, torch.zeros(256, 512, dtype=torch.bfloat16))
    with pytest.raises(ModelError, match=f"{O_PROJ} has scales and dtype BF16"):
        check(copied)


def test_index_must_stay_inside_the_directory(copied: Path) -> None:
    for file in ("../model/x.safetensors", "/etc/passwd", "", 3):
        index = json.loads((copied / INDEX_FILE).read_text())
        index["weight_map"][O_PROJ] = file
        (copied / INDEX_FILE).write_text(json.dumps(index))
        with pytest.raises(ModelError, match=O_PROJ):
            check(copied)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_bad_index(copied: Path, content: str) -> None:
    (copied / INDEX_FILE).write_text(content)
    with pytest.raises(ModelError, match=INDEX_FILE):
        check(copied)


def test_pickled_weights_are_refused(tiny_checkpoint: CheckpointFixture, tmp_path: Path) -> None:
    shutil.copy(tiny_checkpoint("v32", "fp8") / "model" / "config.json", tmp_path)
    with pytest.raises(ModelError, match="neither"):
        check(tmp_path)
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match=r"only read from safetensors.*pytorch_model-00001-of-00002\.bin"):
        check(tmp_path)

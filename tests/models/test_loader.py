"""What the loader makes of files: dequantization, absorption, merging, stacking, quantized weights kept."""

from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from echo_batch.errors import ModelError
from echo_batch.kernels.ops import reference_ops
from echo_batch.kernels.weights import QuantizedWeight, dequantize
from echo_batch.models.checkpoint import check_checkpoint
from echo_batch.models.config import ModelConfig
from echo_batch.models.layers import ModelWeights, MoeWeights
from echo_batch.models.loader import SafetensorsSource, WeightBuilder, load_model, num_first_layers, read_order
from echo_batch.models.model import Model
from tests.checkpoints import FAMILIES, Family, hf_config, quantize_blocks, random_state, write_directory
from tests.models.oracle import CheckpointFixture

CPU = torch.device("cpu")


def oracle_state(directory: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for shard in (directory / "oracle").glob("*.safetensors"):
        state |= load_file(shard)
    return state


def build_weights(path: Path, dtype: torch.dtype, *, keep_quantized: bool) -> ModelWeights:
    config = ModelConfig.from_dir(path)
    ue8m0 = config.quant is not None and config.quant.ue8m0
    checkpoint = check_checkpoint(config, path)
    names = read_order(config, checkpoint, dtype, keep_quantized=keep_quantized, experts=None)
    with SafetensorsSource(checkpoint, CPU, names=names, ue8m0=ue8m0, progress=None) as source:
        return WeightBuilder(config, source, CPU, dtype, keep_quantized=keep_quantized).model()


@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_file_becomes_the_oracle_values(tiny_checkpoint: CheckpointFixture, family: Family) -> None:
    directory = tiny_checkpoint(family, "fp8")
    state = oracle_state(directory)
    config = ModelConfig.from_dir(directory / "model")
    weights = build_weights(directory / "model", torch.float32, keep_quantized=False)
    for i, layer in enumerate(weights.layers):
        prefix = f"model.layers.{i}.self_attn."
        parts = [state[prefix + "q_a_proj.weight"], state[prefix + "kv_a_proj_with_mqa.weight"]]
        if layer.attention.indexer is not None:
            parts.insert(1, state[prefix + "indexer.wk.weight"])
        assert torch.equal(dequantize(layer.attention.fused_a, torch.float32), torch.cat(parts))
        kv_b = state[prefix + "kv_b_proj.weight"].view(4, -1, 512)
        assert torch.equal(layer.attention.key_up, kv_b[:, : config.qk_nope_head_dim])
        assert torch.equal(layer.attention.value_up, kv_b[:, config.qk_nope_head_dim :])
        if isinstance(layer.mlp, MoeWeights):
            prefix = f"model.layers.{i}.mlp.experts.7."
            gate_up = torch.cat([state[prefix + "gate_proj.weight"], state[prefix + "up_proj.weight"]])
            assert torch.equal(dequantize(layer.mlp.experts.gate_up, torch.float32)[7], gate_up)
            assert torch.equal(dequantize(layer.mlp.experts.down, torch.float32)[7], state[prefix + "down_proj.weight"])
            shared = state[f"model.layers.{i}.mlp.shared_experts.down_proj.weight"]
            assert layer.mlp.shared is None and layer.mlp.num_held == config.n_routed_experts
            assert torch.equal(dequantize(layer.mlp.experts.down, torch.float32)[-1], shared)
    assert [layer.attention.indexer is not None for layer in weights.layers] == [
        layer.indexer == "full" for layer in config.layers
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_quantized_is_the_same_values(tiny_checkpoint: CheckpointFixture, family: Family) -> None:
    path = tiny_checkpoint(family, "fp8") / "model"
    plain = build_weights(path, torch.float32, keep_quantized=False)
    kept = build_weights(path, torch.float32, keep_quantized=True)
    for ours, theirs in zip(kept.layers, plain.layers, strict=True):
        pairs = [(getattr(ours.attention, n), getattr(theirs.attention, n)) for n in ("fused_a", "q_b", "o")]
        if isinstance(ours.mlp, MoeWeights) and isinstance(theirs.mlp, MoeWeights):
            pairs += [(ours.mlp.experts.gate_up, theirs.mlp.experts.gate_up)]
            pairs += [(ours.mlp.experts.down, theirs.mlp.experts.down)]
        for quantized, expected in pairs:
            assert isinstance(quantized, QuantizedWeight) and quantized.ue8m0 == (family == "v32")
            assert torch.equal(dequantize(quantized, torch.float32), expected)
        assert isinstance(ours.attention.key_up, Tensor)


def test_unquantized_files_stay_plain_on_any_device(tiny_checkpoint: CheckpointFixture) -> None:
    weights = build_weights(tiny_checkpoint("glm5", "bf16") / "model", torch.bfloat16, keep_quantized=True)
    assert isinstance(weights.layers[1].attention.q_b, Tensor)
    assert weights.layers[1].attention.q_b.dtype == torch.bfloat16
    assert weights.layers[1].input_norm.dtype == torch.float32


def test_partly_quantized_experts(tmp_path: Path) -> None:
    state = random_state("v32")
    state |= {name: tensor.to(torch.bfloat16) for name, tensor in state.items() if "norm" not in name}
    name = "model.layers.1.mlp.experts.0.down_proj.weight"
    state[name], state[name + "_scale_inv"] = quantize_blocks(state[name].float(), power_of_two=False)
    write_directory(tmp_path / "model", hf_config("v32"), state)
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.experts"):
        build_weights(tmp_path / "model", torch.bfloat16, keep_quantized=True)
    build_weights(tmp_path / "model", torch.bfloat16, keep_quantized=False)


def test_weights_do_not_alias_the_files(tiny_checkpoint: CheckpointFixture) -> None:
    path = tiny_checkpoint("v32", "fp32") / "model"
    first = build_weights(path, torch.float32, keep_quantized=False)
    first.norm.fill_(7.0)
    first.embedding.fill_(7.0)
    second = build_weights(path, torch.float32, keep_quantized=False)
    assert not (second.norm == 7.0).any() and not (second.embedding == 7.0).any()


def test_progress_and_formats(tiny_checkpoint: CheckpointFixture) -> None:
    path = tiny_checkpoint("v32", "fp8") / "model"
    config = ModelConfig.from_dir(path)
    calls: list[tuple[int, int]] = []
    model = load_model(
        config,
        path,
        device=CPU,
        dtype=torch.bfloat16,
        row_kind="fp8",
        ops=reference_ops(),
        progress=lambda done, total: calls.append((done, total)),
    )
    total = check_checkpoint(config, path).num_bytes
    assert calls[-1] == (total, total) and calls == sorted(calls)
    assert (model.row_format.kind, model.row_format.row_bytes) == ("fp8", 656)
    assert (model.index_format.kind, model.index_format.row_bytes) == ("fp8", 132)
    assert model.dtype == torch.bfloat16


def test_a_worker_reads_only_its_experts(tiny_checkpoint: CheckpointFixture) -> None:
    path = tiny_checkpoint("v32", "fp8") / "model"
    config = ModelConfig.from_dir(path)
    checkpoint = check_checkpoint(config, path)
    names = read_order(config, checkpoint, torch.bfloat16, keep_quantized=True, experts=range(4, 8))
    assert {n.split("experts.")[1].split(".")[0] for n in names if ".experts." in n} == {"4", "5", "6", "7"}
    calls: list[tuple[int, int]] = []
    load_model(
        config,
        path,
        device=CPU,
        dtype=torch.bfloat16,
        row_kind="fp8",
        ops=reference_ops(),
        experts=range(4, 8),
        progress=lambda done, total: calls.append((done, total)),
    )
    assert calls[-1][0] == calls[-1][1] < 0.8 * checkpoint.num_bytes


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
@pytest.mark.parametrize("family", ["v32", "glm52"])
def test_first_layers_are_told_of_on_the_way(
    tiny_checkpoint: CheckpointFixture, family: Family, load_format: Literal["safetensors", "dummy"]
) -> None:
    path = tiny_checkpoint(family, "bf16") / "model"
    done, told = [0], list[tuple[int, Model]]()
    model = load_model(
        ModelConfig.from_dir(path),
        path,
        device=CPU,
        dtype=torch.float32,
        row_kind="fp32",
        ops=reference_ops(),
        load_format=load_format,
        progress=lambda read, total: done.__setitem__(0, read),
        first_layers=lambda first: told.append((done[0], first)),
    )
    ((read, first),) = told
    assert read < done[0] or load_format == "dummy"
    number = num_first_layers(model.config)
    assert first.config.layers == model.config.layers[:number] and 1 < number <= model.config.num_layers
    ours, theirs = first.weights, model.weights
    assert all(a is b for a, b in zip(ours.layers, theirs.layers[:number], strict=True))
    assert ours.embedding is theirs.embedding
    for stand_in, real in ((ours.norm, theirs.norm), (ours.head, theirs.head)):
        assert (stand_in.shape, stand_in.dtype, stand_in.stride()) == (real.shape, real.dtype, real.stride())

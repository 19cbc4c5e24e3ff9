"""Reading config.json: both families, both spellings, and one named error for everything else."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from echo_batch.errors import ModelError
from echo_batch.models.config import ModelConfig
from tests.checkpoints import hf_config

MISSING = object()
V32_REAL = dict(
    hidden_size=7168,
    num_hidden_layers=61,
    first_k_dense_replace=3,
    n_routed_experts=256,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    num_attention_heads=128,
    q_lora_rank=1536,
    index_n_heads=64,
    index_topk=2048,
)


def parse(family: Any, **overrides: Any) -> ModelConfig:
    values = hf_config(family)
    for name, value in overrides.items():
        if value is MISSING:
            values.pop(name, None)
        else:
            values[name] = value
    return ModelConfig.from_hf_dict(values)


def test_v32_fields() -> None:
    config = parse("v32", **V32_REAL)
    assert config.architecture == "DeepseekV32ForCausalLM"
    assert (config.num_layers, config.num_attention_heads, config.n_group, config.topk_group) == (61, 128, 8, 4)
    assert [layer.mlp for layer in config.layers[:5]] == ["dense"] * 3 + ["moe"] * 2
    assert all(layer.indexer == "full" for layer in config.layers)
    assert [layer.selection_group for layer in config.layers] == list(range(61))
    assert config.rope.interleaved and not config.index_rope.interleaved
    assert config.rope.yarn_factor == 40 and config.rope.theta == 10000
    # The published numbers of spec section 3.2.
    assert config.softmax_scale == pytest.approx(0.135234, abs=1e-6)
    assert config.eos_token_ids == (1,) and config.bos_token_id == 0
    assert config.quant is None


def test_glm5_fields() -> None:
    config = parse("glm5")
    assert config.rope.interleaved and config.index_rope.interleaved
    assert config.rope.yarn_factor is None and config.rope.theta == 1e6
    assert config.softmax_scale == pytest.approx(256**-0.5)
    assert config.rms_norm_eps == config.latent_rms_norm_eps == 1e-5
    assert config.bos_token_id is None


def test_index_share_of_the_real_glm52() -> None:
    config = parse("glm52", num_hidden_layers=78, first_k_dense_replace=3)
    full = [i for i, layer in enumerate(config.layers) if layer.indexer == "full"]
    assert full == [0, 1, 2, *range(6, 78, 4)] and len(full) == 21
    assert config.group_layers[2:4] == ((2, 3, 4, 5), (6, 7, 8, 9))


def test_index_share_precedence() -> None:
    types = ["full", "shared", "full", "shared"] * 2
    pattern = "FFSSFFSS"
    by_types = parse("glm52", indexer_types=types, index_topk_pattern=pattern)
    assert [layer.indexer for layer in by_types.layers] == types
    by_pattern = parse("glm52", index_topk_pattern=pattern)
    assert "".join(layer.indexer[0].upper() for layer in by_pattern.layers) == pattern
    assert [layer.selection_group for layer in by_pattern.layers] == [0, 1, 1, 1, 2, 3, 3, 3]


def test_explicit_mlp_types_win() -> None:
    config = parse("glm5", mlp_layer_types=["sparse", "dense", "sparse", "dense"])
    assert [layer.mlp for layer in config.layers] == ["moe", "dense", "moe", "dense"]


def test_rope_parameters_win_over_the_old_spelling() -> None:
    config = parse("v32", rope_parameters=dict(rope_type="default", rope_theta=5e5))
    assert config.rope.theta == 5e5 and config.rope.yarn_factor is None
    yarn = dict(hf_config("v32")["rope_scaling"], rope_theta=2e4, rope_type="yarn", factor=8)
    yarn.pop("type")
    config = parse("v32", rope_parameters=yarn)
    assert config.rope.theta == 2e4 and config.rope.yarn_factor == 8
    assert config.softmax_scale == pytest.approx(192**-0.5 * (0.1 * math.log(8) + 1) ** 2)


def test_rope_theta_beside_rope_parameters() -> None:
    assert parse("glm5", rope_parameters=dict(rope_type="default"), rope_theta=3e5).rope.theta == 3e5


def test_quantization() -> None:
    quant = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128])
    with_ue8m0 = parse("v32", quantization_config=quant | dict(scale_fmt="ue8m0")).quant
    assert with_ue8m0 is not None and with_ue8m0.ue8m0
    without = parse("glm5", quantization_config=quant | dict(modules_to_not_convert=["lm_head"])).quant
    assert without is not None and not without.ue8m0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "deepseek_v4"),
        ("model_type", "glm5_next"),
        ("model_type", MISSING),
        ("architectures", ["DeepseekV4ForCausalLM"]),
        ("scoring_func", "sqrtsoftplus"),
        ("topk_method", "greedy"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("tie_word_embeddings", True),
        ("moe_layer_freq", 2),
        ("hidden_size", MISSING),
        ("hidden_size", None),
        ("hidden_size", "256"),
        ("hidden_size", True),
        ("hidden_size", 0),
        ("hidden_size", 256.0),
        ("num_hidden_layers", -1),
        ("q_lora_rank", None),
        ("kv_lora_rank", 256),
        ("qk_rope_head_dim", 32),
        ("index_head_dim", 64),
        ("index_topk", MISSING),
        ("norm_topk_prob", "yes"),
        ("norm_topk_prob", MISSING),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("nan")),
        ("routed_scaling_factor", []),
        ("n_group", 3),
        ("n_group", 16),
        ("topk_group", 5),
        ("num_experts_per_tok", 9),
        ("eos_token_id", "1"),
        ("eos_token_id", [1, -2]),
        ("eos_token_id", 512),
        ("rope_theta", MISSING),
        ("rope_scaling", dict(type="linear", factor=2)),
        ("rope_scaling", [1]),
        ("mlp_layer_types", ["dense"] * 3),
        ("mlp_layer_types", ["dense", "sparse", "moe", "sparse"]),
        ("indexer_types", ["shared"] * 4),
        ("indexer_types", ["full", "none", "full", "full"]),
        ("index_topk_pattern", "FSX"),
        ("quantization_config", "fp8"),
    ],
)
def test_one_error_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(ModelError) as error:
        parse("v32", **{field: value})
    assert field in str(error.value)
    assert error.value.exit_code == 2 and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quant_method", "gptq"),
        ("quant_method", MISSING),
        ("fmt", "e5m2"),
        ("activation_scheme", "static"),
        ("weight_block_size", [64, 64]),
        ("weight_block_size", None),
        ("scale_fmt", "e8m23"),
    ],
)
def test_unsupported_quantization_names_the_field(field: str, value: Any) -> None:
    quant = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128])
    quant[field] = value
    if value is MISSING:
        del quant[field]
    with pytest.raises(ModelError, match=f"quantization_config.{field}"):
        parse("v32", quantization_config=quant)


@pytest.mark.parametrize(
    ("field", "value"),
    [("mscale", 0.7), ("factor", None), ("attention_factor", 1.5), ("original_max_position_embeddings", "4096")],
)
def test_unsupported_yarn_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(ModelError, match=f"rope_scaling.{field}"):
        parse("v32", rope_scaling=hf_config("v32")["rope_scaling"] | {field: value})


def test_glm_must_say_how_its_indexer_pairs() -> None:
    with pytest.raises(ModelError, match="indexer_rope_interleave is missing"):
        parse("glm5", indexer_rope_interleave=MISSING)


def write(path: Path, **files: Any) -> None:
    for name, value in files.items():
        (path / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))


def test_from_dir_unites_eos_ids(tmp_path: Path) -> None:
    write(tmp_path, config=hf_config("v32", eos_token_id=[1, 7]), generation_config=dict(eos_token_id=[3, 7]))
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (3, 7, 1)


def test_from_dir_options(tmp_path: Path) -> None:
    write(tmp_path, config=hf_config("glm52"))
    config = ModelConfig.from_dir(tmp_path, num_layers=3, latent_eps=1e-6)
    assert config.num_layers == 3 and config.latent_rms_norm_eps == 1e-6 and config.rms_norm_eps == 1e-5
    with pytest.raises(ModelError, match="num_layers"):
        ModelConfig.from_dir(tmp_path, num_layers=9)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"model_type": 3}', "\udcff"])
def test_from_dir_bad_json(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content, errors="surrogateescape")
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelConfig.from_dir(tmp_path)


def test_from_dir_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        ModelConfig.from_dir(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        ModelConfig.from_dir(tmp_path)


def test_bad_generation_config(tmp_path: Path) -> None:
    write(tmp_path, config=hf_config("v32"), generation_config="[]")
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        ModelConfig.from_dir(tmp_path)

"""Our own frozen description of a model, read from a Hugging Face config.json. Nothing below sees the HF file."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from echo_batch.errors import ModelError
from echo_batch.models.fields import Fields, read_json_object

SUPPORTED_MODEL_TYPES = {"deepseek_v32": "DeepseekV32ForCausalLM", "glm_moe_dsa": "GlmMoeDsaForCausalLM"}
"""model_type of config.json and the architecture that goes with it."""

LATENT_DIM = 512
ROPE_DIM = 64
INDEX_HEAD_DIM = 128
"""The cache row layouts of kernels/formats.py; every DSA model has these sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding of one use. `interleaved`: pairs (2j, 2j+1); otherwise half-split pairs (j, j + dim/2).

    YaRN (spec section 3.2) is on when `yarn_factor` is not None.
    """

    dim: int
    theta: float
    interleaved: bool
    yarn_factor: float | None = None
    yarn_original_max_position: int = 4096
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_mscale_all_dim: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """What one layer is made of. A "shared" indexer reuses the selection of the nearest earlier "full" layer."""

    indexer: Literal["full", "shared"]
    mlp: Literal["dense", "moe"]
    selection_group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantSpec:
    """Block-scaled fp8 weights: block [128, 128]; `ue8m0` rounds activation scales up to powers of two."""

    block_size: int = 128
    ue8m0: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A DSA model (DeepSeek-V3.2, GLM-5.x)."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    latent_rms_norm_eps: float
    rope: RopeSpec
    index_rope: RopeSpec
    softmax_scale: float
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quant: QuantSpec | None

    @classmethod
    def from_dir(
        cls, path: str | Path, *, num_layers: int | None = None, latent_eps: float | None = None
    ) -> "ModelConfig":
        """Read `path`/config.json (and generation_config.json for the EOS ids).

        `num_layers` keeps the first layers only (for dummy weights); `latent_eps` overrides the eps of the q_a and kv_a
        norms (spec section 3.1). ModelError names the field that is missing, of a wrong type or unsupported.
        """
        path = Path(path)
        if not path.is_dir():
            raise ModelError(f"model directory {path} does not exist")
        generation_path = path / "generation_config.json"
        generation = read_json_object(generation_path) if generation_path.exists() else {}
        config = cls.from_hf_dict(read_json_object(path / "config.json"), generation)
        if latent_eps is not None:
            config = replace(config, latent_rms_norm_eps=latent_eps)
        if num_layers is not None:
            if not 1 <= num_layers <= config.num_layers:
                raise ModelError(f"num_layers must be between 1 and {config.num_layers}, got {num_layers}")
            config = replace(config, layers=config.layers[:num_layers])
        return config

    @classmethod
    def from_hf_dict(cls, values: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> "ModelConfig":
        """The model described by the content of config.json and generation_config.json; ModelError names the field."""
        fields = Fields(values)
        model_type = fields.text("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            supported = ", ".join(SUPPORTED_MODEL_TYPES)
            raise fields.error("model_type", f"is {model_type!r}, and only these are supported: {supported}")
        architecture = SUPPORTED_MODEL_TYPES[model_type]
        fields.expect("architectures", [architecture])
        _reject_unsupported(fields)
        rms_norm_eps = fields.number("rms_norm_eps")
        rope = _rope(fields, fields.boolean("rope_interleave", True))
        nope_dim, rope_dim = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
        config = cls(
            architecture=architecture,
            model_type=model_type,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            layers=_layers(fields),
            num_attention_heads=fields.integer("num_attention_heads"),
            q_lora_rank=fields.integer("q_lora_rank"),
            kv_lora_rank=fields.integer("kv_lora_rank"),
            qk_nope_head_dim=nope_dim,
            qk_rope_head_dim=rope_dim,
            v_head_dim=fields.integer("v_head_dim"),
            index_n_heads=fields.integer("index_n_heads"),
            index_head_dim=fields.integer("index_head_dim"),
            index_topk=fields.integer("index_topk"),
            intermediate_size=fields.integer("intermediate_size"),
            moe_intermediate_size=fields.integer("moe_intermediate_size"),
            n_routed_experts=fields.integer("n_routed_experts"),
            num_experts_per_tok=fields.integer("num_experts_per_tok"),
            n_shared_experts=fields.integer("n_shared_experts"),
            n_group=fields.integer("n_group"),
            topk_group=fields.integer("topk_group"),
            norm_topk_prob=fields.boolean("norm_topk_prob"),
            routed_scaling_factor=fields.number("routed_scaling_factor"),
            rms_norm_eps=rms_norm_eps,
            latent_rms_norm_eps=rms_norm_eps,
            rope=rope,
            index_rope=replace(rope, interleaved=_index_rope_interleaved(fields, model_type)),
            softmax_scale=_softmax_scale(nope_dim + rope_dim, rope),
            max_position_embeddings=fields.integer("max_position_embeddings"),
            bos_token_id=fields.integer("bos_token_id", minimum=0) if fields.has("bos_token_id") else None,
            eos_token_ids=_eos_token_ids(values, generation or {}),
            quant=_quant(fields),
        )
        _check_sizes(config, fields)
        return config

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def group_layers(self) -> tuple[tuple[int, ...], ...]:
        """Layers of each selection group, in order; the first of each is its full-indexer layer."""
        groups: list[list[int]] = []
        for i, layer in enumerate(self.layers):
            if layer.indexer == "full":
                groups.append([])
            groups[-1].append(i)
        return tuple(tuple(g) for g in groups)


def _reject_unsupported(fields: Fields) -> None:
    """Fields whose other values would change the arithmetic."""
    fields.expect("scoring_func", "sigmoid")
    fields.expect("topk_method", "noaux_tc")
    fields.expect("hidden_act", "silu")
    fields.expect("attention_bias", False)
    fields.expect("mlp_bias", False)
    fields.expect("tie_word_embeddings", False)
    fields.expect("moe_layer_freq", 1)


def _check_sizes(config: ModelConfig, fields: Fields) -> None:
    for name, expected in (
        ("kv_lora_rank", LATENT_DIM),
        ("qk_rope_head_dim", ROPE_DIM),
        ("index_head_dim", INDEX_HEAD_DIM),
    ):
        if getattr(config, name) != expected:
            raise fields.error(name, f"is {getattr(config, name)}, and only {expected} is supported")
    if config.n_routed_experts % config.n_group:
        raise fields.error("n_group", f"must divide n_routed_experts {config.n_routed_experts}, got {config.n_group}")
    group_size = config.n_routed_experts // config.n_group
    if config.n_group > 1 and group_size < 2:
        raise fields.error("n_group", f"leaves {group_size} expert in a group, and at least 2 are needed")
    if config.topk_group > config.n_group:
        raise fields.error("topk_group", f"must be at most n_group {config.n_group}, got {config.topk_group}")
    if config.num_experts_per_tok > config.topk_group * group_size:
        limit = config.topk_group * group_size
        raise fields.error("num_experts_per_tok", f"must be at most {limit}, got {config.num_experts_per_tok}")
    for token_id in config.eos_token_ids:
        if token_id >= config.vocab_size:
            raise fields.error("eos_token_id", f"must be below vocab_size {config.vocab_size}, got {token_id}")


def _layers(fields: Fields) -> tuple[LayerSpec, ...]:
    num_layers = fields.integer("num_hidden_layers")
    indexers = _indexer_types(fields, num_layers)
    if indexers[0] != "full":
        raise fields.error("indexer_types", "must begin with a full layer")
    if fields.has("mlp_layer_types"):
        names = {"dense": "dense", "sparse": "moe"}
        mlps = _per_layer(fields, "mlp_layer_types", names, num_layers)
    else:
        num_dense = fields.integer("first_k_dense_replace", minimum=0)
        mlps = ["dense" if i < num_dense else "moe" for i in range(num_layers)]
    layers = []
    group = -1
    for indexer, mlp in zip(indexers, mlps, strict=True):
        group += indexer == "full"
        layers.append(
            LayerSpec(
                indexer="full" if indexer == "full" else "shared",
                mlp="dense" if mlp == "dense" else "moe",
                selection_group=group,
            )
        )
    return tuple(layers)


def _per_layer(fields: Fields, name: str, names: Mapping[str, str], num_layers: int) -> list[str]:
    """A list with one known word per layer, translated. The MTP layer may have an entry at the end."""
    words = fields.list_of(name, str)
    spare = fields.integer("num_nextn_predict_layers", 0, minimum=0)
    if not num_layers <= len(words) <= num_layers + spare:
        raise fields.error(name, f"must have {num_layers} entries, one a layer, got {len(words)}")
    for word in words:
        if word not in names:
            raise fields.error(name, f"has entry {word!r}, and only {', '.join(names)} are supported")
    return [names[word] for word in words[:num_layers]]


def _indexer_types(fields: Fields, num_layers: int) -> list[str]:
    """Which layers run their own indexer (IndexShare, spec section 3.4)."""
    if fields.has("indexer_types"):
        return _per_layer(fields, "indexer_types", {"full": "full", "shared": "shared"}, num_layers)
    if fields.has("index_topk_pattern"):
        pattern = fields.text("index_topk_pattern")
        if len(pattern) < num_layers or set(pattern) - set("FS"):
            raise fields.error("index_topk_pattern", f"must be {num_layers} letters F or S, got {pattern!r}")
        return ["full" if letter == "F" else "shared" for letter in pattern[:num_layers]]
    freq = fields.integer("index_topk_freq", 1)
    offset = fields.integer("index_skip_topk_offset", 2, minimum=0)
    return ["full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(num_layers)]


def _rope(fields: Fields, interleaved: bool) -> RopeSpec:
    """Rotary embedding from either spelling: `rope_parameters`, else `rope_theta` and `rope_scaling`."""
    if fields.has("rope_parameters"):
        scaling: Fields | None = fields.section("rope_parameters")
        assert scaling is not None
        theta = (scaling if scaling.has("rope_theta") else fields).number("rope_theta")
    else:
        theta = fields.number("rope_theta")
        scaling = fields.section("rope_scaling") if fields.has("rope_scaling") else None
    dim = fields.integer("qk_rope_head_dim")
    rope_type = "default"
    if scaling is not None:
        type_key = "rope_type" if scaling.has("rope_type") else "type"
        rope_type = scaling.text(type_key, "default")
        if rope_type not in ("default", "yarn"):
            raise scaling.error(type_key, f"is {rope_type!r}, and only 'default' or 'yarn' is supported")
    if scaling is None or rope_type == "default":
        return RopeSpec(dim=dim, theta=theta, interleaved=interleaved)
    scaling.expect("truncate", True)
    scaling.expect("attention_factor", 1.0)
    mscale, mscale_all_dim = scaling.number("mscale"), scaling.number("mscale_all_dim")
    if mscale != mscale_all_dim:
        # Unequal values would scale cos and sin (spec section 3.2).
        raise scaling.error("mscale", f"must equal mscale_all_dim {mscale_all_dim}, got {mscale}")
    return RopeSpec(
        dim=dim,
        theta=theta,
        interleaved=interleaved,
        yarn_factor=scaling.number("factor"),
        yarn_original_max_position=scaling.integer("original_max_position_embeddings"),
        yarn_beta_fast=scaling.number("beta_fast", 32.0),
        yarn_beta_slow=scaling.number("beta_slow", 1.0),
        yarn_mscale_all_dim=mscale_all_dim,
    )


def _index_rope_interleaved(fields: Fields, model_type: str) -> bool:
    # DeepSeek's configs do not have the key and mean half-split. GLM's always do, and a wrong guess would be silent
    # until the context outgrows index_topk (spec section 8, pitfall 1).
    if model_type == "deepseek_v32":
        return fields.boolean("indexer_rope_interleave", False)
    return fields.boolean("indexer_rope_interleave")


def _softmax_scale(head_dim: int, rope: RopeSpec) -> float:
    """head_dim^-0.5, times YaRN's m^2 (spec section 3.2)."""
    scale = head_dim**-0.5
    if rope.yarn_factor is None or rope.yarn_factor <= 1.0:
        return scale
    return scale * (0.1 * rope.yarn_mscale_all_dim * math.log(rope.yarn_factor) + 1.0) ** 2


def _quant(fields: Fields) -> QuantSpec | None:
    if not fields.has("quantization_config"):
        return None
    quant = fields.section("quantization_config")
    if quant.text("quant_method") != "fp8":
        raise quant.error("quant_method", f"is {quant.get('quant_method')!r}, and only 'fp8' is supported")
    quant.expect("fmt", "e4m3")
    quant.expect("activation_scheme", "dynamic")
    quant.expect("scale_fmt", "ue8m0", "float")
    if quant.list_of("weight_block_size", int) != [128, 128]:
        raise quant.error("weight_block_size", f"is {quant.get('weight_block_size')}, and only [128, 128] is supported")
    return QuantSpec(ue8m0=quant.text("scale_fmt", "float") == "ue8m0")


def _eos_token_ids(values: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """EOS ids of generation_config.json, then those that only config.json has."""
    ids: list[int] = []
    for file, source in (("generation_config.json", generation), ("config.json", values)):
        value = source.get("eos_token_id")
        for token_id in [] if value is None else value if isinstance(value, list) else [value]:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise ModelError(f"{file}: eos_token_id must be a token id or a list of them, got {value!r}")
            if token_id not in ids:
                ids.append(token_id)
    return tuple(ids)

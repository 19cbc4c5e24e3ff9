"""Tiny random checkpoints in Hugging Face format for all tests, written without transformers (spec section 9).

Families: v32 (DeepSeek-V3.2), glm5 (all full indexers), glm52 (8 layers, IndexShare: full layers 0, 1, 2, 6). Kinds:
fp32, bf16 and fp8 files, each with an oracle twin that holds the same values in fp32 without quantization.
"""

import json
import re
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

Family = Literal["v32", "glm5", "glm52"]
Kind = Literal["fp32", "bf16", "fp8"]
FAMILIES: tuple[Family, ...] = ("v32", "glm5", "glm52")
KINDS: tuple[Kind, ...] = ("fp32", "bf16", "fp8")

SPECIAL_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "[gMASK]",
    "<sop>",
    "<|endoftext|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
)
BOS_ID, EOS_ID, GLM_EOS_IDS = 0, 1, (8, 10, 12)

_BASE: dict[str, Any] = dict(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    moe_intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_shared_experts=1,
    n_routed_experts=16,
    num_experts_per_tok=4,
    routed_scaling_factor=2.5,
    kv_lora_rank=512,
    q_lora_rank=128,
    qk_rope_head_dim=64,
    max_position_embeddings=4096,
    index_topk=32,
    index_head_dim=128,
    index_n_heads=32,
    first_k_dense_replace=1,
    hidden_act="silu",
    attention_bias=False,
    tie_word_embeddings=False,
    norm_topk_prob=True,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    moe_layer_freq=1,
    num_nextn_predict_layers=1,
    dtype="bfloat16",
)
_V32: dict[str, Any] = _BASE | dict(
    architectures=["DeepseekV32ForCausalLM"],
    model_type="deepseek_v32",
    num_hidden_layers=4,
    n_group=4,
    topk_group=2,
    qk_nope_head_dim=128,
    v_head_dim=128,
    rms_norm_eps=1e-6,
    bos_token_id=BOS_ID,
    eos_token_id=EOS_ID,
    rope_theta=10000,
    rope_scaling=dict(
        type="yarn",
        factor=40,
        original_max_position_embeddings=4096,
        beta_fast=32,
        beta_slow=1,
        mscale=1.0,
        mscale_all_dim=1.0,
    ),
)
_GLM5: dict[str, Any] = _BASE | dict(
    architectures=["GlmMoeDsaForCausalLM"],
    model_type="glm_moe_dsa",
    num_hidden_layers=4,
    n_group=1,
    topk_group=1,
    qk_nope_head_dim=192,
    v_head_dim=256,
    head_dim=64,
    rms_norm_eps=1e-5,
    indexer_rope_interleave=True,
    rope_interleave=True,
    rope_parameters=dict(rope_theta=1e6, rope_type="default"),
    eos_token_id=list(GLM_EOS_IDS),
    pad_token_id=GLM_EOS_IDS[0],
)
_GLM52: dict[str, Any] = _GLM5 | dict(
    num_hidden_layers=8,
    head_dim=192,
    index_topk_freq=4,
    index_skip_topk_offset=3,
    index_topk_pattern=None,
    rope_parameters=dict(rope_theta=8e6, rope_type="default"),
)
_CONFIGS: dict[Family, dict[str, Any]] = {"v32": _V32, "glm5": _GLM5, "glm52": _GLM52}
_FULL_INDEXERS: dict[Family, set[int]] = {"v32": {0, 1, 2, 3}, "glm5": {0, 1, 2, 3}, "glm52": {0, 1, 2, 6}}

_QUANTIZED = re.compile(
    r"(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj|gate_proj|up_proj|down_proj|indexer\.wq_b|indexer\.wk)"
    r"\.weight$"
)


def hf_config(family: Family, **overrides: Any) -> dict[str, Any]:
    """A fresh config.json of the family."""
    config: dict[str, Any] = json.loads(json.dumps(_CONFIGS[family] | overrides))
    return config


def random_state(family: Family, seed: int = 0) -> dict[str, Tensor]:
    """All tensors of the family in fp32 under their Hugging Face names, and a stub of the MTP layer."""
    config = hf_config(family)
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}

    def normal(name: str, *shape: int, scale: float, offset: float = 0.0) -> None:
        state[name] = torch.randn(shape, generator=generator) * scale + offset

    def linear(name: str, out: int, inner: int) -> None:
        normal(name + ".weight", out, inner, scale=inner**-0.5)

    def norm(name: str, size: int) -> None:
        normal(name + ".weight", size, scale=0.1, offset=1.0)

    def mlp(name: str, size: int) -> None:
        linear(name + "gate_proj", size, hidden)
        linear(name + "up_proj", size, hidden)
        linear(name + "down_proj", hidden, size)

    hidden, q_rank, heads = config["hidden_size"], config["q_lora_rank"], config["num_attention_heads"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    num_layers = config["num_hidden_layers"]
    normal("model.embed_tokens.weight", config["vocab_size"], hidden, scale=1.0)
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        attention, ffn = prefix + "self_attn.", prefix + "mlp."
        norm(prefix + "input_layernorm", hidden)
        norm(prefix + "post_attention_layernorm", hidden)
        linear(attention + "q_a_proj", q_rank, hidden)
        norm(attention + "q_a_layernorm", q_rank)
        linear(attention + "q_b_proj", heads * (nope + 64), q_rank)
        linear(attention + "kv_a_proj_with_mqa", 512 + 64, hidden)
        norm(attention + "kv_a_layernorm", 512)
        linear(attention + "kv_b_proj", heads * (nope + value), 512)
        linear(attention + "o_proj", hidden, heads * value)
        if layer in _FULL_INDEXERS[family]:
            linear(attention + "indexer.wq_b", config["index_n_heads"] * 128, q_rank)
            linear(attention + "indexer.wk", 128, hidden)
            norm(attention + "indexer.k_norm", 128)
            normal(attention + "indexer.k_norm.bias", 128, scale=0.1)
            linear(attention + "indexer.weights_proj", config["index_n_heads"], hidden)
        if layer < config["first_k_dense_replace"]:
            mlp(ffn, config["intermediate_size"])
            continue
        linear(ffn + "gate", config["n_routed_experts"], hidden)
        normal(ffn + "gate.e_score_correction_bias", config["n_routed_experts"], scale=0.1)
        for expert in range(config["n_routed_experts"]):
            mlp(f"{ffn}experts.{expert}.", config["moe_intermediate_size"])
        mlp(ffn + "shared_experts.", config["moe_intermediate_size"])
    norm("model.norm", hidden)
    linear("lm_head", config["vocab_size"], hidden)
    # Of the wrong shape for anything but the MTP layer: loading them by mistake fails.
    normal(f"model.layers.{num_layers}.eh_proj.weight", hidden, 2 * hidden, scale=1.0)
    normal(f"model.layers.{num_layers}.enorm.weight", hidden, scale=1.0)
    return state


def quantize_blocks(weight: Tensor, *, power_of_two: bool, block: int = 128) -> tuple[Tensor, Tensor]:
    """Weight [out, in] -> e4m3 values and fp32 scales [ceil(out/128), ceil(in/128)]."""
    rows, cols = weight.shape
    row_blocks, col_blocks = -(-rows // block), -(-cols // block)
    padded = torch.zeros(row_blocks * block, col_blocks * block)
    padded[:rows, :cols] = weight
    blocks = padded.view(row_blocks, block, col_blocks, block)
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-12) / 448
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    values = (blocks / scale[:, None, :, None]).clamp(-448, 448).view(padded.shape)[:rows, :cols]
    return values.contiguous().to(torch.float8_e4m3fn), scale


def dequantize_blocks(values: Tensor, scale: Tensor, block: int = 128) -> Tensor:
    rows, cols = values.shape
    expanded = scale.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :cols]
    return values.float() * expanded


def build(directory: Path, family: Family, kind: Kind, *, seed: int = 0) -> Path:
    """Write the checkpoint to directory/model and its fp32 oracle twin to directory/oracle; returns `directory`."""
    stored, oracle = _stored_and_oracle(family, kind, seed)
    config = hf_config(family)
    if kind == "fp8":
        config["quantization_config"] = dict(
            quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", weight_block_size=[128, 128]
        ) | (dict(scale_fmt="ue8m0") if family == "v32" else {})
    write_directory(directory / "model", config, stored)
    write_directory(directory / "oracle", hf_config(family, dtype="float32"), oracle)
    return directory


def _stored_and_oracle(family: Family, kind: Kind, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    stored: dict[str, Tensor] = {}
    oracle: dict[str, Tensor] = {}
    mtp = f"model.layers.{hf_config(family)['num_hidden_layers']}."
    for name, tensor in random_state(family, seed).items():
        # As on disk: DeepSeek keeps norms in fp32, GLM in bf16; both keep the selection bias in fp32.
        keep_fp32 = kind == "fp32" or "e_score" in name or ("norm" in name and family == "v32")
        if kind == "fp8" and _QUANTIZED.search(name):
            values, scale = quantize_blocks(tensor, power_of_two=family == "v32")
            stored[name] = values
            stored[name.removesuffix(".weight") + ".weight_scale_inv"] = scale
            exact = dequantize_blocks(values, scale)
        else:
            stored[name] = tensor if keep_fp32 else tensor.to(torch.bfloat16)
            exact = stored[name].float()
        if not name.startswith(mtp):
            oracle[name] = exact
    return stored, oracle


def write_directory(path: Path, config: dict[str, Any], state: dict[str, Tensor], num_shards: int = 3) -> None:
    """A model directory: sharded safetensors with an index, config, generation config and tokenizer."""
    path.mkdir(parents=True)
    names = sorted(state)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:06d}.safetensors"
        part = {name: state[name].contiguous() for name in names[shard::num_shards]}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(path / "model.safetensors.index.json", index)
    _write_json(path / "config.json", config)
    is_glm = config["model_type"] == "glm_moe_dsa"
    eos: Any = list(GLM_EOS_IDS) if is_glm else EOS_ID
    generation = {"eos_token_id": eos, "do_sample": True, "temperature": 1.0, "top_p": 0.95}
    _write_json(path / "generation_config.json", generation)
    write_tokenizer(path, chat_template=_GLM_TEMPLATE if is_glm else None)


_GLM_TEMPLATE = (
    "[gMASK]<sop>{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}</think>"
    "{% else %}<think>{% endif %}{% endif %}"
)


def write_tokenizer(path: Path, *, chat_template: str | None) -> None:
    """A byte-level BPE tokenizer of 512 entries: special tokens, 256 bytes, frequent pairs. Every text round-trips."""
    symbols = _byte_symbols()
    space = symbols[ord(" ")]
    letters = "abcdefghijklmnopqrstuvwxyz"
    pairs = [(first, second) for first in letters for second in "eaotinshr"] + [(space, letter) for letter in letters]
    vocabulary = [*SPECIAL_TOKENS, *symbols]
    merges = [list(pair) for pair in pairs[: 512 - len(vocabulary)]]
    vocabulary += ["".join(pair) for pair in merges]
    assert len(set(vocabulary)) == len(vocabulary) == 512
    added = [
        dict(id=i, content=token, single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
        for i, token in enumerate(SPECIAL_TOKENS)
    ]
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    tokenizer = dict(
        version="1.0",
        truncation=None,
        padding=None,
        added_tokens=added,
        normalizer=None,
        pre_tokenizer=byte_level,
        post_processor=None,
        decoder=byte_level,
        model=dict(
            type="BPE",
            dropout=None,
            unk_token=None,
            continuing_subword_prefix=None,
            end_of_word_suffix=None,
            fuse_unk=False,
            byte_fallback=False,
            ignore_merges=False,
            vocab={token: i for i, token in enumerate(vocabulary)},
            merges=merges,
        ),
    )
    _write_json(path / "tokenizer.json", tokenizer)
    config: dict[str, Any] = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token=None if chat_template else SPECIAL_TOKENS[BOS_ID],
        eos_token=SPECIAL_TOKENS[GLM_EOS_IDS[0] if chat_template else EOS_ID],
        model_max_length=4096,
        add_bos_token=False,
        clean_up_tokenization_spaces=False,
    )
    _write_json(path / "tokenizer_config.json", config)
    if chat_template is not None:
        (path / "chat_template.jinja").write_text(chat_template, encoding="utf-8")


def _byte_symbols() -> list[str]:
    """The printable stand-ins of the 256 bytes in byte-level BPE, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")

"""Write a trained echo-tiny as a Hugging Face folder: deepseek_v32, fp8 in 128 x 128 blocks with power-of-two scales.

    python -m tools.train_tiny.export CHECKPOINT_DIR MODEL_DIR     (or --random instead of a checkpoint)

The tokenizer files in MODEL_DIR are left alone. `read_exported` reads such a folder back into a training model, which
is how evaluate.py measures what really ships.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.train_tiny.model import TinyConfig, TinyModel, expand_blocks, round_to_e4m3, weight_block_scales
from tools.train_tiny.tokenizer import BOS, EOS, PAD

SHARD_BYTES = 8_000_000
_PLAIN = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "weights_proj.weight")  # stored as bf16
_EXPERT_MATRICES = ("gate_proj", "up_proj", "down_proj")


def hf_config(config: TinyConfig) -> dict[str, object]:
    """config.json with the keys and spelling of DeepSeek-V3.2's."""
    return {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_nextn_predict_layers": 0,
        "first_k_dense_replace": config.first_k_dense_replace,
        "moe_layer_freq": 1,
        "intermediate_size": config.intermediate_size,
        "moe_intermediate_size": config.moe_intermediate_size,
        "n_routed_experts": config.n_routed_experts,
        "n_shared_experts": config.n_shared_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "n_group": config.n_group,
        "topk_group": config.topk_group,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": config.routed_scaling_factor,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_attention_heads,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "index_n_heads": config.index_n_heads,
        "index_head_dim": config.index_head_dim,
        "index_topk": config.index_topk,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": {
            "type": "yarn",
            "factor": config.yarn_factor,
            "original_max_position_embeddings": config.yarn_original_max_position,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "scale_fmt": "ue8m0",
        },
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "torch_dtype": "bfloat16",
    }


def _unstacked(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Checkpoint names: one matrix for each expert."""
    out: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if ".mlp.experts." in name:
            prefix, _, rest = name.partition(".experts.")
            out.update({f"{prefix}.experts.{e}.{rest}": tensor[e] for e in range(tensor.shape[0])})
        else:
            out[name] = tensor
    return out


def checkpoint_tensors(model: TinyModel) -> dict[str, Tensor]:
    """Every tensor of the checkpoint under its Hugging Face name, quantized as V3.2 stores it."""
    out: dict[str, Tensor] = {}
    for name, tensor in _unstacked(model.state_dict()).items():
        tensor = tensor.detach().float().cpu()
        if tensor.dim() < 2:
            out[name] = tensor.contiguous()
        elif name.endswith(_PLAIN):
            out[name] = tensor.bfloat16().contiguous()
        else:
            scale = weight_block_scales(tensor)
            wide = expand_blocks(scale, *tensor.shape)
            out[name] = (tensor / wide).clamp(-448, 448).to(torch.float8_e4m3fn).contiguous()
            out[f"{name}_scale_inv"] = scale.contiguous()
    return out


def write_model(model: TinyModel, folder: Path) -> int:
    """Write config.json, generation_config.json, shards and their index. Returns the bytes of all tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    shards: list[dict[str, Tensor]] = [{}]
    used = total = 0
    for name, tensor in checkpoint_tensors(model).items():
        size = tensor.numel() * tensor.element_size()
        if used + size > SHARD_BYTES:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += size
        total += size
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    generation = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "do_sample": False}
    files = {
        "config.json": hf_config(model.config),
        "generation_config.json": generation,
        "model.safetensors.index.json": {
            "metadata": {"total_size": total},
            "weight_map": dict(sorted(weight_map.items())),
        },
    }
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return total


def read_exported(folder: Path, config: TinyConfig) -> TinyModel:
    """A training model with the dequantized weights of an exported folder. Raises KeyError when a tensor is missing."""
    stored: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        stored.update(load_file(path))
    flat: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        scale = stored.get(f"{name}_scale_inv")
        if not name.endswith("_scale_inv"):
            flat[name] = tensor.float() if scale is None else tensor.float() * expand_blocks(scale, *tensor.shape)
    model = TinyModel(config)
    state: dict[str, Tensor] = {}
    for name in model.state_dict():
        if ".mlp.experts." in name:
            prefix, _, rest = name.partition(".experts.")
            state[name] = torch.stack([flat[f"{prefix}.experts.{e}.{rest}"] for e in range(config.n_routed_experts)])
        else:
            state[name] = flat[name]
    model.load_state_dict(state)
    return model


def largest_rounding_error(model: TinyModel) -> float:
    """Largest relative Frobenius error that fp8 storage gives any matrix; about 0.03 is usual."""
    worst = 0.0
    for name, tensor in _unstacked(model.state_dict()).items():
        if tensor.dim() >= 2 and not name.endswith(_PLAIN):
            rounded = round_to_e4m3(tensor, expand_blocks(weight_block_scales(tensor), *tensor.shape))
            worst = max(worst, float((rounded - tensor).norm() / tensor.norm()))
    return worst


def main() -> None:
    from tools.train_tiny.train import load_checkpoint

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--random", action="store_true", help="random weights: the right files, no useful answers")
    args = parser.parse_args()
    if args.random == (args.checkpoint is not None):
        parser.error("give either a checkpoint or --random")
    torch.manual_seed(0)
    model = TinyModel(TinyConfig())
    if args.checkpoint is not None:
        load_checkpoint(model, args.checkpoint)
    total = write_model(model, args.model_dir)
    print(f"{total / 1e6:.2f} MB in {args.model_dir}, largest rounding error {largest_rounding_error(model):.4f}")


if __name__ == "__main__":
    main()

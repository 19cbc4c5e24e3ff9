"""config.json of the full-size models, as far as our reader looks at it (model spec, section 1)."""

from typing import Any

_COMMON: dict[str, Any] = dict(
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    hidden_act="silu",
    attention_bias=False,
    tie_word_embeddings=False,
    n_routed_experts=256,
    num_experts_per_tok=8,
    n_shared_experts=1,
    moe_intermediate_size=2048,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    index_head_dim=128,
    index_topk=2048,
    first_k_dense_replace=3,
    num_nextn_predict_layers=1,
)
_FP8 = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128])

V32: dict[str, Any] = _COMMON | dict(
    model_type="deepseek_v32",
    architectures=["DeepseekV32ForCausalLM"],
    vocab_size=129280,
    hidden_size=7168,
    num_hidden_layers=61,
    intermediate_size=18432,
    n_group=8,
    topk_group=4,
    num_attention_heads=128,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    v_head_dim=128,
    index_n_heads=64,
    rms_norm_eps=1e-6,
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
    max_position_embeddings=163840,
    bos_token_id=0,
    eos_token_id=1,
    quantization_config=_FP8 | dict(scale_fmt="ue8m0"),
)

GLM52: dict[str, Any] = _COMMON | dict(
    model_type="glm_moe_dsa",
    architectures=["GlmMoeDsaForCausalLM"],
    vocab_size=154880,
    hidden_size=6144,
    num_hidden_layers=78,
    intermediate_size=12288,
    n_group=1,
    topk_group=1,
    num_attention_heads=64,
    q_lora_rank=2048,
    qk_nope_head_dim=192,
    v_head_dim=256,
    index_n_heads=32,
    rms_norm_eps=1e-5,
    rope_parameters=dict(rope_theta=8e6, rope_type="default"),
    indexer_rope_interleave=True,
    index_topk_freq=4,
    index_skip_topk_offset=3,
    max_position_embeddings=1048576,
    eos_token_id=[154820, 154827, 154829],
    quantization_config=_FP8,
)

GLM5: dict[str, Any] = {
    k: v for k, v in GLM52.items() if k not in ("index_topk_freq", "index_skip_topk_offset")
} | dict(rope_parameters=dict(rope_theta=1e6, rope_type="default"), max_position_embeddings=202752)

TINY: dict[str, Any] = V32 | dict(
    vocab_size=512,
    hidden_size=256,
    num_hidden_layers=4,
    intermediate_size=512,
    moe_intermediate_size=128,
    n_routed_experts=16,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    num_attention_heads=4,
    q_lora_rank=128,
    index_n_heads=32,
    index_topk=32,
    first_k_dense_replace=1,
    max_position_embeddings=4096,
)

"""RunConfig: what the user asked for, frozen. Made from options, TOML and `--set`; nothing is written back into it.

What will happen is decided from it by `engine.plan.make_plan`. Imports no torch.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from echo_batch.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Size:
    """A pool size as asked: tokens per worker, bytes per worker, a percentage of the node's free memory, or auto."""

    kind: Literal["auto", "tokens", "bytes", "percent"]
    value: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InputConfig:
    paths: tuple[str, ...] = ()
    prompt_column: str | None = None
    prompt_template: str | None = None
    too_long: Literal["fail", "cut-head", "cut-middle", "cut-tail"] = "fail"
    limit: int | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    path: str | None = None
    format: Literal["parquet", "jsonl", "openai"] | None = None
    output_token_ids: bool = False
    max_error_rate: float = 0.0
    restart: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSourceConfig:
    """`path` is a local directory by the time a RunConfig exists (Hub ids are resolved at the CLI)."""

    path: str | None = None
    tokenizer: str | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    max_model_len: int | None = None
    trust_remote_code: bool = False
    num_layers: int | None = None
    """Only with load_format dummy: keep the first layers of the config."""
    rms_norm_eps_latent: float | None = None
    """Override of the eps of q_a/kv_a norms (spec section 3.1: transformers uses 1e-6 there)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    host_pool: Size = Size("auto")
    gpu_pool: Size = Size("auto")
    kv_cache_dtype: Literal["auto", "fp8", "bfloat16", "float32"] = "auto"
    offload: bool = True
    prefetch: Literal["auto", "off", "branch", "fused"] = "auto"
    residency: Literal["auto", "off"] = "auto"
    """auto: as long as all tokens fit the GPU pool, steps run without the cache manager."""
    poison: bool = False
    """Debug: freed host slots and evicted GPU rows are filled with NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    device: Literal["auto", "cpu", "cuda"] = "auto"
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    max_num_seqs: int | None = None
    gpu_memory_utilization: float = 0.9
    prefill_chunk_tokens: int | None = None
    """Tokens that go through one layer at a time; None lets the plan choose."""
    prefill_group_tokens: int | None = None
    """Tokens of all prompts that are prefilled together, layer by layer; None lets the plan choose."""
    lookahead_steps: int | None = None
    """Decode steps launched before the oldest one's tokens are read; None: 0 on CPU, 2 on GPU."""
    precompile: Literal["auto", "off"] = "auto"
    """auto: on a GPU, kernels are compiled in a thread while weights load (engine/precompile.py)."""
    schedule: str | None = None
    """record:FILE writes what the engine does; replay:FILE does it again and compares (docs/lossless.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportConfig:
    metrics_textfile: str | None = None
    heartbeat_seconds: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One job, whole. `explicit_sampling` names the sampling fields that the user set on purpose (option, --set or
    --config), which therefore win over the model's generation_config.json (docs/input-output.md, precedence)."""

    input: InputConfig = InputConfig()
    output: OutputConfig = OutputConfig()
    model: ModelSourceConfig = ModelSourceConfig()
    cache: CacheConfig = CacheConfig()
    engine: EngineConfig = EngineConfig()
    sampling: SamplingParams = SamplingParams()
    report: ReportConfig = ReportConfig()
    explicit_sampling: frozenset[str] = frozenset()

    @property
    def run_dir(self) -> Path:
        """The run directory beside the output."""
        assert self.output.path is not None
        return Path(self.output.path + ".run")

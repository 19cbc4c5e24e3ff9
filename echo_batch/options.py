"""The options of `run` and `plan`, once: a dataclass that typer turns into flags and `make_config` into a RunConfig.

An option that was not given is None, so that it never hides what `--set` or a TOML file says. Imports no torch.
"""

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import typer

from echo_batch.config import RunConfig
from echo_batch.config_file import make_config

Result = TypeVar("Result")


def _option(panel: str, text: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar, show_default=False)


_IO, _MODEL, _CACHE, _ENGINE, _SAMPLING, _CONFIG = (
    "Input and output",
    "Model",
    "KV cache",
    "Engine",
    "Sampling",
    "Configuration",
)

OnOff = Literal["on", "off"]


@dataclass(kw_only=True)
class JobOptions:
    """What stood on the command line, field by field; `CONFIG_KEYS` says where each goes."""

    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="INPUT", help="Parquet or JSON Lines files, directories, globs or URLs.", show_default=False
        ),
    ] = None
    more_inputs: Annotated[
        list[str] | None, _option(_IO, "The same as INPUT; may be repeated.", "-i", "--input", metavar="PATH")
    ] = None
    output: Annotated[
        str | None,
        _option(_IO, "Output file; default: ./<input>.out.parquet. Its suffix decides the form.", "-o", "--output"),
    ] = None
    format: Annotated[Literal["parquet", "jsonl", "openai"] | None, _option(_IO, "Form of the output.", "--format")] = (
        None
    )
    prompt_column: Annotated[str | None, _option(_IO, "Column that holds the prompt.", "--prompt-column")] = None
    prompt_template: Annotated[
        str | None,
        _option(_IO, "Prompt made of columns, such as '{context}\\n\\n{input}', or @file.", "--prompt-template"),
    ] = None
    too_long: Annotated[
        Literal["fail", "cut-head", "cut-middle", "cut-tail"] | None,
        _option(_IO, "Prompts over the context limit: fail the row (default) or cut that part.", "--too-long"),
    ] = None
    limit: Annotated[int | None, _option(_IO, "Only the first N rows.", "--limit", metavar="N")] = None
    output_token_ids: Annotated[
        bool | None, _option(_IO, "Add the column generated_token_ids.", "--output-token-ids")
    ] = None
    max_error_rate: Annotated[
        float | None, _option(_IO, "Share of rows that may fail before the exit code is 10.", "--max-error-rate")
    ] = None
    restart: Annotated[
        bool | None, _option(_IO, "Throw away an earlier run of this output and start again.", "--restart")
    ] = None

    model: Annotated[
        str | None, _option(_MODEL, "Checkpoint directory, Hub id, or 'demo' for the bundled model.", "--model")
    ] = None
    tokenizer: Annotated[
        str | None, _option(_MODEL, "Directory of the tokenizer, if not the model's.", "--tokenizer")
    ] = None
    max_model_len: Annotated[
        int | None, _option(_MODEL, "Context limit in tokens, prompt and output together.", "--max-model-len")
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"] | None,
        _option(_MODEL, "Compute type; auto: bfloat16 on GPUs, float32 on CPUs.", "--dtype"),
    ] = None
    load_format: Annotated[
        Literal["safetensors", "dummy"] | None,
        _option(_MODEL, "dummy: random weights from config.json alone, to measure speed.", "--load-format"),
    ] = None
    trust_remote_code: Annotated[
        bool | None,
        _option(_MODEL, "Allow code that came with the checkpoint.", "--trust-remote-code"),
    ] = None
    chat_template_kwargs: Annotated[
        str | None,
        _option(_MODEL, "Values for the chat template, such as '{\"thinking\": true}'.", "--chat-template-kwargs"),
    ] = None

    host_pool: Annotated[
        str | None, _option(_CACHE, "KV cache in host memory, per worker: 1.8M, 80GiB, 60% or auto.", "--host-pool")
    ] = None
    gpu_pool: Annotated[
        str | None, _option(_CACHE, "Tokens cached on the GPU, per worker: 200K, 8GiB or auto.", "--gpu-pool")
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8", "bfloat16", "float32"] | None,
        _option(_CACHE, "Type of the KV cache; auto: fp8 on Hopper and newer.", "--kv-cache-dtype"),
    ] = None
    offload: Annotated[OnOff | None, _option(_CACHE, "off: the whole KV cache stays on the GPU.", "--offload")] = None
    prefetch: Annotated[
        Literal["auto", "off", "branch", "fused"] | None,
        _option(_CACHE, "Copy likely tokens to the GPU while the indexer scores; never changes results.", "--prefetch"),
    ] = None

    device: Annotated[
        Literal["auto", "cpu", "cuda"] | None,
        _option(_ENGINE, "Where to run; auto takes a GPU if there is one.", "--device"),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        _option(_ENGINE, "Share of GPU memory that may be used; default 0.9.", "--gpu-memory-utilization"),
    ] = None
    max_num_seqs: Annotated[
        int | None, _option(_ENGINE, "Most requests in a batch, per worker.", "--max-num-seqs", metavar="N")
    ] = None
    data_parallel_size: Annotated[
        int | None,
        _option(_ENGINE, "Workers, one GPU each.", "--dp", "-dp", "--data-parallel-size", metavar="N"),
    ] = None
    tensor_parallel_size: Annotated[
        int | None,
        _option(
            _ENGINE, "Only 1: a latent KV cache cannot be split by heads.", "-tp", "--tensor-parallel-size", metavar="N"
        ),
    ] = None

    schedule: Annotated[
        str | None,
        _option(
            _ENGINE,
            "record:FILE writes every batch and its results; replay:FILE repeats them bit by bit or exits with 11.",
            "--schedule",
            metavar="MODE:FILE",
        ),
    ] = None

    max_tokens: Annotated[
        int | None, _option(_SAMPLING, "Most tokens to generate per row; default 2048.", "--max-tokens")
    ] = None
    temperature: Annotated[float | None, _option(_SAMPLING, "0 is greedy.", "--temperature")] = None
    top_p: Annotated[float | None, _option(_SAMPLING, "Nucleus sampling; 1 is off.", "--top-p")] = None
    top_k: Annotated[int | None, _option(_SAMPLING, "Sample among the k likeliest; 0 is off.", "--top-k")] = None
    min_p: Annotated[
        float | None, _option(_SAMPLING, "Drop tokens below this share of the likeliest; 0 is off.", "--min-p")
    ] = None
    seed: Annotated[
        int | None, _option(_SAMPLING, "With row and position it makes every random number; default 0.", "--seed")
    ] = None
    stop: Annotated[
        list[str] | None, _option(_SAMPLING, "End a row at this text; may be repeated.", "--stop", metavar="TEXT")
    ] = None
    ignore_eos: Annotated[bool | None, _option(_SAMPLING, "Go on after the end-of-text token.", "--ignore-eos")] = None
    logprobs: Annotated[
        int | None,
        _option(_SAMPLING, "Log-probabilities of the chosen and the N likeliest tokens.", "--logprobs", metavar="N"),
    ] = None

    config: Annotated[
        str | None,
        _option(_CONFIG, "TOML file with any setting; options and --set win over it.", "--config", metavar="FILE"),
    ] = None
    set: Annotated[
        list[str] | None,
        _option(
            _CONFIG,
            "Any setting, such as engine.prefill_chunk_tokens=512; may be repeated.",
            "--set",
            metavar="KEY=VALUE",
        ),
    ] = None
    metrics_textfile: Annotated[
        str | None, _option(_CONFIG, "Keep Prometheus metrics in this file.", "--metrics-textfile", metavar="FILE")
    ] = None


CONFIG_KEYS = {
    "output": "output.path",
    "format": "output.format",
    "prompt_column": "input.prompt_column",
    "prompt_template": "input.prompt_template",
    "too_long": "input.too_long",
    "limit": "input.limit",
    "output_token_ids": "output.output_token_ids",
    "max_error_rate": "output.max_error_rate",
    "restart": "output.restart",
    "model": "model.path",
    "tokenizer": "model.tokenizer",
    "max_model_len": "model.max_model_len",
    "dtype": "model.dtype",
    "load_format": "model.load_format",
    "trust_remote_code": "model.trust_remote_code",
    "chat_template_kwargs": "input.chat_template_kwargs",
    "host_pool": "cache.host_pool",
    "gpu_pool": "cache.gpu_pool",
    "kv_cache_dtype": "cache.kv_cache_dtype",
    "offload": "cache.offload",
    "prefetch": "cache.prefetch",
    "device": "engine.device",
    "gpu_memory_utilization": "engine.gpu_memory_utilization",
    "max_num_seqs": "engine.max_num_seqs",
    "data_parallel_size": "engine.data_parallel_size",
    "tensor_parallel_size": "engine.tensor_parallel_size",
    "schedule": "engine.schedule",
    "max_tokens": "sampling.max_tokens",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "min_p": "sampling.min_p",
    "seed": "sampling.seed",
    "stop": "sampling.stop",
    "ignore_eos": "sampling.ignore_eos",
    "logprobs": "sampling.logprobs",
    "metrics_textfile": "report.metrics_textfile",
}
"""Field of JobOptions -> key of RunConfig. The rest (inputs, config, set) is joined below."""


def config_from_options(options: JobOptions, *, defaults: dict[str, Any] | None = None) -> RunConfig:
    """The RunConfig of a command line; `defaults` lie below every layer. Raises ConfigError."""
    values = {key: getattr(options, field) for field, key in CONFIG_KEYS.items()}
    # typer gives an empty list, not None, for a repeatable option that was not used.
    values = {key: value for key, value in values.items() if value is not None and value != []}
    inputs = [*(options.inputs or []), *(options.more_inputs or [])]
    if inputs:
        values["input.paths"] = inputs
    return make_config(values, set_items=options.set or (), config_file=options.config, defaults=defaults)


def with_output(config: RunConfig) -> RunConfig:
    """The same configuration with a path for the output; its form is `io.ownership.output_format`'s to tell."""
    path = config.output.path or default_output_path(config.input.paths, config.output.format)
    return dataclasses.replace(config, output=dataclasses.replace(config.output, path=path))


def default_output_path(inputs: tuple[str, ...], form: str | None) -> str:
    """`./<stem of the first input>.out.parquet` (or .jsonl); a directory or glob lends its last plain name."""
    name = "output"
    for part in reversed(PurePosixPath(inputs[0].split("://", 1)[-1]).parts):
        stem = part
        for suffix in (".gz", ".zst", ".parquet", ".jsonl", ".ndjson", ".json"):
            stem = stem.removesuffix(suffix)
        if stem and not set(stem) & set("*?[]") and stem not in ("/", ".", ".."):
            name = stem
            break
    return f"{name}.out.{'parquet' if form in (None, 'parquet') else 'jsonl'}"


def as_command(function: Callable[..., Result], **more: Any) -> Callable[..., Result]:
    """`function(options: JobOptions, **more)` as a function that typer can read: one parameter per option.

    `more` maps names of further parameters to their annotations (default None).
    """
    hints = get_type_hints(JobOptions, include_extras=True)
    names = [field.name for field in dataclasses.fields(JobOptions)]

    def command(**values: Any) -> Result:
        options = JobOptions(**{name: values.pop(name) for name in names})
        return function(options, **values)

    annotations = {name: hints[name] for name in names} | more
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__annotations__ = dict(annotations)
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in annotations.items()
        ]
    )
    return command

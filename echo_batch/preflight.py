"""What is known before anything is loaded: the model's description, the input's rows and tokens, and the plan.

`plan` and `run` go through the same functions, so what was planned is what runs. Imports no torch.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from echo_batch.config import RunConfig
from echo_batch.engine.hardware import Hardware
from echo_batch.engine.plan import InputStats, Plan, make_plan
from echo_batch.errors import ConfigError, ModelError
from echo_batch.io.chat import ChatEncoder, load_chat
from echo_batch.io.fingerprint import hash_json, tokenizer_fingerprint
from echo_batch.io.index import IndexProgress, RowIndex, build_index
from echo_batch.io.reader import Source
from echo_batch.io.requests import PromptLimits, RequestBuilder, base_sampling
from echo_batch.io.tokenizer import Tokenizer, load_tokenizer
from echo_batch.models.checkpoint import check_checkpoint
from echo_batch.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A checkpoint as far as it can be known without its weights."""

    config: ModelConfig
    tokenizer: Tokenizer | None
    tokenizer_path: Path
    generation_config: dict[str, Any]


def inspect_model(config: RunConfig, *, check_weights: bool = True) -> ModelFiles:
    """Read and check a checkpoint's descriptions: config, tensor names and shapes (`check_weights`), tokenizer.

    Raises ModelError naming the field or tensor, ConfigError without a model.
    """
    source = config.model
    if source.path is None:
        raise ConfigError("no model: give --model DIR or a Hub id")
    path = Path(source.path)
    if source.num_layers is not None and source.load_format != "dummy":
        raise ConfigError("model.num_layers cuts layers off, which only makes sense with --load-format dummy")
    model_config = ModelConfig.from_dir(path, num_layers=source.num_layers, latent_eps=source.rms_norm_eps_latent)
    if check_weights and source.load_format != "dummy":
        check_checkpoint(model_config, path)
    tokenizer_path = Path(source.tokenizer) if source.tokenizer is not None else path
    tokenizer = load_tokenizer(tokenizer_path)
    if tokenizer is None and source.tokenizer is not None:
        raise ModelError(f"--tokenizer {tokenizer_path}: no tokenizer.json there")
    return ModelFiles(
        config=model_config,
        tokenizer=tokenizer,
        tokenizer_path=tokenizer_path,
        generation_config=_generation_config(path),
    )


def make_chat(config: RunConfig, model: ModelFiles, *, now: datetime | None = None) -> ChatEncoder:
    """The chat encoder of this job; `now` is the date that templates may print. Raises ModelError, ConfigError."""
    return load_chat(
        model.tokenizer_path if model.tokenizer_path.is_dir() else model.tokenizer_path.parent,
        tokenizer=model.tokenizer,
        model_type=model.config.model_type,
        kwargs=config.input.chat_template_kwargs,
        trust_remote_code=config.model.trust_remote_code,
        now=now,
    )


def make_builder(
    config: RunConfig, model: ModelFiles, chat: ChatEncoder, *, context_tokens: int, is_openai: bool = False
) -> RequestBuilder:
    """The builder of requests of at most `context_tokens` tokens. Raises ConfigError, ModelError, InputError (options
    against the input)."""
    return RequestBuilder(
        config,
        model.tokenizer,
        chat,
        PromptLimits(context_tokens=context_tokens, vocab_size=model.config.vocab_size),
        generation_config=model.generation_config,
        is_openai=is_openai,
    )


def check_options(config: RunConfig, model: ModelFiles) -> None:
    """Raise now what the first request would: a bad template, chat options, generation_config (ConfigError,
    ModelError); and what would fail every row."""
    make_builder(config, model, make_chat(config, model), context_tokens=model.config.max_position_embeddings)
    if any(token >= model.config.vocab_size for token in config.sampling.stop_token_ids):
        raise ConfigError(f"sampling.stop_token_ids must be below the vocabulary size {model.config.vocab_size}")
    if config.sampling.stop and model.tokenizer is None:
        raise ConfigError("--stop: without a tokenizer there is no text to stop at; use sampling.stop_token_ids")


def read_input(
    config: RunConfig, model: ModelFiles, source: Source, builder: RequestBuilder, index_path: Path, context_tokens: int
) -> Iterator[IndexProgress]:
    """Pass over the input (already scanned): tokenize every row and write the index to `index_path`, with progress."""
    fingerprint = {
        "input": source.fingerprint(),
        "limit": config.input.limit,
        "tokenizer": tokenizer_fingerprint(model.tokenizer_path),
        "prompts": hash_json(
            [
                config.input.prompt_column,
                config.input.prompt_template,
                config.input.too_long,
                config.input.chat_template_kwargs,
                config.model.trust_remote_code,
            ]
        ),
        "sampling": hash_json(base_sampling(config, model.generation_config)),
        "context": context_tokens,
        "vocabulary": model.config.vocab_size,
    }
    yield from build_index(index_path, source, builder, fingerprint=fingerprint)


def input_stats(index: RowIndex) -> InputStats:
    """What the plan needs to know of the input."""
    totals = index.totals()
    return InputStats(
        num_rows=totals.num_rows,
        num_bad_rows=totals.num_rows - totals.num_good,
        prompt_tokens=totals.prompt_tokens,
        longest_prompt_tokens=totals.longest_prompt,
        longest_row_tokens=totals.longest_total,
        total_row_tokens=totals.total_blocks * 64,
    )


def plan_for(config: RunConfig, model: ModelFiles, hardware: Hardware, index: RowIndex | None) -> Plan:
    """The plan of a job, with or without an input."""
    return make_plan(model.config, config, hardware, None if index is None else input_stats(index))


def _generation_config(path: Path) -> dict[str, Any]:
    file = path / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: not readable as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{file}: expected a JSON object")
    return values

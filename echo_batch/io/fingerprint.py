"""What makes two jobs the same job: named parts, each a hash. Knows no run directory. Imports no torch.

A part changes when something in it can change the content of the output. Pool sizes, batch limits, devices, reports
and paths are in none, so that a job may be resumed on another machine with other pools.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echo_batch.config import RunConfig

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_SAMPLE_BYTES = 64 * 1024
_NUM_SAMPLES = 4


def config_as_dict(config: RunConfig) -> dict[str, Any]:
    """The configuration as plain JSON values (sets sorted, paths as text), for freezing and for naming changes."""
    return _plain(dataclasses.asdict(config))


def hash_json(value: Any) -> str:
    """16 hex digits of the SHA-256 of canonical JSON (sorted keys)."""
    text = json.dumps(_plain(value), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def job_fingerprint(
    config: RunConfig,
    *,
    model: str,
    tokenizer: str,
    input: Mapping[str, Any],
    precision: Mapping[str, Any] | None = None,
    output_format: str | None = None,
) -> dict[str, str]:
    """The fingerprint of a job: part name -> hash.

    `model` and `tokenizer` come from `model_fingerprint` and `tokenizer_fingerprint`, `input` from
    `Source.fingerprint()`. `precision` holds what "auto" became on this machine (dtype, KV format), where it matters.
    `output_format` is the resolved form of the output, else the option as asked.
    """
    source = config.model
    return {
        "model": hash_json(
            [model, source.dtype, source.load_format, source.num_layers, source.rms_norm_eps_latent]
            + [config.cache.kv_cache_dtype, precision or {}]
        ),
        "tokenizer": hash_json([tokenizer, source.trust_remote_code]),
        "sampling": hash_json([config.sampling, sorted(config.explicit_sampling)]),
        "prompt": hash_json(
            [
                config.input.prompt_column,
                config.input.prompt_template,
                config.input.too_long,
                config.input.chat_template_kwargs,
                source.max_model_len,
            ]
        ),
        "input": hash_json([dict(input), config.input.limit]),
        "output": hash_json([output_format or config.output.format, config.output.output_token_ids]),
    }


# Where in the configuration the options of each part are, to name what changed.
PART_OPTIONS = {
    "model": (
        "model.path",
        "model.dtype",
        "model.load_format",
        "model.num_layers",
        "model.rms_norm_eps_latent",
        "cache.kv_cache_dtype",
    ),
    "tokenizer": ("model.tokenizer", "model.trust_remote_code"),
    "sampling": ("sampling", "explicit_sampling"),
    "prompt": (
        "input.prompt_column",
        "input.prompt_template",
        "input.too_long",
        "input.chat_template_kwargs",
        "model.max_model_len",
    ),
    "input": ("input.paths", "input.limit"),
    "output": ("output.format", "output.output_token_ids"),
}


def describe_changes(
    old: Mapping[str, str],
    new: Mapping[str, str],
    old_config: Mapping[str, Any],
    new_config: Mapping[str, Any],
) -> str:
    """Names the parts that differ, each with its changed options: 'sampling (temperature 1.0 -> 0.0), input'."""
    before, after = _flatten(old_config), _flatten(new_config)
    words = []
    for part in sorted(old.keys() | new.keys()):
        if old.get(part) == new.get(part):
            continue
        prefixes = PART_OPTIONS.get(part, ())
        details = [
            f"{key.rpartition('.')[2]} {_short(before.get(key))} -> {_short(after.get(key))}"
            for key in sorted(before.keys() | after.keys())
            if before.get(key) != after.get(key) and any(key == p or key.startswith(p + ".") for p in prefixes)
        ]
        words.append(f"{part} ({', '.join(details)})" if details else part)
    return ", ".join(words)


def model_fingerprint(path: Path | str) -> str:
    """Identifies a checkpoint without reading it whole: its two config files, and of each safetensors file the size
    and some samples (the header first). A moved or copied checkpoint is the same; other weights of the same shape
    are not."""
    directory = Path(path)
    digest = hashlib.sha256()
    for name in ("config.json", "generation_config.json"):
        _add_file(digest, directory / name)
    for file in sorted(directory.glob("*.safetensors")):
        _add_samples(digest, file)
    return digest.hexdigest()[:16]


def tokenizer_fingerprint(path: Path | str | None) -> str:
    """Identifies a tokenizer and its chat template by the content of their files; "none" without a path."""
    if path is None:
        return "none"
    location = Path(path)
    digest = hashlib.sha256()
    if location.is_file():
        _add_file(digest, location)
    else:
        for name in TOKENIZER_FILES:
            _add_file(digest, location / name)
    return digest.hexdigest()[:16]


def _add_file(digest: "hashlib._Hash", path: Path) -> None:
    if path.is_file():
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)


def _add_samples(digest: "hashlib._Hash", path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name} {size}\n".encode())
    with path.open("rb") as file:
        for i in range(_NUM_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * i // (_NUM_SAMPLES - 1), os.SEEK_SET)
            digest.update(file.read(_SAMPLE_BYTES))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(_plain(item) for item in value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _short(value: Any) -> str:
    text = "none" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."

"""Makes a RunConfig from its layers: command-line options > `--set` (later wins) > `--config` TOML > defaults.

Every key is `section.field` of RunConfig. Knows nothing of typer; raises ConfigError naming the key and where it stood.
"""

import dataclasses
import difflib
import json
import threading
import tomllib
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from echo_batch.config import RunConfig, Size
from echo_batch.errors import ConfigError
from echo_batch.sizes import parse_size

_WORDS_FOR_BOOL = {
    "true": True,
    "on": True,
    "yes": True,
    "1": True,
    "false": False,
    "off": False,
    "no": False,
    "0": False,
}


def config_keys() -> dict[str, Any]:
    """Every key that TOML and `--set` accept ("cache.host_pool"), with its type."""
    sections = {n: t for n, t in get_type_hints(RunConfig).items() if dataclasses.is_dataclass(t)}
    return {f"{section}.{name}": t for section, cls in sections.items() for name, t in get_type_hints(cls).items()}


def make_config(
    options: Mapping[str, Any],
    *,
    set_items: Sequence[str] = (),
    config_file: str | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Join the layers into one frozen RunConfig.

    `options` maps keys to values given on the command line (never None); `set_items` are "section.key=value" texts in
    order; `defaults` replace built-in ones. Sampling fields given in any layer but `defaults` become
    `explicit_sampling`. Raises ConfigError: unknown key with its near matches, a value of the wrong type or out of
    range, an unreadable file.
    """
    asked: dict[str, Any] = {}
    if config_file is not None:
        asked |= _typed(_read_toml(config_file), where=config_file)
    for item in set_items:
        key, equals, text = item.partition("=")
        if not equals:
            raise ConfigError(
                f"--set {item}: write section.key=value, for example --set engine.prefill_chunk_tokens=512"
            )
        asked |= _typed({key.strip(): text.strip()}, where="--set")
    asked |= _typed(options, where="command line")
    explicit = frozenset(key.removeprefix("sampling.") for key in asked if key.startswith("sampling."))
    merged = _typed(defaults or {}, where="defaults") | asked
    if merged.get("sampling.top_k") == -1:  # off, as other engines say it
        merged["sampling.top_k"] = 0
    sections: dict[str, Any] = {}
    for section, cls in get_type_hints(RunConfig).items():
        if isinstance(cls, type) and dataclasses.is_dataclass(cls):
            prefix = section + "."
            values = {k.removeprefix(prefix): v for k, v in merged.items() if k.startswith(prefix)}
            try:
                sections[section] = cls(**values)
            except ValueError as error:
                raise ConfigError(f"{section}.{error}") from None
    config = RunConfig(**sections, explicit_sampling=explicit)
    _check_ranges(config)
    return config


def _read_toml(path: str) -> dict[str, Any]:
    """The file as a flat mapping of dotted keys."""
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not valid TOML: {error}") from None
    flat: dict[str, Any] = {}
    for name, table in tables.items():
        if isinstance(table, dict):
            flat |= {f"{name}.{key}": value for key, value in table.items()}
        else:
            flat[name] = table
    return flat


def _typed(values: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    keys = config_keys()
    result = {}
    for key, value in values.items():
        if key not in keys:
            raise ConfigError(f"{where}: unknown key {key!r}{_near(key, list(keys))}")
        try:
            result[key] = _coerce(keys[key], value, key)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{where}: {key}: {error}") from None
    return result


def _near(key: str, known: list[str]) -> str:
    """ "; did you mean ...?" for a misspelt key or one without its section."""
    field = key.rpartition(".")[2].replace("-", "_")
    close = [k for k in known if k.rpartition(".")[2] == field]
    close += difflib.get_close_matches(key.replace("-", "_"), known, n=3, cutoff=0.8)
    fields = {k.rpartition(".")[2]: k for k in known}
    close += [fields[f] for f in difflib.get_close_matches(field, fields, n=2, cutoff=0.8)]
    unique = list(dict.fromkeys(close))[:3]
    return f"; did you mean {' or '.join(unique)}?" if unique else "; docs/configuration.md lists them all"


def _coerce(expected: Any, value: Any, key: str) -> Any:
    """`value` (of TOML, of typer, or a text) as `expected`; raises ValueError saying what is wanted."""
    origin = get_origin(expected)
    if origin in (Union, types.UnionType):
        inner = [t for t in get_args(expected) if t is not type(None)]
        assert len(inner) == 1, key
        return None if isinstance(value, str) and value.lower() == "none" else _coerce(inner[0], value, key)
    if expected is Size:
        if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
            return parse_size(value, key)
        raise ValueError(f'a size must be a text such as "1.8M" or a number of tokens, got {value!r}')
    if origin is Literal:
        if value in get_args(expected):
            return value
        raise ValueError(f"must be one of {', '.join(get_args(expected))}, got {value!r}")
    if origin is tuple:
        return tuple(_coerce(get_args(expected)[0], item, key) for item in _items(value))
    if origin is dict:
        return _json_object(value)
    if expected is bool:
        word = str(value).lower()
        if word not in _WORDS_FOR_BOOL:
            raise ValueError(f"must be true or false, got {value!r}")
        return _WORDS_FOR_BOOL[word]
    if expected is str:
        if not isinstance(value, str):
            raise ValueError(f"must be a text, got {value!r}")
        return value
    return _number(expected, value)


def _number(expected: Any, value: Any) -> int | float:
    assert expected in (int, float), expected
    wanted = "a whole number" if expected is int else "a number"
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"must be {wanted}, got {value!r}")
    try:
        number = float(value) if expected is float else int(value)
    except (ValueError, OverflowError):  # the integer of an infinity
        raise ValueError(f"must be {wanted}, got {value!r}") from None
    if number != number or (isinstance(value, float) and number != value):
        raise ValueError(f"must be {wanted}, got {value!r}")
    return number


def _items(value: Any) -> Sequence[Any]:
    """A TOML array, or a text that is one, or one item alone."""
    if isinstance(value, str) and value.startswith("["):
        try:
            return list(tomllib.loads(f"x = {value}")["x"])
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"not a TOML array: {error}") from None
    return value if isinstance(value, (list, tuple)) else [value]


def _json_object(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f'not a JSON object such as {{"thinking": true}}: {error}') from None
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, got {value!r}")
    return value


def _check_ranges(config: RunConfig) -> None:
    """Ranges that types do not say; SamplingParams checks its own."""
    engine = config.engine
    if not config.cache.offload and config.cache.prefetch in ("branch", "fused"):
        raise ConfigError(f"cache.prefetch is {config.cache.prefetch}, but without offloading nothing is fetched")
    at_least_one = {
        "input.limit": config.input.limit,
        "model.max_model_len": config.model.max_model_len,
        "model.num_layers": config.model.num_layers,
        "engine.data_parallel_size": engine.data_parallel_size,
        "engine.max_num_seqs": engine.max_num_seqs,
        "engine.prefill_chunk_tokens": engine.prefill_chunk_tokens,
        "engine.prefill_group_tokens": engine.prefill_group_tokens,
    }
    for key, value in at_least_one.items():
        if value is not None and value < 1:
            raise ConfigError(f"{key} must be at least 1, got {value}")
    if config.model.max_model_len == 1:
        raise ConfigError("model.max_model_len must be at least 2: one token of prompt and one generated")
    if engine.tensor_parallel_size != 1:
        raise ConfigError(
            f"-tp {engine.tensor_parallel_size} is not offered: all heads share one latent KV cache, so every GPU of a "
            "tensor parallel group would hold a full copy. Use --dp: attention runs data-parallel, experts are spread"
        )
    if engine.lookahead_steps is not None and not 0 <= engine.lookahead_steps <= 8:
        raise ConfigError(f"engine.lookahead_steps must be between 0 and 8, got {engine.lookahead_steps}")
    if engine.schedule is not None and engine.schedule.partition(":")[0] not in ("record", "replay"):
        raise ConfigError(f"engine.schedule: write record:FILE or replay:FILE, not {engine.schedule!r}")
    if not 0.0 < engine.gpu_memory_utilization <= 1.0:
        raise ConfigError(f"engine.gpu_memory_utilization must be in (0, 1], got {engine.gpu_memory_utilization}")
    if not 0.0 <= config.output.max_error_rate <= 1.0:
        raise ConfigError(f"output.max_error_rate must be between 0 and 1, got {config.output.max_error_rate}")
    if not 0 < config.report.heartbeat_seconds <= threading.TIMEOUT_MAX:  # the most that a thread can wait
        raise ConfigError(
            f"report.heartbeat_seconds must be positive and finite, got {config.report.heartbeat_seconds}"
        )
    if config.model.num_layers is not None and config.model.load_format != "dummy":
        raise ConfigError("model.num_layers cuts a model short, which only makes sense with --load-format dummy")
    if config.input.prompt_column is not None and config.input.prompt_template is not None:
        raise ConfigError("give either a prompt column or a prompt template, not both")

"""Layers of a configuration, their precedence, and what is said about mistakes."""

import dataclasses
from pathlib import Path

import pytest

from echo_batch.config import RunConfig, Size
from echo_batch.config_file import config_keys, make_config
from echo_batch.errors import ConfigError


def toml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "job.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_nothing_asked_gives_the_defaults() -> None:
    assert make_config({}) == RunConfig()


def test_every_key_is_a_field_of_a_section() -> None:
    keys = config_keys()
    sections = [f for f in dataclasses.fields(RunConfig) if f.name != "explicit_sampling"]
    assert {k.split(".")[0] for k in keys} == {f.name for f in sections}
    assert "cache.host_pool" in keys and "sampling.stop_token_ids" in keys


def test_options_win_over_set_over_toml_over_defaults(tmp_path: Path) -> None:
    path = toml(tmp_path, "[sampling]\ntop_k = 1\ntop_p = 0.1\nmin_p = 0.1\n[engine]\ndata_parallel_size = 3\n")
    config = make_config(
        {"sampling.top_k": 3},
        set_items=["sampling.top_k=2", "sampling.top_p=0.2", "sampling.top_p=0.3"],
        config_file=path,
        defaults={"engine.data_parallel_size": 8, "engine.max_num_seqs": 5},
    )
    assert (config.sampling.top_k, config.sampling.top_p, config.sampling.min_p) == (3, 0.3, 0.1)
    assert (config.engine.data_parallel_size, config.engine.max_num_seqs) == (3, 5)
    assert config.explicit_sampling == {"top_k", "top_p", "min_p"}


def test_only_what_was_given_is_explicit_even_at_its_default() -> None:
    assert make_config({"sampling.temperature": 1.0}).explicit_sampling == {"temperature"}
    assert make_config({"cache.offload": "off"}).explicit_sampling == frozenset()


def test_values_of_every_type(tmp_path: Path) -> None:
    path = toml(
        tmp_path,
        """
        [input]
        paths = ["a.parquet", "b.parquet"]
        chat_template_kwargs = { thinking = true }
        [cache]
        host_pool = "1.8M"
        gpu_pool = 320
        offload = false
        [sampling]
        stop = ["x", "y"]
        stop_token_ids = [1, 2]
        temperature = 0
        """,
    )
    config = make_config({}, config_file=path)
    assert config.input.paths == ("a.parquet", "b.parquet")
    assert config.input.chat_template_kwargs == {"thinking": True}
    assert config.cache.host_pool == Size("tokens", 1_800_000) and config.cache.gpu_pool == Size("tokens", 320)
    assert config.cache.offload is False
    assert config.sampling.stop == ("x", "y") and config.sampling.stop_token_ids == (1, 2)
    assert config.sampling.temperature == 0.0


@pytest.mark.parametrize(
    ("item", "field", "value"),
    [
        ("cache.offload=off", "offload", False),
        ("cache.poison=true", "poison", True),
        ("cache.host_pool=60%", "host_pool", Size("percent", 60)),
        ("cache.kv_cache_dtype=fp8", "kv_cache_dtype", "fp8"),
    ],
)
def test_set_reads_text(item: str, field: str, value: object) -> None:
    assert getattr(make_config({}, set_items=[item]).cache, field) == value


def test_set_keeps_equals_signs_spaces_and_lists() -> None:
    config = make_config(
        {}, set_items=["input.prompt_template=a=b {x} ", 'sampling.stop=["a","b"]', "model.max_model_len=none"]
    )
    assert config.input.prompt_template == "a=b {x}"
    assert config.sampling.stop == ("a", "b")
    assert config.model.max_model_len is None


def test_top_k_is_off_at_minus_one_too() -> None:
    assert make_config({"sampling.top_k": -1}).sampling.top_k == 0


@pytest.mark.parametrize(
    ("item", "near"),
    [
        ("cache.hostpool=1M", "cache.host_pool"),
        ("host_pool=1M", "cache.host_pool"),
        ("host-pool=1M", "cache.host_pool"),
        ("engine.max_tokens=3", "sampling.max_tokens"),
        ("sampling.temprature=1", "sampling.temperature"),
        ("explicit_sampling=x", "docs/configuration.md"),
        ("zzz.qqq=1", "docs/configuration.md"),
    ],
)
def test_unknown_keys_name_their_neighbours(item: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config({}, set_items=[item])
    message = str(caught.value)
    assert f"unknown key {item.split('=')[0]!r}" in message and near in message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "text", ["[cache]\nhost_poool = 1", "[cash]\nhost_pool = 1", "host_pool = 1", "[cache]\n[cache.x]\ny=1"]
)
def test_unknown_toml_keys_are_errors_naming_the_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"job\.toml: unknown key"):
        make_config({}, config_file=toml(tmp_path, text))


@pytest.mark.parametrize(
    "item",
    [
        "sampling.max_tokens=x",
        "sampling.max_tokens=1.5",
        "sampling.max_tokens=0",
        "sampling.temperature=-1",
        "sampling.temperature=nan",
        "sampling.top_p=0",
        "sampling.top_k=-2",
        "sampling.top_k=2147483648",
        "cache.offload=maybe",
        "cache.prefetch=fast",
        "cache.host_pool=lots",
        "engine.data_parallel_size=0",
        "engine.tensor_parallel_size=2",
        "engine.gpu_memory_utilization=1.5",
        "engine.lookahead_steps=-1",
        "engine.max_num_seqs=0",
        "input.limit=0",
        "input.chat_template_kwargs=[1]",
        "input.chat_template_kwargs={",
        "model.num_layers=3",
        "model.max_model_len=1",
        "output.max_error_rate=2",
        "report.heartbeat_seconds=0",
        "report.heartbeat_seconds=inf",
        "report.heartbeat_seconds=1e12",
        "sampling.stop=[",
        "nothing",
    ],
)
def test_bad_values_name_their_key(item: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config({}, set_items=[item])
    key = item.split("=")[0]
    assert key in str(caught.value) or ("tensor" in key and "-tp 2" in str(caught.value))


@pytest.mark.parametrize(
    "text",
    [
        "[sampling]\nmax_tokens = true",
        "[sampling]\nmax_tokens = inf",
        "[sampling]\nstop = [1]",
        "[input]\nprompt_column = 3",
        "[cache]\nhost_pool = 1.5",
    ],
)
def test_toml_types_are_checked(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        make_config({}, config_file=toml(tmp_path, text))


def test_unreadable_files_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        make_config({}, config_file=str(tmp_path / "missing.toml"))
    with pytest.raises(ConfigError, match="not valid TOML"):
        make_config({}, config_file=toml(tmp_path, "[cache\n"))
    with pytest.raises(ConfigError):
        make_config({}, config_file=str(tmp_path))


def test_prompt_column_and_template_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="not both"):
        make_config({"input.prompt_column": "a", "input.prompt_template": "{a}"})

"""The options are few and frozen; each has one place in the configuration."""

import dataclasses
from typing import Any, get_type_hints

import pytest

from echo_batch.config_file import config_keys, make_config
from echo_batch.options import CONFIG_KEYS, JobOptions, config_from_options, default_output_path, with_output

RUN_OPTIONS = """
    -i/--input -o/--output --format --prompt-column --prompt-template --too-long --limit --output-token-ids
    --max-error-rate --restart
    --model --tokenizer --max-model-len --dtype --load-format --trust-remote-code --chat-template-kwargs
    --host-pool --gpu-pool --kv-cache-dtype --offload --prefetch
    --device --gpu-memory-utilization --max-num-seqs --dp/-dp/--data-parallel-size -tp/--tensor-parallel-size
    --schedule
    --max-tokens --temperature --top-p --top-k --min-p --seed --stop --ignore-eos --logprobs
    --config --set --metrics-textfile
""".split()


def names(field: str) -> tuple[str, ...]:
    (info,) = get_type_hints(JobOptions, include_extras=True)[field].__metadata__
    # typer takes the first name of an Annotated option as its "default".
    first = [] if info.default is ... else [info.default]
    return (*first, *(info.param_decls or ()))


def test_options_are_frozen() -> None:
    """Adding one is a decision: everything else has a place in TOML and --set already."""
    fields = [f.name for f in dataclasses.fields(JobOptions) if f.name != "inputs"]
    assert ["/".join(names(field)) for field in fields] == RUN_OPTIONS
    assert len(fields) <= 40


def test_every_option_has_its_place() -> None:
    fields = {f.name for f in dataclasses.fields(JobOptions)}
    assert set(CONFIG_KEYS) == fields - {"inputs", "more_inputs", "config", "set"}
    assert set(CONFIG_KEYS.values()) <= set(config_keys())
    assert len(set(CONFIG_KEYS.values())) == len(CONFIG_KEYS)


def test_no_option_has_a_default_of_its_own() -> None:
    assert all(f.default is None for f in dataclasses.fields(JobOptions))
    assert config_from_options(JobOptions()) == make_config({})


@pytest.mark.parametrize(
    ("inputs", "form", "path"),
    [
        (("data/rows.parquet",), None, "rows.out.parquet"),
        (("rows.jsonl.gz",), None, "rows.out.parquet"),
        (("rows.json",), "jsonl", "rows.out.jsonl"),
        (("a.jsonl", "b.jsonl"), "openai", "a.out.jsonl"),
        (("s3://bucket/dir/part-0.parquet",), None, "part-0.out.parquet"),
        (("data/shards",), None, "shards.out.parquet"),
        (("data/shards/*.parquet",), None, "shards.out.parquet"),
        (("*.parquet",), None, "output.out.parquet"),
        (("./.",), None, "output.out.parquet"),
        (("v1.5",), None, "v1.5.out.parquet"),
    ],
)
def test_default_output(inputs: tuple[str, ...], form: Any, path: str) -> None:
    assert default_output_path(inputs, form) == path
    options = JobOptions(inputs=list(inputs), format=form)
    assert with_output(config_from_options(options)).output.path == path


def test_output_asked_for_is_kept() -> None:
    assert with_output(config_from_options(JobOptions(inputs=["a"], output="x/b.jsonl"))).output.path == "x/b.jsonl"

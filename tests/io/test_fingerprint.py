import dataclasses
import json
import shutil

from echo_batch.config import CacheConfig, EngineConfig, InputConfig, ModelSourceConfig, OutputConfig, RunConfig, Size
from echo_batch.io.fingerprint import (
    config_as_dict,
    describe_changes,
    job_fingerprint,
    model_fingerprint,
    tokenizer_fingerprint,
)
from echo_batch.request import SamplingParams

BASE = RunConfig()


def fingerprint(config=BASE, model="m", tokenizer="t", input=None, **kwargs):
    return job_fingerprint(config, model=model, tokenizer=tokenizer, input=input or {"files": ["a"]}, **kwargs)


def changed(**kwargs):
    before, after = fingerprint(), fingerprint(**kwargs)
    assert before.keys() == after.keys()
    return {part for part in before if before[part] != after[part]}


def test_each_part_changes_with_what_changes_the_output():
    replace = dataclasses.replace
    assert changed() == set()
    assert changed(model="m2") == {"model"}
    assert changed(tokenizer="t2") == {"tokenizer"}
    assert changed(input={"files": ["b"]}) == {"input"}
    assert changed(precision={"kv": "fp8"}) == {"model"}
    assert changed(output_format="jsonl") == {"output"}
    assert changed(config=replace(BASE, model=ModelSourceConfig(dtype="float32"))) == {"model"}
    assert changed(config=replace(BASE, model=ModelSourceConfig(max_model_len=5))) == {"prompt"}
    assert changed(config=replace(BASE, cache=CacheConfig(kv_cache_dtype="fp8"))) == {"model"}
    assert changed(config=replace(BASE, sampling=SamplingParams(temperature=0.5))) == {"sampling"}
    assert changed(config=replace(BASE, explicit_sampling=frozenset({"top_p"}))) == {"sampling"}
    assert changed(config=replace(BASE, input=InputConfig(prompt_column="q"))) == {"prompt"}
    assert changed(config=replace(BASE, input=InputConfig(too_long="cut-head"))) == {"prompt"}
    assert changed(config=replace(BASE, input=InputConfig(chat_template_kwargs={"thinking": True}))) == {"prompt"}
    assert changed(config=replace(BASE, input=InputConfig(limit=7))) == {"input"}
    assert changed(config=replace(BASE, output=OutputConfig(output_token_ids=True))) == {"output"}


def test_pools_devices_places_and_tolerance_change_nothing():
    other = RunConfig(
        cache=CacheConfig(host_pool=Size("tokens", 4096), gpu_pool=Size("bytes", 1e9), offload=False, poison=True),
        engine=EngineConfig(device="cpu", max_num_seqs=3, prefill_chunk_tokens=64),
        output=OutputConfig(path="elsewhere.parquet", max_error_rate=0.5, restart=True),
        model=ModelSourceConfig(path="/another/copy", tokenizer="/another"),
        input=InputConfig(paths=("x",)),
    )
    assert changed(config=other) == set()


def test_the_frozen_config_is_json_and_stable():
    config = RunConfig(explicit_sampling=frozenset({"top_p", "seed"}), sampling=SamplingParams(stop=("\n",)))
    frozen = config_as_dict(config)
    assert frozen == json.loads(json.dumps(frozen))
    assert frozen["explicit_sampling"] == ["seed", "top_p"]


def test_describe_changes_names_parts_and_options():
    old = RunConfig(sampling=SamplingParams(temperature=1.0), cache=CacheConfig(host_pool=Size("auto")))
    new = RunConfig(sampling=SamplingParams(temperature=0.0), cache=CacheConfig(host_pool=Size("tokens", 64)))
    text = describe_changes(
        fingerprint(old), fingerprint(new, input={"files": ["b"]}), config_as_dict(old), config_as_dict(new)
    )
    assert text == "input, sampling (temperature 1.0 -> 0.0)"


def test_model_fingerprint_sees_weights_and_config_but_not_the_place(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    weights = bytearray(1_000_000)
    (directory / "model.safetensors").write_bytes(weights)
    first = model_fingerprint(directory)

    shutil.copytree(directory, tmp_path / "copy")
    assert model_fingerprint(tmp_path / "copy") == first

    weights[-1] = 1
    (directory / "model.safetensors").write_bytes(weights)
    second = model_fingerprint(directory)
    (directory / "config.json").write_text('{"a": 1}')
    third = model_fingerprint(directory)
    (directory / "README.md").write_text("hi")
    assert len({first, second, third}) == 3
    assert model_fingerprint(directory) == third


def test_tokenizer_fingerprint_of_directory_file_and_nothing(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    first = tokenizer_fingerprint(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("x")
    assert tokenizer_fingerprint(tmp_path) != first
    assert tokenizer_fingerprint(tmp_path / "tokenizer.json") == first
    assert tokenizer_fingerprint(None) == "none"

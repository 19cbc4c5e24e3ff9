"""`echo-batch bench`: measurements on this machine. Imports no torch before a command runs."""

import json
from typing import Annotated, Literal

import typer
from rich.console import Console

from echo_batch.errors import EchoBatchError
from echo_batch.sizes import parse_size

LoadFormat = Annotated[Literal["safetensors", "dummy"], typer.Option(help="Where the weights come from.")]
Routing = Annotated[Literal["uniform", "model"], typer.Option(help="uniform: independent experts for every token.")]
OnOff = Literal["on", "off"]
Device = Annotated[Literal["cuda", "cpu"], typer.Option(help="Where to run.")]
Dtype = Annotated[Literal["bfloat16", "float32"], typer.Option(help="What is computed in.")]

app = typer.Typer(help="Measure this machine; see docs/benchmarks.md.", no_args_is_help=True)


@app.callback()
def _bench() -> None:
    """Measure this machine; see docs/benchmarks.md."""


@app.command()
def decode(
    model: Annotated[str, typer.Option(help="Directory with config.json.")],
    layers: Annotated[int | None, typer.Option(help="Keep the first layers only (dummy weights).")] = None,
    load_format: LoadFormat = "dummy",
    context: Annotated[str, typer.Option(help="Tokens of context per row; 32K is 32,768 here.")] = "32K",
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "16,32,64",
    gpu_pool: Annotated[str, typer.Option(help="GPU pool in tokens.")] = "110K",
    host_pool: Annotated[str, typer.Option(help="Host pool in tokens.")] = "900K",
    steps: Annotated[int, typer.Option(min=2, help="Steps that are timed.")] = 200,
    routing: Routing = "uniform",
    locality: Annotated[float | None, typer.Option(help="AR(1) factor of the indexer's queries, such as 0.97.")] = None,
    ep_slice: Annotated[int, typer.Option(min=1, help="Be one worker of so many that share the experts.")] = 1,
    offload: Annotated[OnOff, typer.Option(help="off: everything stays on the GPU.")] = "on",
    residency: Annotated[
        Literal["auto", "off"], typer.Option(help="auto: no cache manager while everything fits the GPU pool.")
    ] = "auto",
    prefetch: Annotated[
        Literal["off", "branch", "fused"], typer.Option(help="Copy likely tokens while the indexer scores.")
    ] = "off",
    device: Device = "cuda",
    dtype: Dtype = "bfloat16",
    seed: Annotated[int, typer.Option()] = 0,
    json_path: Annotated[str | None, typer.Option("--json", help="Write the result here.")] = None,
) -> None:
    """Time of decode steps with synthetic contexts, without prefill."""
    from echo_batch.bench.decode import DecodeBench, run_decode_bench, write_json

    try:
        if prefetch != "off" and offload == "off":
            raise typer.BadParameter("--prefetch needs --offload on")
        options = DecodeBench(
            model=model,
            num_layers=layers,
            load_format=load_format,
            context=_context_tokens(context),
            batches=tuple(int(b) for b in batch.split(",")),
            gpu_tokens=_pool_tokens(gpu_pool, "--gpu-pool"),
            host_tokens=_pool_tokens(host_pool, "--host-pool"),
            steps=steps,
            routing=routing,
            locality=locality,
            ep_slice=ep_slice,
            offload=offload == "on",
            residency=residency == "auto",
            prefetch=prefetch,
            device=device,
            dtype=dtype,
            seed=seed,
        )
        result = run_decode_bench(options)
    except EchoBatchError as error:
        Console(stderr=True).print(f"error: {error}", soft_wrap=True, highlight=False, markup=False)
        raise typer.Exit(error.exit_code) from error
    write_json(result, json_path)
    shown = (
        "batch",
        "resident",
        "step_ms",
        "tok_s",
        "hit_rate",
        "recalled_rows_per_step",
        "distinct_experts_per_layer",
    )
    for case in result["cases"]:
        print(json.dumps({key: case[key] for key in shown}))


@app.command()
def prefill(
    model: Annotated[str, typer.Option(help="Directory with config.json.")],
    layers: Annotated[int | None, typer.Option(help="Keep the first layers only (dummy weights).")] = None,
    load_format: LoadFormat = "dummy",
    context: Annotated[str, typer.Option(help="Tokens per prompt; 32K is 32,768 here.")] = "32K",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts that are prefilled.")] = 24,
    prefix: Annotated[str, typer.Option(help="All prompts begin with the same so many tokens.")] = "0",
    chunk: Annotated[str, typer.Option(help="Tokens that the experts see at once.")] = "16K",
    slice_: Annotated[str, typer.Option("--slice", help="Tokens inside attention at once.")] = "4K",
    group: Annotated[str, typer.Option(help="Prompt tokens that go through a layer before the next.")] = "64K",
    streamed: Annotated[
        float, typer.Option(help="Prefix tokens read from the host under the compute of one token; 0: selected only.")
    ] = 200.0,
    gpu_pool: Annotated[str, typer.Option(help="GPU pool in tokens.")] = "110K",
    host_pool: Annotated[
        str | None, typer.Option(help="Host pool in tokens; what the prompts need if left out.")
    ] = None,
    routing: Routing = "uniform",
    ep_slice: Annotated[int, typer.Option(min=1, help="Be one worker of so many that share the experts.")] = 1,
    offload: Annotated[OnOff, typer.Option(help="off: everything stays on the GPU.")] = "on",
    device: Device = "cuda",
    dtype: Dtype = "bfloat16",
    seed: Annotated[int, typer.Option()] = 0,
    json_path: Annotated[str | None, typer.Option("--json", help="Write the result here.")] = None,
) -> None:
    """Time of prefilling random prompts, by kernel, with and without host writes."""
    from echo_batch.bench.decode import write_json
    from echo_batch.bench.prefill import PrefillBench, run_prefill_bench

    try:
        options = PrefillBench(
            model=model,
            num_layers=layers,
            load_format=load_format,
            context=_context_tokens(context),
            prompts=prompts,
            prefix=_context_tokens(prefix),
            chunk=_context_tokens(chunk),
            slice=_context_tokens(slice_),
            group=_context_tokens(group),
            streamed_per_token=streamed,
            gpu_tokens=_pool_tokens(gpu_pool, "--gpu-pool"),
            host_tokens=None if host_pool is None else _pool_tokens(host_pool, "--host-pool"),
            routing=routing,
            ep_slice=ep_slice,
            offload=offload == "on",
            device=device,
            dtype=dtype,
            seed=seed,
        )
        result = run_prefill_bench(options)
    except EchoBatchError as error:
        Console(stderr=True).print(f"error: {error}", soft_wrap=True, highlight=False, markup=False)
        raise typer.Exit(error.exit_code) from error
    write_json(result, json_path)
    print(json.dumps({key: value for key, value in result.items() if key not in ("kernels", "options", "versions")}))


@app.command()
def load(
    model: Annotated[str, typer.Option(help="Directory with config.json.")],
    directory: Annotated[str, typer.Option(help="The checkpoint is written here if it is not there yet.")],
    layers: Annotated[int | None, typer.Option(help="Keep the first layers only.")] = 3,
    device: Device = "cuda",
    json_path: Annotated[str | None, typer.Option("--json", help="Write the result here.")] = None,
) -> None:
    """Speed of loading a made-up checkpoint, beside plain reads of the same files."""
    from echo_batch.bench.decode import write_json
    from echo_batch.bench.load import LoadBench, run_load_bench

    try:
        options = LoadBench(model=model, num_layers=layers, directory=directory, device=device)
        result = run_load_bench(options)
    except EchoBatchError as error:
        Console(stderr=True).print(f"error: {error}", soft_wrap=True, highlight=False, markup=False)
        raise typer.Exit(error.exit_code) from error
    write_json(result, json_path)
    for run in result["runs"]:
        print(json.dumps(run))


def _context_tokens(text: str) -> int:
    """Tokens of a context; K is 1,024 in benchmarks, as in the papers they are compared with."""
    return int(text[:-1]) * 1024 if text[-1:] in "kK" else int(text)


def _pool_tokens(text: str, option: str) -> int:
    size = parse_size(text, option)
    if size.kind != "tokens":
        raise typer.BadParameter(f"{option} {text}: give tokens, such as 110K")
    return int(size.value)

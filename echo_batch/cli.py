"""The command line: `echo-batch run` and `echo-batch plan`. Every way out has a documented exit code.

Imports no torch (help and usage errors are instant); the job is imported by the command that needs it.
"""

import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from echo_batch import __version__
from echo_batch.bench.cli import app as bench_app
from echo_batch.config import RunConfig
from echo_batch.errors import ConfigError, EchoBatchError
from echo_batch.hub import DEMO_MODEL, resolve_model
from echo_batch.options import JobOptions, as_command, config_from_options, with_output
from echo_batch.signals import interruptible
from echo_batch.sizes import parse_bytes

EXIT_BUG = 1
EXIT_INTERRUPTED = 75
LOG_NAME = "echo-batch.log"
"""In the run directory: what the terminal is spared, such as the traceback of a bug."""

app = typer.Typer(
    name="echo-batch",
    help="Offline batch inference for sparse-attention LLMs: prompts from a file, outputs to a file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point of the `echo-batch` command."""
    # Set before torch loads its OpenMP: threads that spin while they wait make a CPU run many times slower as soon as
    # anything else wants the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _open_closed_streams()
    app()


def _open_closed_streams() -> None:
    """Points standard streams that the caller has closed (`2>&-`) to nowhere: Python has None for them, and the next
    file that is opened would get their number, and with it what C libraries print."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            torch_version = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            torch_version = "not installed"
        print(f"echo-batch {__version__} (Python {platform.python_version()}, torch {torch_version})")
        raise typer.Exit(0)


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show versions and exit.")
    ] = False,
) -> None:
    pass


def run(options: JobOptions) -> None:
    """Run a job: read prompts, generate, write the output. The same command again resumes it.

    Exit codes: 0 done; 10 done, but too many rows failed; 11 a replayed schedule gave other results; 2 bad option,
    configuration or model, or a plan that does not fit; 65 unusable input; 66 input missing; 73 output not writable; 75
    interrupted, run again to resume; 1 a bug.
    """
    run_dir: Path | None = None
    try:
        config = config_from_options(options)
        if not config.input.paths:
            raise ConfigError("no input: echo-batch run INPUT --model DIR")
        if config.engine.data_parallel_size > 1:
            raise ConfigError(
                f"--dp {config.engine.data_parallel_size}: this release runs one worker; "
                "`echo-batch plan --dp` computes larger machines"
            )
        config = with_output(config)
        run_dir = config.run_dir
        with interruptible():
            config = _with_model(config, weights=True)
            from echo_batch.job import run_job

            code = run_job(config)
    except (Exception, KeyboardInterrupt) as error:
        code = _report(error, run_dir)
    raise typer.Exit(code)


def plan(options: JobOptions, *, json_output: bool | None, hardware: str | None, host_memory: str | None) -> None:
    """Show what a run would do, without loading the model: memory, limits, and what does not fit.

    Exit codes: 0 it fits; 2 it does not, or a bad option; 65, 66 input unusable or missing; 1 a bug.
    """
    try:
        code = _plan(options, json_output=bool(json_output), hardware_name=hardware, host_memory=host_memory)
    except (Exception, KeyboardInterrupt) as error:
        code = _report(error, None)
    raise typer.Exit(code)


def _plan(options: JobOptions, *, json_output: bool, hardware_name: str | None, host_memory: str | None) -> int:
    from echo_batch.engine.hardware import detect_hardware, parse_hardware
    from echo_batch.engine.plan import make_plan
    from echo_batch.engine.plan_table import plan_to_dict, print_plan
    from echo_batch.models.config import ModelConfig

    host_bytes = None if host_memory is None else parse_bytes(host_memory, "--host-memory")
    if hardware_name is not None:
        hardware = parse_hardware(hardware_name, host_bytes)
        # A plan for a machine that is named uses all of it unless --dp says otherwise.
        config = config_from_options(options, defaults={"engine.data_parallel_size": hardware.num_devices})
    else:
        config = config_from_options(options)
        hardware = detect_hardware(config.engine.device, host_bytes=host_bytes)
    config = _with_model(config, weights=False)
    assert config.model.path is not None
    if config.input.paths:
        from echo_batch.job import plan_job

        result = plan_job(with_output(config), hardware)
    else:
        model = ModelConfig.from_dir(
            config.model.path, num_layers=config.model.num_layers, latent_eps=config.model.rms_norm_eps_latent
        )
        result = make_plan(model, config, hardware, None)
    if json_output:
        print(json.dumps(plan_to_dict(result), indent=2))
    else:
        print_plan(result, Console())
    return 0 if result.fits else ConfigError.exit_code


def _with_model(config: RunConfig, *, weights: bool) -> RunConfig:
    """The configuration with `model.path` a local directory.

    Without --model a terminal gets the demo model and a line saying so; a night job must not get it unasked.
    """
    name = config.model.path
    if name is None:
        if not sys.stderr.isatty():
            raise ConfigError("no model: give --model DIR (or --model demo for the bundled demo model)")
        _console().print(
            Text("no --model: using the bundled demo model, which is a toy. Give --model DIR for real work.", "yellow")
        )
        name = DEMO_MODEL
    trust = config.model.trust_remote_code
    with_weights = weights and config.model.load_format != "dummy"
    path = resolve_model(name, weights=with_weights, trust_remote_code=trust)
    return replace(config, model=replace(config.model, path=path))


def _report(error: Exception | KeyboardInterrupt, run_dir: Path | None) -> int:
    """Say in one line what ended the command; returns the exit code."""
    if isinstance(error, EchoBatchError):
        _print_error(str(error))
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        _print_error("interrupted; the same command again goes on where this one stopped")
        return EXIT_INTERRUPTED
    log = write_crash_log(error, run_dir)
    _print_error(f"this is a bug in echo-batch: {type(error).__name__}: {error}\nThe traceback is in {log}")
    return EXIT_BUG


def write_crash_log(error: BaseException, run_dir: Path | None) -> Path:
    """Append the traceback to the run directory's log, or to one in the temporary directory; returns its path."""
    text = f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {''.join(traceback.format_exception(error))}\n"
    candidates = [] if run_dir is None or not run_dir.is_dir() else [run_dir / LOG_NAME]
    for path in [*candidates, Path(tempfile.gettempdir()) / LOG_NAME]:
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError:
            continue
        return path
    return Path(f"(nowhere: {text.strip().splitlines()[-1]})")


def _console() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def _print_error(message: str) -> None:
    with suppress(OSError, SystemExit):  # a screen that has gone, or a log on a full disk, must not hide the exit code
        _console().print(Text.assemble(("error: ", "bold red"), message))


_PLAN_PANEL = "Plan"
app.command()(as_command(run))
app.command()(
    as_command(
        plan,
        json_output=Annotated[
            bool | None,
            typer.Option("--json", help="Print the plan as JSON.", rich_help_panel=_PLAN_PANEL, show_default=False),
        ],
        hardware=Annotated[
            str | None,
            typer.Option(
                help="A machine that is not here, such as 8xh200.", rich_help_panel=_PLAN_PANEL, show_default=False
            ),
        ],
        host_memory=Annotated[
            str | None,
            typer.Option(help="Its free host memory, such as 1.5TB.", rich_help_panel=_PLAN_PANEL, show_default=False),
        ],
    )
)
app.add_typer(bench_app, name="bench")

if __name__ == "__main__":
    main()

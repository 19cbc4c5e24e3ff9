"""The command line: options, exit codes, and what is said on the way out."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import echo_batch.errors as errors
from echo_batch import __version__
from echo_batch.cli import app
from echo_batch.config import RunConfig, Size
from echo_batch.signals import STOP_SIGNALS
from tests.geometries import TINY, V32


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


Cli = Callable[..., Outcome]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run the command line in an empty directory, in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*args: str) -> Outcome:
        with pytest.raises(SystemExit) as ended:
            app(list(args), prog_name="echo-batch")
        captured = capfd.readouterr()
        code = ended.value.code
        return Outcome(0 if code is None else int(code), captured.out, captured.err)

    return call


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """A model directory with a configuration only."""
    return model_dir(tmp_path / "tiny", TINY)


def model_dir(path: Path, config: dict[str, object]) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(path)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Instead of running, the configurations that would have run."""
    seen: list[RunConfig] = []

    def run_job(config: RunConfig) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr("echo_batch.job.run_job", run_job)
    return seen


def test_import_pulls_no_torch() -> None:
    heavy = "{'torch', 'triton', 'transformers', 'pyarrow', 'numpy'}"
    code = f"import sys, echo_batch.cli; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_version_names_what_matters_for_a_report(cli: Cli) -> None:
    outcome = cli("--version")
    assert outcome.code == 0
    assert outcome.out.startswith(f"echo-batch {__version__} (Python 3.") and "torch" in outcome.out


def test_help_is_instant_and_lists_exit_codes(cli: Cli) -> None:
    outcome = cli("run", "--help")
    assert outcome.code == 0
    for words in ("Input and output", "KV cache", "--host-pool", "Exit codes", "75"):
        assert words in outcome.out


def test_a_typo_in_an_option_is_2(cli: Cli) -> None:
    outcome = cli("run", "x.jsonl", "--hostpool", "1M")
    assert outcome.code == 2 and "--hostpool" in outcome.err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["run"], "no input"),
        (["run", "in.jsonl"], "no model"),
        (["plan"], "no model"),
        (["run", "in.jsonl", "--model", "nowhere/at/all"], "no such directory"),
        (["run", "in.jsonl", "--model", "/nowhere"], "no such directory"),
        (["run", "in.jsonl", "--model", "{tiny}/config.json"], "is a file"),
        (["run", "in.jsonl", "--model", "{tiny}", "--host-pool", "80G"], "80GB"),
        (["run", "in.jsonl", "--model", "{tiny}", "--set", "cache.hostpool=1M"], "cache.host_pool"),
        (["run", "in.jsonl", "--model", "{tiny}", "--set", "oops"], "section.key=value"),
        (["run", "in.jsonl", "--model", "{tiny}", "--config", "missing.toml"], "missing.toml"),
        (["run", "in.jsonl", "--model", "{tiny}", "--temperature", "-1"], "temperature"),
        (["run", "in.jsonl", "--model", "{tiny}", "--temperature", "warm"], "--temperature"),
        (["run", "in.jsonl", "--model", "{tiny}", "--offload", "maybe"], "--offload"),
        (["run", "in.jsonl", "--model", "{tiny}", "-tp", "2"], "-tp 2"),
        (["run", "in.jsonl", "--model", "{tiny}", "-dp", "2"], "--dp 2"),
        (["run", "in.jsonl", "--model", "{tiny}", "--chat-template-kwargs", "{{"], "JSON"),
        (["plan", "--model", "{tiny}", "--hardware", "8xvoodoo", "--host-memory", "1TB"], "8xvoodoo"),
        (["plan", "--model", "{tiny}", "--hardware", "8xh200"], "--host-memory"),
        (["plan", "--model", "{tiny}", "--hardware", "8xh200", "--host-memory", "1.5T"], "--host-memory"),
        (["plan", "--model", "{tiny}", "--hardware", "8xh200", "--host-memory", "1.5TB", "--dp", "9"], "--dp 9"),
    ],
)
def test_bad_requests_are_2_and_one_clear_line(
    cli: Cli, tiny: str, jobs: list[RunConfig], args: list[str], words: str
) -> None:
    outcome = cli(*(arg.format(tiny=tiny) for arg in args))
    assert outcome.code == 2, outcome
    assert words in outcome.err and "Traceback" not in outcome.err
    assert outcome.out == "" and jobs == []


def test_an_unsupported_model_is_2_and_names_the_field(cli: Cli, tmp_path: Path) -> None:
    path = model_dir(tmp_path / "other", TINY | {"model_type": "llama"})
    outcome = cli("plan", "--model", path)
    assert outcome.code == 2 and "model_type" in outcome.err


def test_options_reach_the_job(cli: Cli, tiny: str, jobs: list[RunConfig], tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("[sampling]\ntop_k = 5\n[output]\nmax_error_rate = 0.1\n", encoding="utf-8")
    outcome = cli(
        *"run a.jsonl b.jsonl -i c.jsonl -o out.parquet --device cpu --dtype float32 --temperature 0".split(),
        *"--max-tokens 64 --ignore-eos --output-token-ids --host-pool 4K --gpu-pool 320 --offload on".split(),
        *"--seed 7 -dp 1 -tp 1".split(),
        *"--stop A --stop B --logprobs 2 --config job.toml --set sampling.top_k=6 --set sampling.min_p=0.1".split(),
        *["--chat-template-kwargs", '{"thinking": true}', "--model", tiny],
    )
    assert outcome.code == 0, outcome
    (config,) = jobs
    assert config.input.paths == ("a.jsonl", "b.jsonl", "c.jsonl")
    assert config.input.chat_template_kwargs == {"thinking": True}
    assert config.output.path == "out.parquet" and config.output.output_token_ids
    assert config.output.max_error_rate == 0.1
    assert config.model.path == tiny and config.model.dtype == "float32"
    assert (config.cache.host_pool, config.cache.gpu_pool) == (Size("tokens", 3968), Size("tokens", 320))
    assert config.engine.device == "cpu"
    sampling = config.sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.seed, sampling.ignore_eos) == (0.0, 64, 7, True)
    assert (sampling.stop, sampling.logprobs, sampling.top_k, sampling.min_p) == (("A", "B"), 2, 6, 0.1)
    given = {"temperature", "max_tokens", "seed", "ignore_eos", "stop", "logprobs", "top_k", "min_p"}
    assert config.explicit_sampling == given


def test_what_is_not_given_stays_open_for_the_model(cli: Cli, tiny: str, jobs: list[RunConfig]) -> None:
    assert cli("run", "a.jsonl", "--model", tiny).code == 0
    assert jobs[0].explicit_sampling == frozenset()
    assert jobs[0].output.path == "a.out.parquet"


@pytest.mark.parametrize("option", ["-dp", "--dp", "--data-parallel-size"])
def test_one_option_for_data_parallel_by_every_name(cli: Cli, tmp_path: Path, option: str) -> None:
    path = model_dir(tmp_path / "v32", V32)
    outcome = cli(
        "plan",
        "--model",
        path,
        "--json",
        "--hardware",
        "8xh200",
        "--host-memory",
        "1.5TB",
        option,
        "4",
        "--load-format",
        "dummy",
    )
    assert json.loads(outcome.out)["workers"] == 4


def test_plan_for_a_machine_that_is_not_here(cli: Cli, tmp_path: Path) -> None:
    machine = ["--model", model_dir(tmp_path / "v32", V32), "--hardware", "8xh200", "--host-memory", "1.5TB"]
    fits = cli("plan", *machine, "--json", "--host-pool", "1.8M")
    values = json.loads(fits.out)
    assert fits.code == 0 and values["fits"] and values["workers"] == 8
    assert values["bytes"]["per_worker"]["host_pool"] == 72_028_800_000
    refused = cli("plan", *machine, "--host-pool", "3M")
    assert refused.code == 2 and "try: --host-pool" in refused.out
    as_json = cli("plan", *machine, "--host-pool", "3M", "--json")
    assert as_json.code == 2 and json.loads(as_json.out)["problems"]


def test_plan_on_this_machine_needs_no_weights(cli: Cli, tiny: str) -> None:
    outcome = cli("plan", "--model", tiny, "--device", "cpu", "--host-memory", "8GB")
    assert outcome.code == 0 and outcome.out.rstrip().endswith("fits")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("no"), 2),
        (errors.ModelError("no"), 2),
        (errors.InputError("no"), 65),
        (errors.InputMissingError("no"), 66),
        (errors.OutputError("no"), 73),
        (errors.InterruptedJobError("no"), 75),
        (KeyboardInterrupt(), 75),
    ],
)
def test_errors_of_a_job_have_their_exit_codes(
    cli: Cli, tiny: str, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def run_job(config: RunConfig) -> int:
        raise error

    monkeypatch.setattr("echo_batch.job.run_job", run_job)
    outcome = cli("run", "a.jsonl", "--model", tiny)
    assert outcome.code == code
    assert outcome.err.startswith("error: ") and "Traceback" not in outcome.err


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_while_the_model_is_fetched_is_75(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    before = signal.signal(number, lambda *_: None)
    try:
        monkeypatch.setattr("echo_batch.cli.resolve_model", lambda *_args, **_options: signal.raise_signal(number))
        outcome = cli("run", "a.jsonl", "--model", "owner/name")
    finally:
        signal.signal(number, before)
    assert outcome.code == 75 and "the same command again" in outcome.err


def test_a_screen_that_cannot_be_written_hides_no_exit_code() -> None:
    """As a log on a full disk."""
    command = [sys.executable, "-m", "echo_batch.cli", "run", "nowhere.jsonl", "--model", "nowhere/at/all"]
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, stderr=full, check=False).returncode == 2


def test_closed_streams_are_opened_to_nowhere() -> None:
    """Else the lock, or a part, would be what C libraries print on."""
    code = """if True:
    import os, sys
    from echo_batch.cli import _open_closed_streams
    _open_closed_streams()
    sys.exit(0 if os.open("/dev/zero", os.O_RDONLY) > 2 and sys.stderr.write("x") == 1 else 9)
    """
    done = subprocess.run(["sh", "-c", 'exec "$@" 0<&- 2>&-', "sh", sys.executable, "-c", code], check=False)
    assert done.returncode == 0


def test_exit_code_of_a_finished_job_is_passed_on(cli: Cli, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_batch.job.run_job", lambda config: 10)
    assert cli("run", "a.jsonl", "--model", tiny).code == 10


@pytest.mark.parametrize("with_run_dir", [True, False])
def test_a_bug_is_1_and_its_traceback_is_in_a_log(
    cli: Cli, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_run_dir: bool
) -> None:
    def run_job(config: RunConfig) -> int:
        raise ZeroDivisionError("deep inside")

    monkeypatch.setattr("echo_batch.job.run_job", run_job)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if with_run_dir:
        (tmp_path / "a.out.parquet.run").mkdir()
    outcome = cli("run", "a.jsonl", "--model", tiny)
    assert outcome.code == 1
    assert "ZeroDivisionError" in outcome.err and "Traceback" not in outcome.err
    log = (tmp_path / "a.out.parquet.run" if with_run_dir else tmp_path) / "echo-batch.log"
    assert "Traceback" in log.read_text(encoding="utf-8") and str(log.relative_to(tmp_path)) in outcome.err


def test_without_model_a_terminal_gets_the_demo_and_a_warning(
    cli: Cli, jobs: list[RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    outcome = cli("run", "a.jsonl")
    assert outcome.code == 0
    assert outcome.err.count("\n") == 1 and "demo model" in outcome.err
    assert jobs[0].model.path is not None and jobs[0].model.path.endswith("echo-tiny")


def test_no_file_is_left_by_bad_requests(cli: Cli, tiny: str, tmp_path: Path) -> None:
    cli("run", "a.jsonl", "--model", tiny, "--host-pool", "x")
    cli("plan", "--model", tiny, "--host-memory", "8GB")
    assert os.listdir(tmp_path) == ["tiny"]

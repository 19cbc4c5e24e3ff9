"""Whole jobs over tiny checkpoints, in this process or in another."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from echo_batch.cli import app
from tests.checkpoints import SPECIAL_TOKENS
from tests.models.oracle import random_ids

GREEDY = ("--temperature", "0", "--ignore-eos")
SMALL = ("--device", "cpu", "--dtype", "float32", "--host-pool", "4K", "--gpu-pool", "320", "--max-tokens", "5")


@dataclass(frozen=True)
class Outcome:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str

    @property
    def heartbeats(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.err.splitlines() if line.startswith("{")]

    @property
    def said(self) -> str:
        """Standard error without heartbeat lines."""
        return "\n".join(line for line in self.err.splitlines() if not line.startswith("{"))


@dataclass(frozen=True)
class Workplace:
    """A directory with a model in which jobs are run."""

    path: Path
    model: Path
    capture: pytest.CaptureFixture[str]

    def run(self, *args: str, small: bool = True, command: str = "run") -> Outcome:
        """`echo-batch run ...` in this process. Whatever happens, no traceback may reach the screen."""
        self.capture.readouterr()
        with pytest.raises(SystemExit) as ended:
            app([command, "--model", str(self.model), *(SMALL if small else ()), *args], prog_name="echo-batch")
        captured = self.capture.readouterr()
        assert "Traceback" not in captured.err, captured.err
        code = ended.value.code
        return Outcome(0 if code is None else int(code), captured.out, captured.err)

    def start(self, *args: str, setup: str = "") -> "subprocess.Popen[str]":
        """The same in another process, after the Python statements of `setup`."""
        code = f"import sys; from echo_batch.cli import app; {setup}\napp(sys.argv[1:], prog_name='echo-batch')"
        command = [sys.executable, "-c", code, "run", "--model", str(self.model), *SMALL, *args]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        return subprocess.Popen(
            command, cwd=self.path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def write(self, name: str, rows: Iterable[Mapping[str, Any] | str]) -> str:
        """A JSON Lines file; texts are written as they are."""
        path = self.path / name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return str(path)

    def output(self, name: str = "out.parquet") -> str:
        return str(self.path / name)

    def rows(self, name: str = "out.parquet") -> list[dict[str, Any]]:
        """The rows of an output."""
        path = self.path / name
        if path.suffix == ".parquet":
            rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
            return rows
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def report(self, name: str = "out.parquet") -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.run_dir(name) / "report.json").read_text(encoding="utf-8"))
        return report

    def errors(self, name: str = "out.parquet") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir(name) / "errors.jsonl").read_text("utf-8").splitlines()]

    def log(self, name: str = "out.parquet") -> str:
        return (self.run_dir(name) / "echo-batch.log").read_text(encoding="utf-8")

    def run_dir(self, name: str = "out.parquet") -> Path:
        return self.path / (name + ".run")


WorkplaceFixture = Callable[..., Workplace]


def token_rows(lengths: Iterable[int]) -> list[dict[str, Any]]:
    """Rows of random token ids that are no special tokens; the prompt of row i depends on i and its length only."""
    first = len(SPECIAL_TOKENS)
    prompts = [[first + t % (512 - first) for t in random_ids(n, seed=100 + i).tolist()] for i, n in enumerate(lengths)]
    return [{"id": f"r{i}", "prompt_token_ids": prompt} for i, prompt in enumerate(prompts)]

"""Run the GPU tests and the measurements of docs/benchmarks.md on this machine, and show what came out.

    python -m tools.measure out/measure [--only tests,decode] [--skip deep] [--limit SECONDS]

Each item is a process of its own with a time limit, and leaves NAME.log (and NAME.json where the bench has one) in the
folder. An item whose log says that it ended well is not run again, so a run that was cut goes on where it stopped; give
another folder to measure anew. Items run one after the other. Exits 1 if anything failed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GEOMETRY = "echo_batch/bench/geometries/deepseek-v3.2"
DONE = "# done in"


@dataclass(frozen=True, slots=True)
class Item:
    """One command. `group` is what --only and --skip name; `seconds` its limit."""

    name: str
    group: str
    command: tuple[str, ...]
    seconds: int


def tests() -> Item:
    """All tests that need a GPU, side by side as in `make test-gpu`."""
    options = ("-q", "-m", "gpu", "-p", "no:cacheprovider", "--durations=10", "--dist", "worksteal")
    jobs = str(min(8, os.cpu_count() or 1))
    return Item("tests", "tests", (sys.executable, "-m", "pytest", *options, "-n", jobs, "tests"), 600)


def bench(name: str, group: str, kind: str, options: str, seconds: int = 120) -> Item:
    """`echo-batch bench KIND` with V3.2's geometry."""
    command = (sys.executable, "-m", "echo_batch.cli", "bench", kind, "--model", GEOMETRY, *options.split())
    return Item(name, group, command, seconds)


def module(name: str, options: str = "", seconds: int = 120) -> Item:
    """A microbenchmark, `python -m echo_batch.bench.NAME`."""
    return Item(name, "kernels", (sys.executable, "-m", f"echo_batch.bench.{name}", *options.split()), seconds)


_SHALLOW = "--layers 8 --context 32K --steps 100 --locality 0.97"
_DEEP = "--context 96K --steps 30 --ep-slice 8 --locality 0.99"
_MIDDLE = "--context 32K --steps 30 --ep-slice 8 --locality 0.99 --gpu-pool 110K --residency off"

ITEMS = (
    tests(),
    bench("decode", "decode", "decode", f"{_SHALLOW} --batch 3,19,27 --gpu-pool 110K --host-pool 900K"),
    bench("decode-off", "decode", "decode", f"{_SHALLOW} --batch 3 --host-pool 110K --offload off"),
    bench("decode-fused", "decode", "decode",
          f"{_SHALLOW} --batch 19 --gpu-pool 110K --host-pool 700K --prefetch fused"),
    bench("resident", "residency", "decode", "--context 32K --steps 60 --ep-slice 8 --batch 3 --gpu-pool 110K"
          " --host-pool 110K --locality 0.99"),
    bench("resident-off", "residency", "decode", "--context 32K --steps 60 --ep-slice 8 --batch 3 --host-pool 110K"
          " --offload off --locality 0.99"),
    bench("managed", "residency", "decode", "--context 32K --steps 60 --ep-slice 8 --batch 3 --gpu-pool 110K"
          " --host-pool 110K --residency off --locality 0.99"),
    bench("managed-fused", "residency", "decode", "--context 32K --steps 60 --ep-slice 8 --batch 3 --gpu-pool 110K"
          " --host-pool 110K --residency off --locality 0.99 --prefetch fused"),
    *(
        bench(f"deep-{pool}", "deep", "decode", f"{_DEEP} --batch 18 --gpu-pool {pool} --host-pool 1.8M", 150)
        for pool in ("380K", "200K", "110K")
    ),
    *(
        bench(f"middle-{batch}-{prefetch}", "middle", "decode",
              f"{_MIDDLE} --batch {batch} --host-pool {pool} --prefetch {prefetch}")
        for batch, pool in ((6, "210K"), (10, "350K"))
        for prefetch in ("off", "fused")
    ),
    bench("deep-fused", "deep", "decode", f"{_DEEP} --batch 18 --gpu-pool 110K --host-pool 1.8M --prefetch fused", 150),
    bench("deep-off", "deep", "decode", f"{_DEEP} --batch 1,2,3 --host-pool 380K --offload off", 150),
    bench("prefill", "prefill", "prefill", "--layers 8 --context 32K --prompts 24 --chunk 32K --group 32K"),
    bench("prefill-16k", "prefill", "prefill", "--layers 8 --context 32K --prompts 8"),
    bench("prefill-128k", "prefill", "prefill", "--layers 4 --context 128K --prompts 1"),
    bench("prefill-shared", "prefill", "prefill", "--layers 4 --context 102464 --prefix 102400 --prompts 40"),
    bench("prefill-apart", "prefill", "prefill", "--layers 4 --context 102464 --prompts 4"),
    bench("suffix-streamed", "prefill", "prefill", "--layers 4 --context 102464 --prefix 102400 --prompts 2"
          " --streamed 1e9"),
    bench("suffix-recalled", "prefill", "prefill", "--layers 4 --context 102464 --prefix 102400 --prompts 2"
          " --streamed 0"),
    bench("load", "load", "load", "--layers 3 --directory out/checkpoint"),
    module("indexer", "--hit-rates 0.97,0.9,0.5"),
    module("cache_ops"),
    module("kernels", seconds=240),
    Item("host_rows", "kernels", (sys.executable, "-m", "tools.studies.host_rows"), 240),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="groups or names, separated by commas")
    parser.add_argument("--skip", default="", help="groups or names, separated by commas")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which nothing more is started")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    items = chosen(ITEMS, set(filter(None, options.only.split(","))), set(filter(None, options.skip.split(","))))
    deadline = time.monotonic() + options.limit
    failed = run(items, options.folder, deadline)
    for line in summary(options.folder, items):
        print(line)
    return 1 if failed else 0


def chosen(items: Sequence[Item], only: set[str], skip: set[str]) -> list[Item]:
    """Those of `only` (all, if it is empty) without those of `skip`; both name groups or items."""
    unknown = (only | skip) - {i.group for i in items} - {i.name for i in items}
    if unknown:
        raise SystemExit(f"no such group or item: {', '.join(sorted(unknown))}")
    return [i for i in items if (not only or {i.name, i.group} & only) and not {i.name, i.group} & skip]


def run(items: Sequence[Item], folder: Path, deadline: float) -> list[str]:
    """Run what has not ended well before; returns the names of what failed or was not started."""
    failed = []
    for item in items:
        if is_done(folder, item):
            continue
        if time.monotonic() > deadline:
            failed.append(item.name)
            continue
        started = time.monotonic()
        process = start(item, folder)
        try:
            code: int | str = process.wait(item.seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = f"cut after {item.seconds} s"
        seconds = time.monotonic() - started
        if code == 0:
            with log_of(folder, item).open("a", encoding="utf-8") as log:
                log.write(f"{DONE} {seconds:.1f} s\n")
        else:
            failed.append(item.name)
        print(f"{item.name:18} {'ok' if code == 0 else f'FAILED ({code})'} {seconds:6.1f} s", flush=True)
    return failed


def start(item: Item, folder: Path) -> "subprocess.Popen[bytes]":
    """Start an item with its output in its log."""
    command = list(item.command)
    if item.group != "tests":
        command += ["--json", str(folder / f"{item.name}.json")]
    with log_of(folder, item).open("wb") as log:
        log.write(f"$ {' '.join(command)}\n".encode())
        log.flush()
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        if item.group == "tests":
            environment |= {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def is_done(folder: Path, item: Item) -> bool:
    """Whether an earlier run of it ended well."""
    log = log_of(folder, item)
    return log.exists() and any(line.startswith(DONE) for line in log.read_text(encoding="utf-8").splitlines()[-1:])


def log_of(folder: Path, item: Item) -> Path:
    return folder / f"{item.name}.log"


def summary(folder: Path, items: Sequence[Item]) -> Iterator[str]:
    """One line a test run or bench case."""
    yield ""
    for item in items:
        path = folder / f"{item.name}.json"
        if item.group == "tests":
            lines = log_of(folder, item).read_text(encoding="utf-8").splitlines() if is_done(folder, item) else []
            yield f"{item.name:18} {next((line for line in reversed(lines) if ' passed' in line), 'not done')}"
        elif path.exists() and item.group != "kernels":
            result = json.loads(path.read_text(encoding="utf-8"))
            for case in result.get("cases", [result]):
                yield f"{item.name:18} {_case(case)}"
    ratios = _ratios(folder)
    if ratios:
        yield ""
        yield from ratios


def _case(case: dict[str, Any]) -> str:
    names = ("batch", "step_ms", "tok_s", "hit_rate", "graph_nodes_per_layer", "extra_memory_bytes", "host_write_share")
    return ", ".join(f"{name} {case[name]}" for name in names if case.get(name) is not None)


def _ratios(folder: Path) -> list[str]:
    """What the issue's targets are stated as: ratios of two cases of one run."""

    def rate(name: str, batch: int | None = None) -> float | None:
        path = folder / f"{name}.json"
        if not path.exists():
            return None
        result = json.loads(path.read_text(encoding="utf-8"))
        cases = [c for c in result.get("cases", [result]) if batch is None or c.get("batch") == batch]
        return float(cases[0]["tok_s"]) if cases else None

    pairs = [
        ("8 layers, batch 27 over batch 3 without offloading", rate("decode", 27), rate("decode-off", 3)),
        ("8 layers, fused prefetch over none", rate("decode-fused", 19), rate("decode", 19)),
        ("61 layers, resident over offloading off", rate("resident"), rate("resident-off")),
        ("61 layers, managed over offloading off", rate("managed"), rate("resident-off")),
        *(
            (f"61 layers, batch 18 over {b} without offloading, pool {pool}", rate(f"deep-{pool}"), rate("deep-off", b))
            for b, pool in ((1, "110K"), (2, "200K"), (3, "380K"))
        ),
        ("61 layers, equal memory: pool 110K and keys over batch 3", rate("deep-110K"), rate("deep-off", 3)),
        ("61 layers, fused prefetch over none", rate("deep-fused"), rate("deep-110K")),
        ("a shared prefix over prompts apart", rate("prefill-shared"), rate("prefill-apart")),
        ("a suffix: prefix streamed over recalled", rate("suffix-streamed"), rate("suffix-recalled")),
    ]
    return [f"{what}: {a / b:.3f}x" for what, a, b in pairs if a is not None and b is not None]


if __name__ == "__main__":
    sys.exit(main())

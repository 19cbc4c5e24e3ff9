"""The CUDA sources compile for Hopper, in the instances that real shapes take, and do not spill where it matters."""

import importlib.resources
import shutil
import subprocess
from pathlib import Path

import pytest

from echo_batch.kernels.cuda import ages
from echo_batch.kernels.cuda.indexer import SCORES_ONLY, WITH_PREFETCH
from echo_batch.kernels.cuda.topk import choose_instance, instance_defines
from tests.kernels.machine_code import delayed_loads, disassemble, find_disassembler

FP8_VECTORS = 41
"""Of 16 bytes, in a row of fp8."""
nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


def compile_source(name: str, defines: dict[str, int], out: Path) -> str:
    """Compile a file of kernels/cuda; what ptxas says about registers."""
    folder = importlib.resources.files("echo_batch.kernels.cuda")
    with importlib.resources.as_file(folder) as path:
        command = ["nvcc", "-arch=sm_90a", "-std=c++17", "-cubin", "-Xptxas", "-v", "-o", str(out), str(path / name)]
        result = subprocess.run(
            command + [f"-D{key}={value}" for key, value in defines.items()], capture_output=True, text=True
        )
    assert result.returncode == 0, result.stderr
    return result.stderr


def check_copies(cubin: Path) -> None:
    """The loads of host rows, which no other loads look like, wait for none of each other: each wait is a trip over the
    link. (With longer rows one is left.)"""
    if find_disassembler() is not None:
        assert not delayed_loads(disassemble(cubin), r"LDG\.E\.128\.STRONG\.GPU", r"STG\.E\.128")


@nvcc
@pytest.mark.parametrize(
    ("num_rows", "width", "mark", "vectors"),
    [
        (13, 98304, False, 0),
        (13, 98304, True, 41),
        (18, 98432, True, 0),
        (18, 98432, True, 72),
        (3, 1 << 20, True, 41),
    ],
)
def test_topk(num_rows: int, width: int, mark: bool, vectors: int, tmp_path: Path) -> None:
    instance = choose_instance(num_rows, width)
    defines = instance_defines(instance, aligned=True, mark=mark, vectors=vectors)
    report = compile_source("topk.cu", defines, tmp_path / "topk.cubin")
    assert "registers" in report
    if instance.in_shared and instance.chunks <= 8:
        assert " 0 bytes spill stores" in report
    if vectors == FP8_VECTORS:
        check_copies(tmp_path / "topk.cubin")


@nvcc
@pytest.mark.parametrize("aligned", [0, 1])
def test_sampling(aligned: int, tmp_path: Path) -> None:
    defines = dict(CLUSTER=8, THREADS=512, MIN_BLOCKS=2, ALIGNED=aligned)
    assert " 0 bytes spill stores" in compile_source("sampling.cu", defines, tmp_path / "sampling.cubin")


@nvcc
@pytest.mark.parametrize(
    ("heads", "vectors", "with_prefetch", "lists"),
    [(64, 41, True, 0), (64, 41, True, 1), (64, 1, False, 0), (64, 1, False, 1), (32, 80, True, 0)],
)
def test_indexer(heads: int, vectors: int, with_prefetch: bool, lists: int, tmp_path: Path) -> None:
    instance = WITH_PREFETCH if with_prefetch else SCORES_ONLY
    defines = dict(
        HEADS=heads,
        STAGES=instance.stages,
        READ_ONCE=int(instance.read_once),
        CONSUMERS=instance.consumers,
        PREFETCH=instance.prefetch_warps,
        QUEUE=max(1, instance.queue),
        EARLY=instance.early,
        VECTORS=vectors,
        ROWS=instance.rows_at_once(vectors),
        LISTS=lists,
        OVERLAP=int(with_prefetch),
    )
    assert " 0 bytes spill stores" in compile_source("indexer.cu", defines, tmp_path / "indexer.cubin")
    if vectors == FP8_VECTORS:
        check_copies(tmp_path / "indexer.cubin")


@nvcc
def test_topk_lists(tmp_path: Path) -> None:
    defines = dict(THREADS=1024, MAX_ENTRIES=8192, MAX_LISTS=160, ALIGNED=1, MARK=1, MAX_DELAY=0)
    assert " 0 bytes spill stores" in compile_source("topk_lists.cu", defines, tmp_path / "topk_lists.cubin")


@nvcc
def test_ages(tmp_path: Path) -> None:
    report = compile_source("ages.cu", dict(ages.DEFINES), tmp_path / "ages.cubin")
    assert report.count(" 0 bytes spill stores") == 2, "two kernels"
    if find_disassembler() is not None:
        code = disassemble(tmp_path / "ages.cubin")
        assert any("ATOMS.POPC.INC" in instruction.text for instruction in code), "lanes of one address go together"
        assert not delayed_loads(code, r"LDG\.E\.CONSTANT.*\+0x[0-9a-f]+00\]", r"BAR\.SYNC"), "rows are loaded at once"

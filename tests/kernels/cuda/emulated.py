"""Kernels of echo_batch/kernels/cuda on a CPU: their own source, compiled by the host's C++ compiler (emulation.h)."""

import ctypes
import importlib.resources
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FOLDER = importlib.resources.files("echo_batch.kernels.cuda")
COMPILER = shutil.which("g++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no g++")
_DYNAMIC = "extern __shared__ __align__(16) unsigned char shared_bytes[];"


def build(library: Path, source: str, launcher: str, defines: Mapping[str, int]) -> ctypes.CDLL:
    """`source` of a .cu file, whose dynamic shared memory becomes the emulation's, and `launcher`, into `library`."""
    assert _DYNAMIC in source
    source = source.replace(_DYNAMIC, "unsigned char* const shared_bytes = shared_memory.data();")
    code = library.with_suffix(".cpp")
    code.write_text(f'#include "{HERE / "emulation.h"}"\n{source}\n{launcher}')
    command = [str(COMPILER), "-std=c++20", "-O1", "-fPIC", "-shared", "-pthread", f"-I{FOLDER}"]
    command += [f"-D{name}={value}" for name, value in defines.items()] + ["-o", str(library), str(code)]
    done = subprocess.run(command, capture_output=True, text=True)
    if "unrecognized command-line option" in done.stderr or "barrier: No such file" in done.stderr:
        pytest.skip("g++ without C++20")
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))

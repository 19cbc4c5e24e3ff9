"""The CUDA top-k for many rows on a CPU: the kernel's own source, compiled by the host's C++ compiler (emulation.h)."""

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

from echo_batch.kernels.reference.topk_rows import topk_rows as reference
from tests.kernels.cuda.emulated import FOLDER, needs_compiler
from tests.kernels.cuda.emulated import build as build_emulated
from tests.kernels.triton.test_topk import KINDS, scores_of

pytestmark = needs_compiler

THREADS = 64
LAUNCHER = """
extern "C" void run(const float* scores, long long stride, u32 width, const int* lengths, u32 k, int first, int* out,
                    long long out_stride, float* kth, u32 num_rows) {
    launch(num_rows, THREADS, sizeof(Shared) + 16 + 16 * ((width + 127) / 128), [&] {
        topk_rows(scores, stride, width, lengths, k, first, out, out_stride, kth);
    });
}
"""


def build(directory: Path, *, aligned: bool, max_list: int) -> ctypes.CDLL:
    defines = dict(THREADS=THREADS, MIN_BLOCKS=1, MAX_LIST=max_list, ALIGNED=int(aligned))
    library = directory / f"topk_rows_{aligned}_{max_list}.so"
    return build_emulated(library, FOLDER.joinpath("topk_rows.cu").read_text(), LAUNCHER, defines)


@pytest.fixture(
    scope="module", params=[(False, 4096), (True, 4096), (True, 256)], ids=["scalar", "aligned", "short list"]
)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """A list of 256 makes most rows take the way through the whole row."""
    aligned, max_list = request.param
    return build(tmp_path_factory.mktemp("emulated"), aligned=aligned, max_list=max_list)


def run(library: ctypes.CDLL, scores: Tensor, lengths: Tensor, k: int, first: int) -> tuple[Tensor, Tensor]:
    num_rows, width = scores.shape
    out = torch.full((num_rows, k + 5), -7, dtype=torch.int32)
    kth = torch.empty(num_rows)
    library.run(
        ctypes.c_void_p(scores.data_ptr()),
        ctypes.c_longlong(scores.stride(0)),
        ctypes.c_uint(width),
        ctypes.c_void_p(lengths.data_ptr()),
        ctypes.c_uint(k),
        ctypes.c_int(first),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_longlong(out.stride(0)),
        ctypes.c_void_p(kth.data_ptr()),
        ctypes.c_uint(num_rows),
    )
    assert bool((out[:, k:] == -7).all())
    return out[:, :k], kth


@pytest.mark.parametrize("kind", KINDS)
def test_same_as_reference(library: ctypes.CDLL, kind: str) -> None:
    for width, k in ((2500, 64), (300, 32), (5000, 2048)):
        scores = scores_of(kind, 5, width, seed=width)
        lengths = torch.tensor([width, k, k - 1, width - 3, 0], dtype=torch.int32)
        expected = torch.empty((5, k), dtype=torch.int32)
        expected_kth = reference(scores, lengths, expected, first=width)
        positions, kth = run(library, scores, lengths, k, first=width)
        assert torch.equal(positions, expected) and torch.equal(kth, expected_kth), (width, k)

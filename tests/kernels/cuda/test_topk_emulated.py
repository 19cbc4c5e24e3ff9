"""The CUDA top-k on a CPU, alone and with the look-up of the cache: its own source, compiled by the C++ compiler of the
host (emulation.h). On the card: tests/kernels/triton/test_topk.py, test_resolve_topk.py.
"""

import ctypes
import importlib.resources
import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from echo_batch.kernels.cache_layout import FALLBACKS, MISSING, SELECTED
from echo_batch.kernels.contracts import Marked
from echo_batch.kernels.cuda.topk import Instance, instance_defines
from echo_batch.kernels.reference.topk import topk_positions as reference
from tests.kernels.marked import STEP, check_marked, fallbacks, make_selection
from tests.kernels.triton.test_topk import scores_of

NO_MARKS = (None,) * 7
COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")

LAUNCHER = """
extern "C" void run(const float* scores, long long stride, u32 width, const int* lengths, float* predicted, int update,
                    u32 k, int* positions, float* kth, const int* block_tables, long long table_stride,
                    u32* fallback_count, int* miss_slots, int* miss_entries, u32* miss_count, u32* selected_count,
                    int* priority, int* host_to_gpu, const int* step, u32 num_rows) {
    launch_clusters({CLUSTER, num_rows, 1}, THREADS, SCORES_OFFSET + (IN_SHARED ? 16 * THREADS * MAX_CHUNKS : 0), [&] {
        topk_positions(scores, stride, width, lengths, predicted, update, k, positions, kth, block_tables, table_stride,
                       fallback_count
#if MARK
                       , miss_slots, miss_entries, miss_count, selected_count, priority, host_to_gpu, step
#endif
        );
    });
}
"""


def build(directory: Path, instance: Instance, *, mark: bool) -> ctypes.CDLL:
    folder = importlib.resources.files("echo_batch.kernels.cuda")
    source = folder.joinpath("topk.cu").read_text()
    here = Path(__file__).parent
    dynamic = "extern __shared__ __align__(16) unsigned char shared_bytes[];"
    clusters = '#include "cluster.cuh"'
    assert all(source.count(part) == 1 for part in (dynamic, clusters))
    source = source.replace(dynamic, "unsigned char* const shared_bytes = shared_memory.data();")
    source = source.replace(clusters, f'#include "{here / "cluster_emulation.h"}"')
    code, library = directory / "topk.cpp", directory / f"topk_{mark}.so"
    code.write_text(f'#include "{here / "emulation.h"}"\n{source}\n{LAUNCHER}')
    defines = instance_defines(instance, aligned=False, mark=mark) | {"CLUSTER": 2}
    command = [str(COMPILER), "-std=c++20", "-O1", "-fPIC", "-shared", "-pthread", f"-I{folder}"]
    command += ["-o", str(library), str(code)]
    done = subprocess.run(
        command + [f"-D{name}={value}" for name, value in defines.items()], capture_output=True, text=True
    )
    if "unrecognized command-line option" in done.stderr or "barrier: No such file" in done.stderr:
        pytest.skip("g++ without C++20")
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


def run(library: ctypes.CDLL, *arguments: Tensor | int | None) -> None:
    """Numbers by the types of LAUNCHER: long long is taken for u32 too (one register)."""
    library.run(
        *(
            ctypes.c_longlong(a) if isinstance(a, int) else ctypes.c_void_p(None if a is None else a.data_ptr())
            for a in arguments
        )
    )


INSTANCES = {
    "registers": Instance(512, 2, 2, True),
    "shared memory": Instance(512, 2, 2, True, in_shared=True),
    "read again": Instance(512, 2, 1, False),
}


@pytest.mark.parametrize("instance", INSTANCES.values(), ids=INSTANCES.keys())
def test_positions(instance: Instance, tmp_path: Path) -> None:
    library = build(tmp_path, instance, mark=False)
    k, width = 600, 7001
    scores = torch.cat([scores_of(kind, 1, width, seed=1) for kind in ("ties", "normal", "nan", "equal")])
    lengths = torch.tensor([width, k, k - 1, width - 5], dtype=torch.int32)
    expected, expected_kth = reference(scores, lengths, k)
    predicted = torch.tensor([float(expected_kth[0]), math.nan, math.nan, 1e30])
    positions, kth, count = torch.empty_like(expected), torch.empty(4), torch.zeros(1, dtype=torch.int32)
    run(
        library, scores, scores.stride(0), width, lengths, predicted, 0, k, positions, kth, None, 0, count, *NO_MARKS, 4
    )
    assert torch.equal(positions, expected) and torch.equal(kth, expected_kth)
    assert int(count) == 1, "rows of no more than k are no fallbacks; the wrong prediction is one"


@pytest.mark.parametrize("instance", INSTANCES.values(), ids=INSTANCES.keys())
def test_marks(instance: Instance, tmp_path: Path) -> None:
    library = build(tmp_path, instance, mark=True)
    width = 7001
    # With k = 4500 a block has more than it can list. Rows are slow: all cases of one instance only.
    cases = ((600, 0.9), (4500, 0.7), (600, 0.0), (600, 1.0)) if instance.in_shared else ((4500, 0.7),)
    for k, hit_rate in cases:
        lengths = [width, width - 1, width, *([k - 1, k, 0] if hit_rate == 0.9 else [])]
        before = make_selection(lengths, width=width, k=k, hit_rate=hit_rate, seed=k)
        after = before.to(torch.device("cpu"))
        counts = after.maps.counts[0]
        num_rows = len(before.lengths)
        rows = torch.full((num_rows, k), -77, dtype=torch.int32)
        miss_slots, miss_entries = torch.full((2, num_rows * k), -77, dtype=torch.int32)
        step = torch.tensor([STEP], dtype=torch.int32)
        run(
            library, after.scores, after.scores.stride(0), width, after.lengths, after.predicted, 1, k, rows, None,
            after.block_table, after.block_table.stride(0), counts[FALLBACKS:], miss_slots, miss_entries,
            counts[MISSING:], counts[SELECTED:], after.maps.priority, after.maps.host_to_gpu, step, num_rows,
        )  # fmt: skip
        check_marked(before, after, Marked(rows, miss_slots, miss_entries))
        assert fallbacks(after) == 1, "the third row's prediction"

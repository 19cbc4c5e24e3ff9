import dataclasses
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from echo_batch.kernels import gpu_prefetch
from echo_batch.kernels.cuda import indexer as cuda_indexer
from echo_batch.kernels.cuda import runtime
from echo_batch.kernels.formats import IndexFormat
from echo_batch.kernels.gpu_ops import GpuLibraries, cuda_ops
from echo_batch.kernels.ops import reference_ops
from echo_batch.kernels.prefetch_state import PrefetchState, make_prefetch_state
from echo_batch.kernels.triton import indexer

CUDA = torch.device("cuda")


def test_every_tensor_op_of_a_model_has_a_fast_version() -> None:
    reference = reference_ops()
    fast = cuda_ops(reference, GpuLibraries(deep_gemm=None, flash_mla=None, cuda_kernels=False))
    same = {f.name for f in dataclasses.fields(reference) if getattr(fast, f.name) == getattr(reference, f.name)}
    assert same <= {"sample", "token_logprobs"} | {name for name in same if name.startswith("cache")}


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], shared_kilobytes: int) -> None:
    """A GPU of this kind, and NVRTC."""
    properties = SimpleNamespace(shared_memory_per_multiprocessor=shared_kilobytes << 10, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    nvrtc, bindings = ModuleType("cuda.bindings.nvrtc"), ModuleType("cuda.bindings")
    vars(nvrtc)["nvrtcVersion"] = lambda: (0, 13, 0)
    vars(bindings)["nvrtc"] = nvrtc
    for module in (ModuleType("cuda"), bindings, nvrtc):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize(
    ("capability", "shared_kilobytes", "kernels", "matrix_kernel"),
    [
        ((8, 0), 164, False, False),
        ((9, 0), 228, True, True),
        ((10, 0), 228, True, False),
        ((12, 0), 100, False, False),
    ],
    ids=["a100", "h200", "b200", "rtx-pro-6000"],
)
def test_cuda_kernels_run_where_they_fit(
    capability: tuple[int, int],
    shared_kilobytes: int,
    kernels: bool,
    matrix_kernel: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, capability, shared_kilobytes)
    assert runtime.available(CUDA) == kernels and cuda_indexer.available(CUDA) == matrix_kernel


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)], ids=["h200", "b200"])
def test_without_deep_gemm_one_kernel_scores_whatever_prefetch_is(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other sums give other bits: prefetch must score by what scores without it."""
    pretend(monkeypatch, capability, 228)
    called, lists = [], []

    def spy(name: str) -> object:
        def score(*_: object, out: Tensor | None = None, state: PrefetchState | None = None, **__: object) -> Tensor:
            called.append(name)
            if state is not None:
                lists.append(state.late)
            return torch.zeros(1, 64) if out is None else out

        return score

    for name in ("index_scores_paged", "index_scores_prefetch"):
        monkeypatch.setattr(cuda_indexer, name, spy("cuda"))
    monkeypatch.setattr(indexer, "index_scores_paged", spy("triton"))
    monkeypatch.setattr(gpu_prefetch.portable, "prefetch_rows", lambda *_, **__: None)
    libraries = GpuLibraries(None, None, runtime.available(CUDA), cuda_indexer.available(CUDA))
    ops = cuda_ops(reference_ops(), libraries)
    prefetch = gpu_prefetch.gpu_prefetch_ops(CUDA, ops)
    query, nothing, table = torch.zeros(1, 64, 128), torch.zeros(1), torch.zeros(1, 1, dtype=torch.int32)
    arguments = (query, nothing, nothing, table, torch.ones(1, dtype=torch.int32), IndexFormat("fp8"))
    ops.index_scores_paged(*arguments)
    prefetch.index_scores_range(*arguments, out=torch.zeros(1, 64), first_block=0, end_block=1)
    rest: dict[str, Any] = dict.fromkeys(("predicted", "maps", "step", "host_rows"))
    rest |= {"state": make_prefetch_state(1, 4, torch.device("cpu"), num_late_lists=2), "gpu_rows": torch.zeros(4, 656)}
    for room, num_lists in ((2, 2), (0, 0)):
        # Lists only where blocks of the top-k's launch will read them.
        monkeypatch.setattr(gpu_prefetch, "late_clusters", lambda *_, room=room: room)
        prefetch.index_scores_prefetch(*arguments, **rest)
        if capability == (9, 0):
            assert lists.pop().shape[1] == num_lists
    assert called == 4 * (["cuda"] if capability == (9, 0) else ["triton"])

import dataclasses

from echo_batch.kernels.gpu_ops import GpuLibraries, cuda_ops
from echo_batch.kernels.ops import reference_ops


def test_every_tensor_op_of_a_model_has_a_fast_version() -> None:
    reference = reference_ops()
    fast = cuda_ops(reference, GpuLibraries(deep_gemm=None, flash_mla=None, cuda_kernels=False))
    same = {f.name for f in dataclasses.fields(reference) if getattr(fast, f.name) == getattr(reference, f.name)}
    assert same <= {"sample", "token_logprobs"} | {name for name in same if name.startswith("cache")}

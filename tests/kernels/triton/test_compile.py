"""What the interpreter accepts the compiler accepts too."""

import os
import subprocess
import sys


def compile_ops(capability: int, shared_kilobytes: int) -> set[str]:
    """Names of the kernels that compile_ops.py has compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.compile_ops", str(capability), str(shared_kilobytes)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return set(result.stdout.split())


def test_kernels_of_a_decode_step_compile_for_hopper() -> None:
    assert {"_queries_kernel", "_few_rows_kernel", "_head_values_kernel", "place_kernel"} <= compile_ops(90, 227)


def test_loops_fit_the_shared_memory_of_gpus_for_workstations() -> None:
    compiled = compile_ops(120, 99)
    assert {"_pair_kernel", "_fp8_linear_kernel", "_grouped_few_rows_kernel", "_head_values_kernel"} <= compiled
    assert "_attention_kernel" in compiled

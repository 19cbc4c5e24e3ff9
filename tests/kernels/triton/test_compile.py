"""What the interpreter accepts the compiler accepts too."""

import os
import subprocess
import sys


def test_kernels_of_a_decode_step_compile_for_hopper() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.compile_ops"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert {"_queries_kernel", "_few_rows_kernel", "_head_values_kernel", "place_kernel"} <= set(result.stdout.split())

import pytest
import torch

from echo_batch.kernels.activation import Activation
from echo_batch.kernels.reference import linear as reference
from echo_batch.kernels.reference.parts import sum_parts
from echo_batch.kernels.triton import linear
from echo_batch.kernels.weights import QuantizedWeight, block_shape
from tests.kernels.triton.common import DEVICE, difference, randn


def quantized(rows: int, columns: int, seed: int, ue8m0: bool = True) -> QuantizedWeight:
    scale = torch.rand(block_shape((rows, columns)), generator=torch.Generator().manual_seed(seed)) * 0.01 + 0.001
    data = (randn(rows, columns, seed=seed) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    return QuantizedWeight(data, scale.to(DEVICE), ue8m0)


@pytest.mark.parametrize(
    ("num_rows", "num_columns", "inner"),
    [(3, 200, 256), (17, 64, 1152), (1, 130, 4096), (70, 130, 128), (0, 8, 128)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_scaled(num_rows: int, num_columns: int, inner: int, dtype: torch.dtype) -> None:
    x, weight = randn(num_rows, inner, seed=1, dtype=dtype), quantized(num_columns, inner, seed=2)
    got = linear.linear(Activation(x), weight)
    expected = reference.linear(Activation(x), weight)
    assert got.dtype == dtype
    assert difference(got, expected) < (1e-7 if dtype == torch.float32 else 1e-5)


def test_plain_weights() -> None:
    x, weight = randn(3, 64, seed=1), randn(20, 64, seed=2)
    assert torch.equal(linear.linear(Activation(x), weight), reference.linear(Activation(x), weight))
    assert torch.equal(linear.linear_fp32(x, weight), reference.linear_fp32(x, weight))


@pytest.mark.parametrize("num_rows", [1, 19, 70, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts(num_rows: int, dtype: torch.dtype) -> None:
    x, weight = randn(num_rows, 600, seed=1, dtype=dtype), randn(70, 600, seed=2, dtype=dtype)
    parts = linear.linear_fp32_parts(x, weight)
    assert parts.dtype == torch.float32 and (parts.shape[0] > 1) == (num_rows <= 256 and dtype == torch.bfloat16)
    assert difference(sum_parts(parts), reference.linear_fp32(x, weight)) < 1e-9


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 13, 19, 32, 64, 300, 1000])
def test_real_shapes(num_rows: int) -> None:
    for num_columns, inner in ((2240, 7168), (7168, 2048), (32768, 1536), (7168, 16384)):
        x, weight = randn(num_rows, inner, seed=1, dtype=torch.bfloat16), quantized(num_columns, inner, seed=2)
        assert difference(linear.linear(Activation(x), weight), reference.linear(Activation(x), weight)) < 1e-5
    x, weight = randn(num_rows, 7168, seed=1, dtype=torch.bfloat16), randn(64, 7168, seed=2, dtype=torch.bfloat16)
    assert difference(linear.linear_fp32(x, weight), reference.linear_fp32(x, weight)) < 1e-9
    parts = linear.linear_fp32_parts(x, weight)
    assert difference(sum_parts(parts), reference.linear_fp32(x, weight)) < 1e-9

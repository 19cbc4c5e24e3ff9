"""The Hadamard rotation is orthogonal, symmetric and spreads outliers."""

import torch

from echo_batch.kernels.reference.hadamard import hadamard, hadamard_matrix

MATRIX = hadamard_matrix(128, torch.device("cpu"))


def test_matrix() -> None:
    assert MATRIX.shape == (128, 128) and (MATRIX.abs() == 1).all()
    assert torch.equal(MATRIX @ MATRIX.T, 128 * torch.eye(128))
    assert MATRIX[:2, :2].tolist() == [[1, 1], [1, -1]]


def test_keeps_dot_products_and_undoes_itself() -> None:
    x, y = torch.randn(2, 7, 128, generator=torch.Generator().manual_seed(0))
    rotated_x, rotated_y = hadamard(x, MATRIX), hadamard(y, MATRIX)
    torch.testing.assert_close(rotated_x @ rotated_y.T, x @ y.T, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(hadamard(rotated_x, MATRIX), x, atol=1e-5, rtol=1e-5)


def test_spreads_an_outlier() -> None:
    x = torch.zeros(1, 128)
    x[0, 5] = 1.0
    assert torch.allclose(hadamard(x, MATRIX).abs(), torch.full((1, 128), 128**-0.5))


def test_dtype_is_kept() -> None:
    assert hadamard(torch.ones(2, 3, 128, dtype=torch.bfloat16), MATRIX).dtype == torch.bfloat16

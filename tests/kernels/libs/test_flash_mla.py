"""FlashMLA against the reference, at real shapes, on the card."""

import pytest
import torch

from echo_batch.kernels.formats import RowFormat
from echo_batch.kernels.libs.flash_mla import FlashMla, load_flash_mla
from echo_batch.kernels.reference.attention import sparse_mla
from tests.kernels.triton.common import DEVICE, difference, randn
from tests.kernels.triton.test_attention import SCALE, poisoned_rows, selection


def test_absent_on_the_cpu() -> None:
    assert load_flash_mla(torch.device("cpu")) is None


@pytest.fixture(scope="module")
def library() -> FlashMla:
    found = load_flash_mla(DEVICE)
    if found is None:
        pytest.skip("FlashMLA is not installed or does not load")
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize("num_heads", [64, 128])
@pytest.mark.parametrize(("num_tokens", "num_rows"), [(1, 50048), (13, 50048), (64, 50048), (300, 5000)])
def test_same_as_reference(library: FlashMla, kind: str, num_heads: int, num_tokens: int, num_rows: int) -> None:
    fmt = RowFormat(kind)
    indices = selection(num_tokens, 2048, num_rows, seed=num_tokens)
    packed = poisoned_rows(num_rows, fmt, indices)
    query = randn(num_tokens, num_heads, 576, seed=1, dtype=torch.bfloat16)
    assert library.supports(query, fmt)
    got = library.sparse_mla(query, packed, indices, SCALE, fmt)
    assert difference(got, sparse_mla(query, packed, indices, SCALE, fmt)) < 3e-5


@pytest.mark.gpu
def test_lists_of_any_width_in_a_graph(library: FlashMla) -> None:
    fmt = RowFormat("fp8")
    indices = selection(4, 100, 640, seed=1)
    packed = poisoned_rows(640, fmt, indices)
    query = randn(4, 128, 576, seed=1, dtype=torch.bfloat16)
    library.sparse_mla(query, packed, indices, SCALE, fmt)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = library.sparse_mla(query, packed, indices, SCALE, fmt)
    query.copy_(randn(4, 128, 576, seed=2, dtype=torch.bfloat16))
    indices[2] = -1
    graph.replay()
    assert difference(got, sparse_mla(query, packed, indices, SCALE, fmt)) < 3e-5

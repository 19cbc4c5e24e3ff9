"""DeepGEMM against the references, at real shapes, on the card."""

import pytest
import torch

from echo_batch.kernels.activation import Activation
from echo_batch.kernels.formats import BLOCK_SIZE, IndexFormat
from echo_batch.kernels.libs.deep_gemm import DeepGemm, load_deep_gemm
from echo_batch.kernels.reference import indexer, linear, moe, rows
from echo_batch.kernels.triton.parts import add_parts
from echo_batch.kernels.weights import QuantizedWeight, block_shape
from tests.kernels.triton.common import DEVICE, difference, randn

FP8_KEY = IndexFormat("fp8")


def test_absent_on_the_cpu() -> None:
    assert load_deep_gemm(torch.device("cpu")) is None


@pytest.fixture(scope="module")
def library() -> DeepGemm:
    found = load_deep_gemm(DEVICE)
    if found is None:
        pytest.skip("DeepGEMM is not installed or does not load")
    return found


def weight(*shape: int, seed: int) -> QuantizedWeight:
    scale = torch.rand(block_shape(shape), generator=torch.Generator().manual_seed(seed)) + 0.5
    data = (randn(*shape, seed=seed) * 50).to(torch.float8_e4m3fn)
    return QuantizedWeight(data, (scale * 0.02 * shape[-1] ** -0.5).to(DEVICE), True)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 13, 64, 1000])
@pytest.mark.parametrize("shape", [(2240, 7168), (7168, 2048)])
def test_linear(library: DeepGemm, num_tokens: int, shape: tuple[int, int]) -> None:
    x, matrix = randn(num_tokens, shape[1], seed=1, dtype=torch.bfloat16), weight(*shape, seed=2)
    assert library.supports(matrix, x.dtype)
    assert difference(library.linear(Activation(x), matrix), linear.linear(Activation(x), matrix)) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 13, 130, 300])
def test_routed_experts(library: DeepGemm, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    experts = torch.stack([torch.randperm(32, generator=generator)[:8] for _ in range(num_tokens)]).to(torch.int32)
    experts[0, 1:] = -1
    if num_tokens > 1:
        experts[1] = -1
    experts, weights = experts.to(DEVICE), torch.rand(num_tokens, 8, generator=generator).to(DEVICE)
    x = randn(num_tokens, 7168, seed=1, dtype=torch.bfloat16)
    gate_up, down = weight(32, 4096, 7168, seed=3), weight(32, 7168, 2048, seed=4)
    arguments = (Activation(x), experts, weights, gate_up, down)
    got = add_parts(library.routed_experts(*arguments))
    assert difference(got, add_parts(moe.routed_experts(*arguments))) < 1e-3
    assert torch.equal(got, add_parts(library.routed_experts(*arguments)))


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [64, 32])
def test_index_scores_paged(library: DeepGemm, num_heads: int) -> None:
    pages = torch.zeros(1300, FP8_KEY.page_bytes, dtype=torch.uint8, device=DEVICE)
    slots = torch.arange(1300 * BLOCK_SIZE, dtype=torch.int32, device=DEVICE)
    rows.write_index_keys(
        pages, slots, rows.pack_index_keys(randn(slots.shape[0], 128, seed=3), FP8_KEY, True), FP8_KEY
    )
    lengths = torch.tensor([30000, 0, 1, 38400, 64], dtype=torch.int32, device=DEVICE)
    generator = torch.Generator().manual_seed(4)
    table = torch.stack([torch.randperm(1300, generator=generator)[:600] for _ in range(5)]).to(DEVICE, torch.int32)
    table[1] = -1
    table[2, 1:] = -1
    query, _ = rows.quantize_index_query(randn(5, num_heads, 128, seed=1), True)
    weights = randn(5, num_heads, seed=2)
    schedule = library.index_schedule(lengths)
    got = library.index_scores_paged(query, weights, pages, table, lengths, FP8_KEY, schedule)
    expected = indexer.index_scores_paged(query, weights, pages, table, lengths, FP8_KEY)
    assert got.shape == expected.shape
    inside = torch.arange(got.shape[1], device=DEVICE) < lengths[:, None]
    assert difference(got[inside], expected[inside]) < 1e-7
    for row, length in enumerate(lengths.tolist()):
        if length > 1:
            assert difference(got[row, :length], expected[row, :length]) < 1e-7
    # What heads of both signs leave of a single key's sum may be small, its error is not: judged by the spread of all.
    scale = expected[inside].std()
    assert float((got - expected)[inside].abs().max() / scale) < 5e-3


@pytest.mark.gpu
def test_index_scores_contiguous(library: DeepGemm) -> None:
    keys = rows.pack_index_keys(randn(20001, 128, seed=3), FP8_KEY, True)
    query, _ = rows.quantize_index_query(randn(130, 64, 128, seed=1), True)
    weights = randn(130, 64, seed=2)
    ends = torch.arange(19872, 20002, dtype=torch.int32, device=DEVICE)
    ends[0] = 1
    got = library.index_scores_contiguous(query, weights, keys, ends, FP8_KEY)
    expected = indexer.index_scores_contiguous(query, weights, keys, ends, FP8_KEY)
    assert got.shape == expected.shape
    inside = torch.arange(20001, device=DEVICE) < ends[:, None]
    assert difference(got[inside], expected[inside]) < 1e-7

"""The reader of tensors: the bytes of the files, in order, within its budget, and errors where they are asked for."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from echo_batch.errors import ModelError
from echo_batch.models.checkpoint import StoredTensor, read_header
from echo_batch.models.streaming import TensorReader

CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]


@pytest.fixture
def files(tmp_path: Path) -> tuple[dict[str, Tensor], dict[str, StoredTensor]]:
    generator = torch.Generator().manual_seed(1)
    tensors, stored = {}, {}
    for shard in range(3):
        own = {
            f"{shard}.large": torch.randn(300, 70, generator=generator),
            f"{shard}.small": torch.randn(3, generator=generator).to(torch.bfloat16),
            f"{shard}.fp8": torch.randn(64, 129, generator=generator).to(torch.float8_e4m3fn),
        }
        save_file(own, tmp_path / f"{shard}.safetensors")
        stored |= dict(read_header(tmp_path / f"{shard}.safetensors"))
        tensors |= own
    return tensors, stored


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("threads", "piece", "ahead"), [(1, 1 << 20, 1 << 30), (4, 1000, 1), (3, 4096, 100_000)])
def test_every_tensor_arrives_in_the_order_asked_for(
    files: tuple[dict[str, Tensor], dict[str, StoredTensor]],
    device: torch.device,
    threads: int,
    piece: int,
    ahead: int,
) -> None:
    tensors, stored = files
    names = sorted(tensors, reverse=True) * 3  # the same tensor may be read again
    order = [(name, stored[name]) for name in names]
    with TensorReader(order, device, num_threads=threads, piece_bytes=piece, ahead_bytes=ahead) as reader:
        for name in names:
            assert same(reader.take(name), tensors[name]), name


def test_no_more_than_the_budget_is_read_ahead(
    files: tuple[dict[str, Tensor], dict[str, StoredTensor]],
) -> None:
    tensors, stored = files
    announced: list[str] = []
    enough = threading.Event()

    def order() -> Iterator[tuple[str, StoredTensor]]:
        for name in tensors:
            announced.append(name)
            if len(announced) == 4:
                enough.set()
            yield name, stored[name]

    # 84,000 and 6 bytes fit, the next tensor exceeds them; nothing is read after that until something is taken.
    with TensorReader(order(), CPU, num_threads=2, piece_bytes=1000, ahead_bytes=84_007) as reader:
        first = next(iter(tensors))
        assert not enough.wait(0.3) and len(announced) == 3
        reader.take(first)
        assert enough.wait(5.0)


def test_a_file_that_shrank_and_a_file_that_went(
    files: tuple[dict[str, Tensor], dict[str, StoredTensor]],
) -> None:
    tensors, stored = files
    cut, gone = stored["0.large"].file, stored["1.large"].file
    last = max((s for s in stored.values() if s.file == cut), key=lambda s: s.offset)
    with cut.open("r+b") as file:
        file.truncate(last.offset + 1)
    gone.unlink()
    name = next(n for n, s in stored.items() if s == last)
    order = [(n, stored[n]) for n in ("2.small", name, "1.small", "2.large")]
    with TensorReader(order, CPU, piece_bytes=1000) as reader:
        reader.take("2.small")
        with pytest.raises(ModelError, match=rf"{cut.name}: tensor {name} cannot be read: the file ends"):
            reader.take(name)
        with pytest.raises(ModelError, match=r"1.safetensors: tensor 1.small cannot be read: .*No such file"):
            reader.take("1.small")
        assert same(reader.take("2.large"), tensors["2.large"])


def test_an_order_that_breaks_off_is_told(files: tuple[dict[str, Tensor], dict[str, StoredTensor]]) -> None:
    _, stored = files

    def order() -> Iterator[tuple[str, StoredTensor]]:
        yield "0.small", stored["0.small"]
        raise KeyError("no such tensor")

    with TensorReader(order(), CPU) as reader:
        reader.take("0.small")
        with pytest.raises(KeyError, match="no such tensor"):
            reader.take("0.large")


def test_closing_early_stops_the_threads(files: tuple[dict[str, Tensor], dict[str, StoredTensor]]) -> None:
    _, stored = files
    before = threading.active_count()
    with TensorReader(
        ((n, stored[n]) for n in list(stored) * 50), CPU, piece_bytes=1000, ahead_bytes=200_000
    ) as reader:
        reader.take(next(iter(stored)))
    assert threading.active_count() == before

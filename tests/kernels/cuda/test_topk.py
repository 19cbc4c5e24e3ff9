"""What of the CUDA top-k can be tested without a GPU; its results: tests/kernels/triton/test_topk.py."""

import importlib.resources

import pytest

from echo_batch.kernels.cuda.topk import choose_instance, late_clusters_in


@pytest.mark.parametrize("num_rows", [1, 15, 16, 4096])
@pytest.mark.parametrize("width", [1, 16384, 16385, 98304, 98305, 163840, 163841, 1 << 20])
def test_a_resident_instance_holds_the_row(num_rows: int, width: int) -> None:
    instance = choose_instance(num_rows, width)
    held = 8 * instance.threads * instance.chunks * 4
    assert instance.resident == (width <= (196608 if num_rows > 15 else 163840))
    # Two blocks' scores and their other shared memory fit into a multiprocessor's.
    assert not instance.in_shared or 2 * (16384 + 16 * instance.threads * instance.chunks + 1024) <= 228 * 1024
    assert not instance.resident or held >= width > held - 8 * instance.threads * 4
    # A multiprocessor has 2,048 threads and 65,536 registers.
    assert instance.threads * instance.min_blocks <= 1024


def test_the_source_is_part_of_the_package() -> None:
    assert "topk_positions" in importlib.resources.files("echo_batch.kernels.cuda").joinpath("topk.cu").read_text()


@pytest.mark.parametrize(
    ("num_rows", "room", "expected"),
    [(13, 15, 2), (15, 15, 0), (16, 15, 0), (18, 30, 4), (29, 30, 1), (33, 64, 0), (4, 9, 4), (13, 9, 0)],
)
def test_late_rows_come_from_clusters_that_start_with_the_others(num_rows: int, room: int, expected: int) -> None:
    assert late_clusters_in(room, num_rows) == expected

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_batch.cache.blocks import BlockAllocator


def test_allocates_all_or_nothing() -> None:
    blocks = BlockAllocator(5)
    assert blocks.allocate(3) == [0, 1, 2]
    assert blocks.allocate(3) is None and blocks.num_free == 2
    assert blocks.allocate(0) == []
    assert blocks.allocate(2) == [3, 4] and blocks.num_free == 0
    assert blocks.live_blocks() == [0, 1, 2, 3, 4]


def test_shared_blocks_are_freed_by_the_last_holder() -> None:
    blocks = BlockAllocator(4)
    own = blocks.allocate(2)
    assert own is not None
    blocks.share([own[0]])
    assert blocks.references(own[0]) == 2
    assert blocks.free(own) == [own[1]]
    assert blocks.free([own[0]]) == [own[0]]
    assert blocks.num_free == 4


def test_misuse_is_an_assertion() -> None:
    blocks = BlockAllocator(2)
    own = blocks.allocate(1)
    assert own is not None
    blocks.free(own)
    with pytest.raises(AssertionError, match="freed twice"):
        blocks.free(own)
    with pytest.raises(AssertionError, match="is free"):
        blocks.share([1])


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "free"]), st.integers(0, 9)), max_size=60))
def test_no_block_is_lost_or_held_twice(operations: list[tuple[str, int]]) -> None:
    blocks = BlockAllocator(12)
    held: list[list[int]] = []
    for what, n in operations:
        if what == "allocate":
            new = blocks.allocate(n)
            assert (new is None) == (n > 12 - len({b for h in held for b in h}))
            if new is not None:
                assert len(set(new)) == n and not set(new) & {b for h in held for b in h}
                held.append(new)
        elif held and what == "share":
            blocks.share(held[n % len(held)])
            held.append(list(held[n % len(held)]))
        elif held:
            gone = held.pop(n % len(held))
            remaining = {b for h in held for b in h}
            assert blocks.free(gone) == [b for b in gone if b not in remaining]
        assert blocks.live_blocks() == sorted({b for h in held for b in h})
        assert blocks.num_free == 12 - len(blocks.live_blocks())

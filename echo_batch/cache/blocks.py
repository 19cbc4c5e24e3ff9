"""Which blocks of token slots are free, and how many requests hold each of the others. Knows no torch and no bytes."""

import heapq
from collections.abc import Iterable


class BlockAllocator:
    """Hands out block numbers 0 .. num_blocks - 1, with a reference count each, so that requests can share a prefix."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 0, num_blocks
        self.num_blocks = num_blocks
        # A heap: the lowest numbers go out first, so that the slots in use fit a GPU pool for as long as possible, the
        # host pool is touched as little as possible, and a request's blocks tend to lie together.
        self._free = list(range(num_blocks))
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num: int) -> list[int] | None:
        """Take the `num` lowest free blocks, one reference each; None (and nothing taken) if fewer are free."""
        assert num >= 0, num
        if num > len(self._free):
            return None
        blocks = [heapq.heappop(self._free) for _ in range(num)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of `blocks`, which must be in use."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is free"
            self._references[block] += 1

    def free(self, blocks: Iterable[int]) -> list[int]:
        """Drop one reference from each of `blocks`; returns those that nobody holds any more.

        The caller must release these in the cache before they are written again.
        """
        freed = []
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is freed twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                heapq.heappush(self._free, block)
                freed.append(block)
        return freed

    def references(self, block: int) -> int:
        """Number of holders of `block`."""
        return self._references[block]

    def live_blocks(self) -> list[int]:
        """Blocks in use, ascending."""
        return [block for block, count in enumerate(self._references) if count > 0]

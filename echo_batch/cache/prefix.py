"""Which blocks hold the first tokens of which prompts: a tree of whole blocks. Knows no torch and no bytes.

A node is one full block of prompt tokens behind those of its parent. Children are found by their tokens, not by a hash
of them: a collision cannot give a block of other tokens. The tree holds one reference to each of its blocks. A block
that nobody else holds is idle: it stays while there is room if a second request has asked for it, and otherwise goes
with its last holder.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from echo_batch.cache.blocks import BlockAllocator
from echo_batch.kernels.formats import BLOCK_SIZE


def block_keys(token_ids: Sequence[int]) -> list[bytes]:
    """The tokens of each whole block of a prompt, as bytes to look them up by."""
    data = array("i", token_ids[: len(token_ids) // BLOCK_SIZE * BLOCK_SIZE])
    size = BLOCK_SIZE * data.itemsize
    raw = data.tobytes()
    return [raw[start : start + size] for start in range(0, len(raw), size)]


@dataclass(slots=True, eq=False)
class _Node:
    """One block of tokens. `uses` counts the requests that wanted it, at most those of its parent."""

    parent: "_Node | None"
    key: bytes
    block: int
    uses: int = 1
    children: dict[bytes, "_Node"] = field(default_factory=dict)


class PrefixTree:
    """Prompt blocks of the running requests, and idle ones of earlier requests.

    A request holds all blocks from the root to its deepest one, so whatever hangs below an idle block is idle too.
    """

    def __init__(self, blocks: BlockAllocator) -> None:
        self._blocks = blocks
        self._root = _Node(None, b"", -1)
        self._nodes: dict[int, _Node] = {}
        # Least recently used first. A request gives its blocks back deepest first: a child always comes before its
        # parent, so the first one is a leaf.
        self._idle: OrderedDict[int, _Node] = OrderedDict()

    @property
    def num_idle(self) -> int:
        """Blocks that `evict` can free."""
        return len(self._idle)

    @property
    def num_blocks(self) -> int:
        """Blocks in the tree, idle or held."""
        return len(self._nodes)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the longest prefix of `keys` that is in the tree, first block first."""
        return [node.block for node in self._path(keys)]

    def want(self, keys: Sequence[bytes]) -> list[int]:
        """`match` for a request that has just come: the blocks that it shares stay after their holders leave."""
        path = self._path(keys)
        for node in path:
            node.uses += 1
        return [node.block for node in path]

    def hold(self, blocks: Sequence[int]) -> None:
        """Add a holder to blocks of the tree (from the root on)."""
        self._blocks.share(blocks)
        for block in blocks:
            self._idle.pop(block, None)

    def insert(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Offer the first `len(keys)` of a request's `blocks`, which it holds, to others.

        Stops where the tree knows the same tokens by another block.
        """
        node = self._root
        for key, block in zip(keys, blocks, strict=False):
            child = node.children.get(key)
            if child is None:
                child = _Node(node, key, block)
                node.children[key] = child
                self._nodes[block] = child
                self._blocks.share([block])
            elif child.block != block:
                break
            node = child

    def release(self, blocks: Sequence[int]) -> list[int]:
        """Drop one holder of each of a request's `blocks`; returns those that are free now (first block first)."""
        freed: list[int] = []
        for block in reversed(blocks):
            freed += self._blocks.free([block])
            node = self._nodes.get(block)
            if node is None or self._blocks.references(block) > 1:
                continue
            if node.uses > 1:
                self._idle[block] = node
            else:
                freed.append(self._remove(node))
        return freed[::-1]

    def evict(self, num: int) -> list[int]:
        """Free the `num` least recently used idle blocks, or all if there are fewer; returns them."""
        freed = []
        for _ in range(min(num, len(self._idle))):
            _, node = self._idle.popitem(last=False)
            freed.append(self._remove(node))
        return freed

    def _path(self, keys: Sequence[bytes]) -> list[_Node]:
        node, path = self._root, []
        for key in keys:
            child = node.children.get(key)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def _remove(self, node: _Node) -> int:
        assert not node.children and node.parent is not None, "a block goes before those behind it"
        del node.parent.children[node.key]
        del self._nodes[node.block]
        freed = self._blocks.free([node.block])
        assert freed == [node.block], f"block {node.block} is still held"
        return node.block

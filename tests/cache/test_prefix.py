from functools import cache
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from echo_batch.cache.blocks import BlockAllocator
from echo_batch.cache.prefix import PrefixTree, block_keys
from echo_batch.kernels.formats import BLOCK_SIZE


@cache
def keys(text: str) -> list[bytes]:
    """One block a letter."""
    return block_keys([ord(letter) for letter in text for _ in range(BLOCK_SIZE)])


class Holder:
    """What a request does with the tree."""

    def __init__(self, tree: PrefixTree, blocks: BlockAllocator, text: str) -> None:
        self.tree, self.text = tree, text
        tree.want(keys(text))
        self.shared = tree.match(keys(text))
        tree.hold(self.shared)
        needed = len(text) - len(self.shared)
        self.evicted = tree.evict(needed - blocks.num_free)
        own = blocks.allocate(needed)
        assert own is not None
        self.blocks = [*self.shared, *own]
        tree.insert(keys(text), self.blocks)

    def leave(self) -> list[int]:
        return self.tree.release(self.blocks)


def make(num_blocks: int) -> tuple[PrefixTree, BlockAllocator]:
    blocks = BlockAllocator(num_blocks)
    return PrefixTree(blocks), blocks


def test_keys_are_whole_blocks_of_exact_tokens() -> None:
    ids = list(range(200))
    assert len(block_keys(ids)) == 3 and block_keys(ids[:63]) == []
    assert block_keys(ids)[:2] == block_keys(range(128)) == block_keys(tuple(ids[:130]))
    changed = [*ids[:127], 2**31 - 1, *ids[128:]]
    assert [a == b for a, b in zip(block_keys(ids), block_keys(changed), strict=True)] == [True, False, True]


def test_a_prefix_nobody_else_wants_leaves_with_its_request() -> None:
    tree, blocks = make(8)
    a = Holder(tree, blocks, "abc")
    assert a.shared == [] and tree.num_blocks == 3
    assert a.leave() == a.blocks and blocks.num_free == 8 and tree.num_blocks == 0


def test_shared_blocks_live_until_the_last_holder_leaves_and_then_stay_idle() -> None:
    tree, blocks = make(8)
    a = Holder(tree, blocks, "abc")
    b = Holder(tree, blocks, "abx")
    assert b.shared == a.blocks[:2]
    assert a.leave() == a.blocks[2:]  # only its own block
    assert tree.num_idle == 0 and [blocks.references(n) for n in b.blocks] == [2, 2, 2]
    assert b.leave() == b.blocks[2:]
    assert tree.num_idle == 2 and blocks.num_free == 6
    c = Holder(tree, blocks, "abyz")
    assert c.shared == a.blocks[:2] and tree.num_idle == 0
    c.leave()
    assert sorted(tree.evict(9)) == sorted(a.blocks[:2]) and blocks.num_free == 8


def test_a_waiting_request_keeps_what_it_wants() -> None:
    tree, blocks = make(8)
    a = Holder(tree, blocks, "abc")
    assert tree.want(keys("abd")) == a.blocks[:2]
    assert a.leave() == a.blocks[2:] and tree.match(keys("abd")) == a.blocks[:2]


def test_least_recently_used_leaves_are_evicted_first() -> None:
    tree, blocks = make(9)
    for text in ("abc", "abd", "pqr"):
        holder = Holder(tree, blocks, text)
        tree.want(keys(text))
        holder.leave()
    assert tree.num_idle == 7
    path = {letter: tree.match(keys(text))[i] for text in ("abc", "abd", "pqr") for i, letter in enumerate(text)}
    Holder(tree, blocks, "pq").leave()
    Holder(tree, blocks, "ab").leave()
    order = [next(letter for letter in path if path[letter] == block) for block in tree.evict(9)]
    assert order == ["c", "d", "r", "q", "p", "b", "a"]


def test_what_is_held_is_not_evicted() -> None:
    tree, blocks = make(3)
    a = Holder(tree, blocks, "abc")
    b = Holder(tree, blocks, "ab")
    a.leave()
    assert tree.num_idle == 0 and tree.evict(2) == []
    b.leave()
    assert tree.num_idle == 2
    c = Holder(tree, blocks, "axy")  # needs the free block and "b", which nobody holds
    assert c.shared == a.blocks[:1] and c.evicted == [a.blocks[1]] and tree.match(keys("ab")) == a.blocks[:1]


def test_the_same_tokens_by_another_block_are_not_offered_twice() -> None:
    tree, blocks = make(8)
    a = Holder(tree, blocks, "ab")
    own = blocks.allocate(1)
    assert own is not None
    tree.hold(a.blocks[:1])
    twin = [a.blocks[0], *own]  # computes "b" itself, as a request must whose prompt ends there
    tree.insert(keys("abc"), [*twin, 7])
    assert tree.num_blocks == 2 and blocks.references(own[0]) == 1
    assert tree.release(twin) == own


@settings(max_examples=30, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(4, 12))
def test_a_random_life(random: Random, num_blocks: int) -> None:
    tree, blocks = make(num_blocks)
    content: dict[int, str] = {}  # block -> the text up to its end
    running: list[Holder] = []
    for _ in range(50):
        held = {n for holder in running for n in holder.blocks}
        if running and (random.random() < 0.4 or len(running) > 3):
            gone = running.pop(random.randrange(len(running))).leave()
            held = {n for holder in running for n in holder.blocks}
        else:
            text = "".join(random.choice("ab") for _ in range(random.randint(1, 4)))
            shared = tree.match(keys(text))
            idle = sum(blocks.references(n) == 1 for n in shared)
            if len(text) - len(shared) > blocks.num_free + tree.num_idle - idle:
                continue
            holder = Holder(tree, blocks, text)
            assert holder.shared == shared
            gone = holder.evicted
            # A shared block holds exactly these tokens behind exactly these tokens.
            assert [content[n] for n in shared] == [text[: i + 1] for i in range(len(shared))]
            running.append(holder)
            content |= {n: text[: i + 1] for i, n in enumerate(holder.blocks) if n not in shared}
        assert not held & set(gone), "a held block was freed"
        held = {n for holder in running for n in holder.blocks}
        assert blocks.num_free + tree.num_idle + len(held) == num_blocks
    for holder in running:
        holder.leave()
    tree.evict(num_blocks)
    assert blocks.num_free == num_blocks and tree.num_blocks == 0

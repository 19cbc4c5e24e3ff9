"""Attention supervision: it points at the key word and at the next token of the same word's earlier statements."""

import torch
from torch import Tensor

from tools.train_tiny.match import KEY_HEAD, MATCH_HEADS, Guide, find_statements, guide_loss, make_guide
from tools.train_tiny.model import AttentionParts

HASH, IS, FILLER = 1, 2, 3
DIGITS, KEYS = 10, 30
VOCAB = 40
A, B = KEYS, KEYS + 1


def statement(key: int, *digits: int) -> list[int]:
    return [key, IS, HASH, *(DIGITS + d for d in digits)]


def a_text() -> Tensor:
    """A at 1, B at 10, A again at 19 and another text without statements."""
    first = [FILLER, *statement(A, 1, 2, 3, 4, 5), FILLER, *statement(B, 6, 7, 8, 9, 0), FILLER, *statement(A, 1, 2)]
    return torch.tensor([first, [FILLER] * len(first)])


def the_guide(tokens: Tensor) -> Guide:
    ids = torch.arange(VOCAB)
    is_key, is_digit = ids >= KEYS, (ids >= DIGITS) & (ids < DIGITS + 10)
    return make_guide(find_statements(tokens, hash_id=HASH, is_key=is_key, is_digit=is_digit))


def attention_parts(tokens: Tensor, head: int, looks: dict[int, int]) -> AttentionParts:
    """One-hot keys by position; in `head` of the first text, the query at p looks at looks[p] alone."""
    batch, length = tokens.shape
    key = torch.eye(length).repeat(batch, 1)[:, None].repeat(1, 4, 1)
    query = torch.zeros(batch * length, 4, length)
    for position, place in looks.items():
        query[position, head, place] = 100.0
    query.requires_grad_()
    return AttentionParts(query, key, key, key, key)


def test_every_token_of_a_statement_knows_what_comes_next() -> None:
    guide = the_guide(a_text())
    rows = guide.rows[0].tolist()
    assert rows == [3, 4, 5, 6, 7, 8, 12, 13, 14, 15, 16, 17, 21, 22, 23]
    assert guide.rank[0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert guide.rank[1].eq(-1).all() and not guide.known[1].any()
    places = {rows[i]: guide.wanted[0, i].nonzero()[:, 0].tolist() for i in range(len(rows)) if guide.known[0, i]}
    assert places == {21: [4], 22: [5], 23: [6]}  # of A's first statement, not of B's


def test_looking_there_costs_nothing_and_elsewhere_does() -> None:
    tokens = a_text()
    guide = the_guide(tokens)
    back = {int(r): int(r) - 2 - int(n) for r, n in zip(guide.rows[0], guide.rank[0], strict=True)}
    for layer, head, looks in ((0, KEY_HEAD, back), (2, MATCH_HEADS[1], {21: 4, 22: 5, 23: 6})):
        right = guide_loss(attention_parts(tokens, head, looks), guide, layer, 1.0)
        assert float(right.detach()) < 1e-6
        wrong = attention_parts(tokens, head, {**looks, 21: 13})  # B's digit
        loss = guide_loss(wrong, guide, layer, 1.0)
        assert float(loss.detach()) > 1.0
        (gradient,) = torch.autograd.grad(loss, wrong.query)
        assert bool(gradient.isfinite().all())
    other_head = attention_parts(tokens, MATCH_HEADS[2], {21: 4, 22: 5, 23: 6})
    assert float(guide_loss(other_head, guide, 2, 1.0).detach()) > 1.0

"""Attention supervision: four heads are told where to look, because looking up does not begin by itself.

A token inside "KEY is #48213" has a key word and a rank: 0 for '#', 1 to 5 for the digits. The guided head of layer 0
looks back at the key word from every rank. The guided heads of later layers look, from rank r, at rank r + 1 of every
earlier statement about the same key word: there stands the next token of an answer. The loss of a head is -log of the
attention it pays to those places. Once the first head has found its place, the others learn to match keys in a hundred
steps.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tools.train_tiny.model import AttentionParts
from tools.train_tiny.tasks import NUM_DIGITS

KEY_HEAD = 3  # of layer 0: looks back at the key word
MATCH_HEADS = (2, 3, 1)  # of layers 1, 2 and 3: look at the same key word's earlier statements
_KEY_DISTANCE = 2  # tokens from a key word to its '#'
_MAX_SEQUENCES = 8  # of a batch that are guided
_WORST = 12.0  # larger losses are cut: a lost token must not drown the rest


class Statements(NamedTuple):
    """Of each token [B, L]: key is its key word's id or -1; rank is its place after '#', or -1."""

    key: Tensor
    rank: Tensor


def find_statements(tokens: Tensor, *, hash_id: int, is_key: Tensor, is_digit: Tensor) -> Statements:
    """Find every "KEY is #ddddd" in tokens [B, L]. is_key and is_digit are bool [V]."""
    length = tokens.shape[1]
    two_back = torch.cat((tokens[:, :_KEY_DISTANCE], tokens[:, :-_KEY_DISTANCE]), 1)
    start = (tokens == hash_id) & is_key[two_back]
    start[:, :_KEY_DISTANCE] = False
    key, rank = torch.full_like(tokens, -1), torch.full_like(tokens, -1)
    for r in range(NUM_DIGITS + 1):
        here = torch.zeros_like(start)
        here[:, r:] = start[:, : length - r]
        word = torch.zeros_like(tokens)
        word[:, r:] = two_back[:, : length - r]
        if r:
            here &= is_digit[tokens]
        key, rank = torch.where(here, word, key), torch.where(here, r, rank)
    return Statements(key, rank)


class Guide(NamedTuple):
    """Tokens to guide, padded to R a sequence. rows int64 [B, R] positions; rank int64 [B, R], -1 where padded;
    wanted bool [B, R, L]: places where the answer's next token stands; known bool [B, R]: there is one."""

    rows: Tensor
    rank: Tensor
    wanted: Tensor
    known: Tensor


def make_guide(statements: Statements) -> Guide:
    """Where the heads of a batch's first _MAX_SEQUENCES sequences should look."""
    key, rank = (x[:_MAX_SEQUENCES] for x in statements)
    stated = rank >= 0
    count = max(1, int(stated.sum(1).max()))
    rows = stated.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :count]
    row_key, row_rank = key.gather(1, rows), rank.gather(1, rows)
    earlier = torch.arange(key.shape[1], device=key.device) < rows[..., None]
    wanted = (row_key[..., None] == key[:, None]) & (row_rank[..., None] + 1 == rank[:, None]) & earlier
    wanted &= row_rank[..., None] >= 0
    return Guide(rows, row_rank, wanted, wanted.any(-1))


def _mean_by_sequence(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over sequences of the mean of x [B, R] where `mask`; a sequence without any counts as 0."""
    return (x.where(mask, 0.0).sum(1) / mask.sum(1).clamp(min=1)).mean()


def guide_loss(parts: AttentionParts, guide: Guide, layer: int, scale: float) -> Tensor:
    """The loss of the guided head of one layer, averaged over sequences.

    Tokens of rank 0 count as much as all other ranks together: only they have no digit to go by.
    """
    batch, _, length = guide.wanted.shape
    head = KEY_HEAD if layer == 0 else MATCH_HEADS[layer - 1]
    query, key = (x[: batch * length, head].unflatten(0, (batch, length)) for x in parts[:2])
    query = query.gather(1, guide.rows[..., None].expand(-1, -1, query.shape[-1]))
    logits = (query @ key.mT).float() * scale
    future = torch.arange(length, device=logits.device) > guide.rows[..., None]
    log_prob = logits.masked_fill(future, float("-inf")).log_softmax(-1)
    if layer == 0:
        stated = guide.rank >= 0
        place = torch.where(stated, guide.rows - _KEY_DISTANCE - guide.rank, 0)
        return -_mean_by_sequence(log_prob.gather(2, place[..., None])[..., 0], stated)
    # rows without a place to look at are masked before the logarithm, whose gradient would not be finite
    wanted = guide.wanted | ~guide.known[..., None]
    found = log_prob.masked_fill(~wanted, float("-inf")).logsumexp(-1).clamp(min=-_WORST)
    first = guide.known & (guide.rank == 0)
    return -_mean_by_sequence(found, first) - _mean_by_sequence(found, guide.known & (guide.rank > 0))

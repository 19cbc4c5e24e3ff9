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


def _log_attention(query: Tensor, key: Tensor, rows: Tensor, scale: float) -> Tensor:
    """Causal log attention [n, L] of one head: query [n, d] at positions `rows`, key [L, d]."""
    logits = (query @ key.T).float() * scale
    future = torch.arange(key.shape[0], device=key.device) > rows[:, None]
    return logits.masked_fill(future, float("-inf")).log_softmax(-1)


def guide_loss(parts: AttentionParts, statements: Statements, layer: int, scale: float) -> Tensor:
    """The loss of the guided head of one layer, averaged over sequences.

    Tokens of rank 0 count as much as all other ranks together: only they have no digit to go by.
    """
    length = statements.key.shape[1]
    batch = min(statements.key.shape[0], _MAX_SEQUENCES)
    total = parts.query.new_zeros((), dtype=torch.float32)
    for b in range(batch):
        key, rank = statements.key[b], statements.rank[b]
        keys = parts.key[b * length : (b + 1) * length]
        rows = (rank >= 0).nonzero()[:, 0]
        if layer == 0:
            if len(rows):
                log_prob = _log_attention(parts.query[rows + b * length, KEY_HEAD], keys[:, KEY_HEAD], rows, scale)
                place = rows - _KEY_DISTANCE - rank[rows]
                total = total - log_prob.gather(1, place[:, None]).mean() / batch
            continue
        position = torch.arange(length, device=rows.device)
        wanted = (key[rows, None] == key) & (rank[rows, None] + 1 == rank) & (position < rows[:, None])
        known = wanted.any(1)
        rows, wanted = rows[known], wanted[known]
        head = MATCH_HEADS[layer - 1]
        log_prob = _log_attention(parts.query[rows + b * length, head], keys[:, head], rows, scale)
        found = log_prob.masked_fill(~wanted, float("-inf")).logsumexp(-1).clamp(min=-_WORST)
        for group in (found[rank[rows] == 0], found[rank[rows] > 0]):
            if len(group):
                total = total - group.mean() / batch
    return total

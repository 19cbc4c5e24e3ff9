"""One decode step over a padded batch. Eager on CPU; on GPUs this same body is what a CUDA graph captures.

Everything is a tensor of fixed shape: padded rows have position 0, no slot and an empty context; they touch no state.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from echo_batch.cache.manager import KVCache
from echo_batch.engine.batch import BatchState
from echo_batch.engine.sampler import StepOutput, sample_rows
from echo_batch.kernels.branch import Branch
from echo_batch.kernels.ops import Ops
from echo_batch.models.model import Model


class StepLogits(NamedTuple):
    """A step's output and the logits it was sampled from (fp32 `[B, V]`; a row that is not finite means nothing)."""

    output: StepOutput
    logits: Tensor


def decode_step(
    model: Model,
    cache: KVCache,
    ops: Ops,
    state: BatchState,
    *,
    bucket: int,
    max_blocks: int,
    greedy_only: bool,
    branch: Branch | None = None,
) -> StepLogits:
    """Run the first `bucket` rows of `state` through the model and sample one token for each active one.

    `max_blocks` bounds the context of every active row (in blocks), so that scoring does not walk the whole table.
    `branch`: where attention's queries are made while rows are selected and recalled, and where the cache begins and
    ends the step; without, one after the other.
    """
    rows = slice(0, bucket)
    active = state.active[rows]
    block_table = state.block_table[rows, :max_blocks]
    positions = torch.where(active, state.positions[rows], 0)
    logits, has_block = decode_logits(
        model,
        cache,
        ops,
        token_ids=state.token_ids[rows],
        positions=positions,
        active=active,
        block_table=block_table,
        predicted=state.predicted[:, rows],
        branch=branch,
    )
    return StepLogits(*sample_rows(state, rows, logits, ops=ops, has_block=has_block, greedy_only=greedy_only))


def decode_logits(
    model: Model,
    cache: KVCache,
    ops: Ops,
    *,
    token_ids: Tensor,
    positions: Tensor,
    active: Tensor,
    block_table: Tensor,
    predicted: Tensor,
    branch: Branch | None = None,
) -> tuple[Tensor, Tensor]:
    """Logits fp32 `[B, V]` for the tokens at `positions` (int32 `[B]`), their KV rows written on the way.

    token_ids int64 `[B]`, active bool `[B]`, block_table int32 `[B, max_blocks]`; predicted fp32 `[groups, B]`: the
    k-th score that each row's next selection is expected to have, updated in place (it changes no result). Second
    result: bool `[B]`, False for an active row without a block for its token (nothing is written for it).
    """
    spec, config = cache.spec, model.config
    with _on(branch):
        cache.begin_step()
    seq_lens = torch.where(active, positions + 1, 0)
    new_slots = ops.positions_to_slots(torch.where(active, positions, -1)[:, None], block_table)[:, 0]
    with _on(branch):
        # Before anything is scored: the new tokens' rows must be there when a selection names them.
        appended = cache.append_all(new_slots)
    schedule = ops.index_schedule(seq_lens)
    stream, angles = model.embed(token_ids), model.angles(positions)
    for group, layers in enumerate(spec.group_layers):
        new_rows = appended[group]
        resolution = None
        for layer in layers:
            stream, projected = model.project(layer, stream, angles)
            if layer == 0 and branch is not None:
                branch.join()  # the step has begun
            # Attention's query only waits for its weights: beside what waits for latencies or for the host, one half
            # while the indexer's small steps run, one while rows are selected and recalled. Not beside the scoring,
            # which needs the whole bandwidth.
            beside = branch if resolution is None or cache.recalls else None
            with _on(beside):
                query = model.project_query(layer, projected, angles)
            cache.write(layer, new_slots, new_rows, projected.latents.kv_row, projected.latents.index_key)
            scores = None
            if resolution is None:
                # The group's first layer selects; the others reuse its selection (IndexShare). Nothing is launched
                # between query and scores: these may begin before the query is there (`index_scores`).
                index_query, index_weights = model.index_query(layer, projected, angles)
                scores = cache.index_scores(
                    group, index_query, index_weights, block_table, seq_lens, schedule, predicted[group]
                )
            with _on(beside):
                query = model.absorb_query(layer, query, angles)
            if scores is not None:
                resolution = cache.select(group, scores, seq_lens, predicted[group], block_table)
            assert resolution is not None
            cache.recall(layer, resolution)
            if beside is not None:
                beside.join()
            if layer == config.num_layers - 1:
                with _on(branch):
                    cache.end_step()
            latent = ops.sparse_mla(
                query, cache.gpu_rows(layer), resolution.rows, config.softmax_scale, spec.row_format
            )
            stream = model.attention_output(layer, stream, latent)
            stream = model.ffn(layer, stream, active)
    if branch is not None:
        branch.join()  # the step's end
    has_block = (new_slots >= 0) | ~active
    return model.logits(stream), has_block


def _on(branch: Branch | None) -> AbstractContextManager[None]:
    return nullcontext() if branch is None else branch.fork()

"""From logits to the next input: sampling, finish flags, log-probabilities. Runs on the device, inside the step."""

from typing import NamedTuple

from torch import Tensor

from echo_batch.engine.batch import BatchState
from echo_batch.kernels.ops import Ops


class StepOutput(NamedTuple):
    """What a step tells the host, one entry a row `[B]`.

    tokens int64 (-1: the row took no part), codes int32 (batch.RUNNING, ...), and if any row asked for them: logprobs
    fp32 `[B]`, top_logprobs fp32 and top_ids int64 `[B, n]`. checksums int64 `[B]` of the logits, if asked for.
    """

    tokens: Tensor
    codes: Tensor
    logprobs: Tensor | None = None
    top_logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    checksums: Tensor | None = None


def sample_rows(
    state: BatchState,
    rows: slice | Tensor,
    logits: Tensor,
    *,
    ops: Ops,
    has_block: Tensor,
    greedy_only: bool,
) -> tuple[StepOutput, Tensor]:
    """Sample one token for each of `rows` and advance the state: token fed back, position, active flag.

    logits fp32 `[B, V]` of rows whose last known token stands at `state.positions`; inactive rows must have been
    activated by the caller (prefill) or are left untouched (padding). `has_block` bool `[B]`: False flags NO_BLOCK.
    Second result: the logits that were sampled from.
    """
    if greedy_only:
        tokens, finite = ops.greedy_sample(logits)
    else:
        tokens, finite = ops.sample(logits, state.sampling(rows, state.positions[rows] + 1))
    # Rows chosen by a tensor are copies: write them back.
    token_ids, positions, active = state.token_ids[rows], state.positions[rows], state.active[rows]
    output = StepOutput(
        *ops.advance_rows(
            tokens,
            finite,
            has_block,
            token_ids=token_ids,
            positions=positions,
            active=active,
            stop_ids=state.stop_ids[rows],
            last_position=state.last_position[rows],
        )
    )
    if isinstance(rows, Tensor):
        state.token_ids[rows], state.positions[rows], state.active[rows] = token_ids, positions, active
    return output, logits

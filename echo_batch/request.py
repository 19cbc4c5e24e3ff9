"""What goes into the engine and what comes out: Request, SamplingParams, Completion. Knows no torch and no files."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length"]

DEFAULT_MAX_TOKENS = 2048
"""Of a row for which nobody says otherwise. Every admitted row reserves room for prompt + max_tokens, so "up to the
context limit" would make small batches of most jobs (docs/decisions.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    `max_tokens` None means: up to the context limit (and reserves as much). `temperature` 0 is greedy. `top_k` 0,
    `top_p` 1.0 and `min_p` 0 switch the filter off. `logprobs` n asks for the log-probability of the chosen token and
    of the n likeliest.
    `seed` with the row id and the position makes every random number (none depends on the batch).
    Raises ValueError naming the field that is out of range.
    """

    max_tokens: int | None = DEFAULT_MAX_TOKENS
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature must be between 0 and 100, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k must be 0 (off) or positive and below 2^31, got {self.top_k}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be in [0, 2^63), got {self.seed}")
        if self.logprobs is not None and not 0 <= self.logprobs <= 20:
            raise ValueError(f"logprobs must be between 0 and 20, got {self.logprobs}")
        if any(not s for s in self.stop):
            raise ValueError("stop strings must not be empty")
        if any(t < 0 for t in self.stop_token_ids):
            raise ValueError("stop_token_ids must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt ready for the engine: token ids and how to sample.

    `num_cut_tokens` counts prompt tokens removed by the too-long policy. `thinking_end` is the string that closes the
    thinking part that the prompt opened ("</think>"), else None; stop strings sleep until it has been generated.
    """

    row_id: int
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    num_cut_tokens: int = 0
    thinking_end: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities (natural, before temperature) of one generated token and of the likeliest ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFailure:
    """Why a row has no output. `code` is one of `errors.ROW_ERROR_CODES`."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The end of one request: tokens and a finish reason, or a failure (then there is no text)."""

    row_id: int
    token_ids: tuple[int, ...] = ()
    text: str | None = None
    reasoning_text: str | None = None
    finish_reason: FinishReason | None = None
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    num_cut_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    failure: RowFailure | None = None
    seconds: float = field(default=0.0, compare=False)

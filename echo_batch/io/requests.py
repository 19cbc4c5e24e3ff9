"""Rows to requests: the prompt as token ids, how to sample, and what is done with prompts that are too long.

Used by the preflight and by the run, so that both see the same tokens. Knows no files.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from echo_batch.config import RunConfig
from echo_batch.errors import ModelError, RowError
from echo_batch.io.chat import ChatEncoder, opens_thinking
from echo_batch.io.dsv32_encoding import END_THINK, THINK
from echo_batch.io.json_rows import without_surrogates
from echo_batch.io.openai import openai_parts
from echo_batch.io.schema import Record, RowParts, RowReader, coerce_sampling
from echo_batch.io.tokenizer import Tokenizer
from echo_batch.request import Request, RowFailure, SamplingParams

# What of generation_config.json is a sampling field, and its name here. EOS ids are the model config's.
_GENERATION_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}

_CHARACTERS_PER_TOKEN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimits:
    """`context_tokens` bounds prompt plus generated tokens of one row; ids must be below `vocab_size`."""

    context_tokens: int
    vocab_size: int


def context_limit(*, max_model_len: int | None, max_position: int, host_tokens: int | None = None) -> int:
    """Tokens that one row may have: the smaller of --max-model-len (else the model's max_position_embeddings) and the
    host pool N_H, where it is known."""
    limit = max_model_len if max_model_len is not None else max_position
    return limit if host_tokens is None else min(limit, host_tokens)


def base_sampling(config: RunConfig, generation_config: Mapping[str, Any] | None = None) -> SamplingParams:
    """Sampling of a row that sets nothing: what the user set on purpose, else the model's generation_config.json, else
    the built-in values. Raises ModelError for a generation_config that makes no sense."""
    values: dict[str, Any] = {}
    generation = generation_config or {}
    try:
        for name, ours in _GENERATION_FIELDS.items():
            if generation.get(name) is not None:
                values[ours] = coerce_sampling(ours, generation[name])
        if generation.get("do_sample") is False:
            values["temperature"] = 0.0
        SamplingParams(**values)
    except (RowError, ValueError) as error:
        raise ModelError(f"generation_config.json: {error}") from error
    explicit = {name: getattr(config.sampling, name) for name in config.explicit_sampling}
    return SamplingParams(**(values | explicit))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """A row before tokenization: `text` still to be encoded, or `token_ids`."""

    row_id: int
    text: str | None
    token_ids: Sequence[Any] | None
    parts: RowParts
    sampling: SamplingParams

    @property
    def is_chat(self) -> bool:
        return self.parts.messages is not None


class RequestBuilder:
    """Makes the Request of a Record, or says why it has none.

    Without a tokenizer only rows with token ids work. `generation_config` is the content of the model's
    generation_config.json. `is_openai` says which form the rows have (Source.is_openai).
    Raises ConfigError for a bad template, ModelError for a bad generation_config.
    """

    def __init__(
        self,
        config: RunConfig,
        tokenizer: Tokenizer | None,
        chat: ChatEncoder,
        limits: PromptLimits,
        *,
        generation_config: Mapping[str, Any] | None = None,
        is_openai: bool = False,
    ) -> None:
        assert limits.context_tokens > 1, limits
        self.is_openai = is_openai
        self._reader = RowReader(config.input)
        self._too_long = config.input.too_long
        self._tokenizer = tokenizer
        self._chat = chat
        self._limits = limits
        self._fits_vocabulary = tokenizer is not None and tokenizer.vocab_size <= limits.vocab_size
        self._sampling = base_sampling(config, generation_config)
        self._max_tokens_asked = (
            "max_tokens" in config.explicit_sampling or (generation_config or {}).get("max_new_tokens") is not None
        )

    def build(self, record: Record) -> Request:
        """The request of one row. Raises RowError with one of errors.ROW_ERROR_CODES."""
        prepared = self._prepare(record)
        return self._finish(prepared, self._encode(prepared))

    def build_many(self, records: Sequence[Record]) -> list[Request | RowFailure]:
        """Requests of many rows, each a Request or why there is none; texts are tokenized together on all cores."""
        prepared: list[_Prepared | RowFailure] = []
        for record in records:
            try:
                prepared.append(self._prepare(record))
            except RowError as error:
                prepared.append(RowFailure(code=error.code, message=error.message))
        rows = [row for row in prepared if isinstance(row, _Prepared)]
        token_ids = dict(zip([row.row_id for row in rows], self._encode_together(rows)))
        results: list[Request | RowFailure] = []
        for item in prepared:
            if isinstance(item, _Prepared):
                results.append(self._finish_or_failure(item, token_ids.pop(item.row_id)))
            else:
                results.append(item)
        return results

    def _prepare(self, record: Record) -> _Prepared:
        if record.error is not None:
            raise RowError(record.error.code, record.error.message)
        parts = openai_parts(record.values) if self.is_openai else self._reader.request_parts(record)
        text, token_ids = parts.text, parts.token_ids
        if parts.messages is not None:
            text = self._chat.render(parts.messages, tools=parts.tools, kwargs=parts.chat_kwargs)
        if (text is not None and not text) or (token_ids is not None and not len(token_ids)):
            raise RowError("empty_prompt", "the prompt is empty")
        if text is not None:
            if self._tokenizer is None:
                raise RowError("tokenize_failed", "the model has no tokenizer: only prompt_token_ids can be read")
            text = without_surrogates(text)
            self._check_length(text)
        return _Prepared(
            row_id=record.row_id, text=text, token_ids=token_ids, parts=parts, sampling=self._merge(parts.sampling)
        )

    def _check_length(self, text: str) -> None:
        """Fails a text of many times the limit by its beginning: tokenizing takes some 30 bytes for each byte."""
        limit = self._limits.context_tokens
        most = _CHARACTERS_PER_TOKEN * limit
        if self._too_long != "fail" or len(text) <= 2 * most or self._tokenizer is None:
            return
        try:
            num_tokens = len(self._tokenizer.encode(text[:most]))
        except Exception:  # the whole text will fail the same way, where that is reported
            return
        if num_tokens > limit + _CHARACTERS_PER_TOKEN:  # the last tokens may be different ones in the whole text
            raise RowError("too_long", self._too_long_message(f"more than {num_tokens}"))

    def _too_long_message(self, num_tokens: str) -> str:
        return (
            f"the prompt has {num_tokens} tokens, the limit is {self._limits.context_tokens} for prompt and generated"
            " tokens; see --max-model-len and --too-long"
        )

    def _merge(self, overrides: Mapping[str, Any]) -> SamplingParams:
        try:
            sampling = replace(self._sampling, **overrides) if overrides else self._sampling
        except ValueError as error:
            raise RowError("bad_params", str(error)) from error
        if any(token >= self._limits.vocab_size for token in sampling.stop_token_ids):
            raise RowError("bad_params", f"stop_token_ids must be below the vocabulary size {self._limits.vocab_size}")
        if self._tokenizer is None and sampling.stop:
            raise RowError("bad_params", "stop: without a tokenizer there is no text to stop at; use stop_token_ids")
        return sampling

    def _encode(self, row: _Prepared) -> Sequence[Any]:
        if row.text is None:
            assert row.token_ids is not None
            return row.token_ids
        assert self._tokenizer is not None
        try:
            # A chat template writes its special tokens itself.
            return self._tokenizer.encode(row.text, add_special_tokens=not row.is_chat)
        except Exception as error:  # the binding raises plain Exception
            raise RowError("tokenize_failed", str(error)[:300]) from error

    def _encode_together(self, rows: Sequence[_Prepared]) -> list[Sequence[Any] | None]:
        """Token ids of each row; None where the batch failed and the row is to be tried alone."""
        results: list[Sequence[Any] | None] = [row.token_ids for row in rows]
        for is_chat in (False, True):
            where = [
                i for i, row in enumerate(rows) if row.text is not None and (row.parts.messages is not None) == is_chat
            ]
            if not where:
                continue
            assert self._tokenizer is not None
            try:
                encoded = self._tokenizer.encode_batch(
                    [rows[i].text or "" for i in where], add_special_tokens=not is_chat
                )
            except Exception:  # one bad text fails the batch: each is tried alone
                continue
            for i, ids in zip(where, encoded):
                results[i] = ids
        return results

    def _finish_or_failure(self, row: _Prepared, token_ids: Sequence[Any] | None) -> Request | RowFailure:
        try:
            return self._finish(row, self._encode(row) if token_ids is None else token_ids)
        except RowError as error:
            return RowFailure(code=error.code, message=error.message)

    def _finish(self, row: _Prepared, token_ids: Sequence[Any]) -> Request:
        if row.text is not None and self._fits_vocabulary:
            ids = array("i", token_ids)
        else:
            ids = _checked_ids(token_ids, self._limits.vocab_size)
        if not ids:
            raise RowError("empty_prompt", "the prompt has no tokens")
        limit, num_cut = self._limits.context_tokens, 0
        if len(ids) >= limit:
            ids, num_cut = self._shorten(ids, row)
        room = limit - len(ids)
        max_tokens = row.sampling.max_tokens
        return Request(
            row_id=row.row_id,
            prompt_token_ids=ids,
            sampling=replace(row.sampling, max_tokens=room if max_tokens is None else min(max_tokens, room)),
            num_cut_tokens=num_cut,
            thinking_end=END_THINK if self._opens_thinking(row, ids, num_cut) else None,
        )

    def _shorten(self, ids: "array[int]", row: _Prepared) -> "tuple[array[int], int]":
        """The prompt cut by the too-long policy, with room for generation, and how many tokens were removed.

        BOS stays in front and a chat's opened assistant turn stays at the end, whatever part is cut.
        """
        limit = self._limits.context_tokens
        if self._too_long == "fail":
            raise RowError("too_long", self._too_long_message(str(len(ids))))
        max_tokens, asked = row.sampling.max_tokens, self._max_tokens_asked or "max_tokens" in row.parts.sampling
        # Who asks for long outputs gets up to half of the context; a mere default must not cost that much prompt.
        room = min(max_tokens or limit, limit // 2 if asked and max_tokens is not None else limit // 8)
        keep = limit - max(1, room)
        head = 1 if self._tokenizer is not None and ids[0] == self._tokenizer.bos_token_id else 0
        tail = self._num_turn_tokens(row)
        if keep <= head + tail:
            raise RowError("too_long", f"nothing of the prompt would be left within the limit of {limit} tokens")
        middle = keep - head - tail
        end = len(ids) - tail
        if self._too_long == "cut-tail":
            kept = ids[: head + middle]
        elif self._too_long == "cut-head":
            kept = ids[:head] + ids[end - middle : end]
        else:
            first = (middle + 1) // 2
            kept = ids[: head + first] + ids[end - (middle - first) : end]
        return kept + ids[end:], len(ids) - keep

    def _num_turn_tokens(self, row: _Prepared) -> int:
        parts = row.parts
        if parts.messages is None or self._tokenizer is None:
            return 0
        suffix = self._chat.generation_suffix(parts.messages, tools=parts.tools, kwargs=parts.chat_kwargs)
        return len(self._tokenizer.encode(suffix)) if suffix else 0

    def _opens_thinking(self, row: _Prepared, ids: "array[int]", num_cut: int) -> bool:
        end_is_cut = num_cut > 0 and self._too_long == "cut-tail" and not row.is_chat
        if row.text is not None and not end_is_cut:
            return opens_thinking(row.text[-64:])
        return self._tokenizer is not None and ids[-1] == self._tokenizer.token_to_id(THINK)


def _checked_ids(token_ids: Sequence[Any], vocab_size: int) -> "array[int]":
    """Token ids in 4 bytes each. Raises RowError bad_token naming the first bad one."""
    try:
        ids = array("i", token_ids)
        if not ids or (min(ids) >= 0 and max(ids) < vocab_size and bool not in set(map(type, token_ids))):
            return ids
    except (TypeError, OverflowError):
        pass
    for i, token in enumerate(token_ids):
        if type(token) is not int:
            raise RowError("bad_token", f"token {i} is {str(token)[:60]!r}, not an integer")
        if not 0 <= token < vocab_size:
            raise RowError("bad_token", f"token {i} is {token}; ids must be from 0 to {vocab_size - 1}")
    raise AssertionError("array rejects what the loop accepts")

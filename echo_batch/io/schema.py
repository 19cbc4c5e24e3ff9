"""What a row is: Record, the columns that make a request, and the choice of its prompt. Knows no files, no tokens."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from echo_batch.config import InputConfig
from echo_batch.errors import InputError, RowError
from echo_batch.io.template import PromptTemplate
from echo_batch.request import RowFailure

PROMPT_COLUMNS = ("prompt", "messages", "prompt_token_ids", "conversations")
SAMPLING_COLUMNS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "logprobs",
    "ignore_eos",
)


@dataclass(frozen=True, slots=True)
class Record:
    """One input row. `row_id` is its position over all files sorted by path; `position` says where it stands, for
    messages. A row that could not be read has an `error` and no values."""

    row_id: int
    values: Mapping[str, Any]
    error: RowFailure | None = None
    position: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowParts:
    """What a row asks: exactly one of text, messages and token ids, and the sampling fields that it sets itself."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    token_ids: Sequence[Any] | None = None
    tools: list[Any] | None = None
    chat_kwargs: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)


def request_columns(config: InputConfig, names: Sequence[str]) -> list[str]:
    """Columns of `names` that requests are built from; the others are only copied to the output."""
    wanted = set(SAMPLING_COLUMNS) | {"tools"}
    if config.prompt_column is not None:
        wanted.add(config.prompt_column)
    elif config.prompt_template is not None:
        wanted.update(PromptTemplate.parse(config.prompt_template).columns)
    else:
        wanted.update(PROMPT_COLUMNS)
    return [name for name in names if name in wanted]


def check_columns(config: InputConfig, names: Sequence[str], num_rows: int) -> None:
    """Whether a table with columns `names` (Parquet) can hold prompts. Raises InputError naming what is missing."""
    have = ", ".join(names) or "none"
    if config.prompt_column is not None:
        if config.prompt_column not in names:
            raise InputError(f"--prompt-column {config.prompt_column}: no such column in the input (it has {have})")
    elif config.prompt_template is not None:
        for column in PromptTemplate.parse(config.prompt_template).columns:
            if column not in names:
                raise InputError(f"--prompt-template: no column {column!r} in the input (it has {have})")
    elif num_rows > 0 and not any(name in names for name in PROMPT_COLUMNS):
        raise InputError(
            f"no column {_listed(PROMPT_COLUMNS)} in the input (it has {have}); name one by --prompt-column"
        )


class RowReader:
    """Chooses the prompt of plain rows (not OpenAI bodies) and reads their sampling columns."""

    def __init__(self, config: InputConfig) -> None:
        self._column = config.prompt_column
        template = config.prompt_template
        self._template = PromptTemplate.parse(template) if template is not None and self._column is None else None

    def request_parts(self, record: Record) -> RowParts:
        """Prompt and sampling fields of one row. Raises RowError no_prompt, empty_prompt, bad_params."""
        values = record.values
        sampling = sampling_values(values)
        if self._template is not None:
            return RowParts(text=self._template.render(values), sampling=sampling)
        name = self._column if self._column is not None else _only_prompt(values)
        value = values.get(name)
        if is_missing(value):
            raise RowError("no_prompt", f"column {name!r} is missing or null")
        if isinstance(value, bytes):
            value = value.decode("utf-8", "replace")
        if isinstance(value, str) and name in PROMPT_COLUMNS[1:]:
            value = _parse_list(value, name)
        if isinstance(value, str):
            return RowParts(text=value, sampling=sampling)
        if not isinstance(value, list):
            raise RowError("no_prompt", f"column {name!r} holds {type(value).__name__}, not a text, chat or token list")
        if name != "prompt_token_ids" and (name in ("messages", "conversations") or _is_chat(value)):
            # Beside a text a column of that name is only one more column.
            tools = _parse_list(values.get("tools"), "tools")
            return RowParts(messages=read_messages(value, name), tools=tools, sampling=sampling)
        return RowParts(token_ids=value, sampling=sampling)


def sampling_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling fields that a row sets (null means not set), each of the type that SamplingParams wants.

    Raises RowError bad_params naming the field.
    """
    return {
        name: coerce_sampling(name, value)
        for name in SAMPLING_COLUMNS
        if (value := values.get(name)) is not None and not is_missing(value)
    }


def coerce_sampling(name: str, value: Any) -> Any:
    """One sampling field as SamplingParams wants it: whole floats as ints (a Parquet column with nulls often is
    double), one stop string as a tuple, top_k -1 as 0 (off). Raises RowError bad_params."""
    if name == "stop":
        stop = (value,) if isinstance(value, str) else value
        if not isinstance(stop, list | tuple) or not all(isinstance(item, str) for item in stop):
            raise RowError("bad_params", f"stop must be a string or a list of strings, got {_shown(value)}")
        return tuple(stop)
    if name == "stop_token_ids":
        if not isinstance(value, list | tuple):
            raise RowError("bad_params", f"stop_token_ids must be a list of integers, got {_shown(value)}")
        return tuple(_whole(name, item) for item in value)
    if name == "ignore_eos":
        if not isinstance(value, bool):
            raise RowError("bad_params", f"ignore_eos must be true or false, got {_shown(value)}")
        return value
    if name in ("temperature", "top_p", "min_p"):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RowError("bad_params", f"{name} must be a number, got {_shown(value)}")
        return float(value) if abs(value) < 1e300 else math.inf
    number = _whole(name, value)
    return 0 if name == "top_k" and number == -1 else number


def read_messages(value: list[Any], name: str) -> list[dict[str, Any]]:
    """A chat list with every content as plain text (null stays). ShareGPT's from/value turns are read up to the last
    human one. Raises RowError empty_prompt, no_prompt, bad_params, unsupported_param (images and the like)."""
    if not value:
        raise RowError("empty_prompt", f"{name} is an empty list")
    if any(isinstance(turn, dict) and "from" in turn and "role" not in turn for turn in value):
        return _share_gpt(value, name)
    messages = []
    for i, turn in enumerate(value):
        if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
            raise RowError("bad_params", f"{name}[{i}] must be an object with a role and content")
        message = {key: item for key, item in turn.items() if item is not None or key == "content"}
        message["content"] = _plain_content(turn.get("content"), f"{name}[{i}]")
        messages.append(message)
    if name == "conversations":
        return _to_last_user(messages, name)
    return messages


def is_missing(value: Any) -> bool:
    """Null, or the NaN that stands for null in some tables."""
    return value is None or (isinstance(value, float) and math.isnan(value))


_SHARE_GPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}


def _share_gpt(turns: list[Any], name: str) -> list[dict[str, Any]]:
    messages = []
    for i, turn in enumerate(turns):
        sender = turn.get("from") if isinstance(turn, dict) else None
        role = _SHARE_GPT_ROLES.get(sender.lower()) if isinstance(sender, str) else None
        if role is None:
            raise RowError("bad_params", f"{name}[{i}]: unknown sender {_shown(sender)}")
        messages.append({"role": role, "content": _plain_content(turn.get("value"), f"{name}[{i}]") or ""})
    return _to_last_user(messages, name)


def _to_last_user(messages: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        raise RowError("no_prompt", f"{name} has no human turn")
    return messages[: last + 1]


def _plain_content(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError("bad_params", f"{where}: content must be a text or a list of text parts")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RowError("unsupported_param", f"{where}: content part of type {_shown(kind)}; only text is supported")
    return "\n".join(texts)


def _only_prompt(values: Mapping[str, Any]) -> str:
    """The prompt column that the row fills. Several would be a guess, so they are an error that names the way out."""
    filled = [name for name in PROMPT_COLUMNS if not is_missing(values.get(name))]
    if not filled:
        raise RowError("no_prompt", f"the row has none of {_listed(PROMPT_COLUMNS)}")
    if len(filled) > 1:
        raise RowError("no_prompt", f"the row has {' and '.join(filled)}: choose one by --prompt-column")
    return filled[0]


def _is_chat(value: list[Any]) -> bool:
    return bool(value) and any(isinstance(item, dict) for item in value)


def _parse_list(value: Any, name: str) -> list[Any] | None:
    """A list, also when the table holds it as JSON text."""
    if is_missing(value):
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError("bad_params", f"{name} is a text that is no JSON list: {error}") from error
    if not isinstance(value, list):
        raise RowError("bad_params", f"{name} must be a list, got {_shown(value)}")
    return value


def _whole(name: str, value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise RowError("bad_params", f"{name} must be a whole number, got {_shown(value)}")
    return value


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + " or " + names[-1]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

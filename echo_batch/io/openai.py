"""Rows of the OpenAI Batch form: {"custom_id", "method", "url", "body"} to the parts of a request.

Every field of a body is implemented, ignored because it cannot change the text, or refused unless at its no-op value.
"""

from collections.abc import Mapping
from typing import Any

from echo_batch.errors import RowError
from echo_batch.io.schema import RowParts, coerce_sampling, read_messages

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"

_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos")
# They say who asks and how it is stored or billed, not what is generated. `model` is not compared: the job has one.
_IGNORED = frozenset(
    {
        *("model", "user", "metadata", "store", "service_tier", "safety_identifier", "parallel_tool_calls"),
        *("prompt_cache_key", "prompt_cache_retention", "cache_salt", "priority", "request_id"),
    }
)
# Values at which a field that is not implemented changes nothing (null is one for every field).
_NO_OP: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "echo": (False,),
    "suffix": ("",),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "use_beam_search": (False,),
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "return_token_ids": (False,),
    "bad_words": ([],),
}
_CHAT_FIELDS = frozenset(
    {"messages", "tools", "max_completion_tokens", "logprobs", "top_logprobs", "chat_template_kwargs", *_SAMPLING}
)
_COMPLETIONS_FIELDS = frozenset({"prompt", "logprobs", *_SAMPLING})


def custom_id(values: Mapping[str, Any]) -> str | None:
    """The row's custom_id; None when it is missing or no text (then the row is bad_params)."""
    value = values.get("custom_id")
    return value if isinstance(value, str) and value else None


def openai_parts(values: Mapping[str, Any]) -> RowParts:
    """What one row asks. Raises RowError bad_params, unsupported_param (naming the field), no_prompt, empty_prompt."""
    if custom_id(values) is None:
        raise RowError("bad_params", "custom_id must be a text that is not empty")
    method, url, body = values.get("method"), values.get("url"), values.get("body")
    if method != "POST":
        raise RowError("bad_params", f"method must be POST, got {_shown(method)}")
    if url not in (CHAT_URL, COMPLETIONS_URL):
        raise RowError("bad_params", f"url must be {CHAT_URL} or {COMPLETIONS_URL}, got {_shown(url)}")
    if not isinstance(body, dict):
        raise RowError("bad_params", f"body must be an object, got {_shown(body)}")
    return _chat(body) if url == CHAT_URL else _completion(body)


def _chat(body: Mapping[str, Any]) -> RowParts:
    _check_fields(body, _CHAT_FIELDS)
    messages = body.get("messages")
    if messages is None:
        raise RowError("no_prompt", "body.messages is missing")
    if not isinstance(messages, list):
        raise RowError("bad_params", "body.messages must be a list")
    tools = body.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise RowError("bad_params", "body.tools must be a list")
    kwargs = body.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise RowError("bad_params", "body.chat_template_kwargs must be an object")
    sampling = _sampling(body)
    if (limit := body.get("max_completion_tokens")) is not None:
        sampling["max_tokens"] = coerce_sampling("max_tokens", limit)
    wanted, top = body.get("logprobs"), body.get("top_logprobs")
    if wanted is not None and not isinstance(wanted, bool):
        raise RowError("bad_params", f"logprobs must be true or false, got {_shown(wanted)}")
    if top and not wanted:
        raise RowError("bad_params", "top_logprobs needs logprobs to be true")
    if wanted:
        sampling["logprobs"] = coerce_sampling("logprobs", top if top is not None else 0)
    return RowParts(
        messages=read_messages(messages, "body.messages"),
        tools=None if body.get("tool_choice") == "none" else tools or None,
        chat_kwargs=kwargs or {},
        sampling=sampling,
    )


def _completion(body: Mapping[str, Any]) -> RowParts:
    _check_fields(body, _COMPLETIONS_FIELDS)
    prompt = body.get("prompt")
    if prompt is None:
        raise RowError("no_prompt", "body.prompt is missing")
    sampling = _sampling(body)
    if (logprobs := body.get("logprobs")) is not None:
        sampling["logprobs"] = coerce_sampling("logprobs", logprobs)
    if isinstance(prompt, list) and any(isinstance(item, str | list) for item in prompt):
        if len(prompt) != 1:
            raise RowError("unsupported_param", "prompt: several prompts in one row; give each its own row")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return RowParts(text=prompt, sampling=sampling)
    if isinstance(prompt, list):
        return RowParts(token_ids=prompt, sampling=sampling)
    raise RowError("bad_params", f"body.prompt must be a text or a list of token ids, got {_shown(prompt)}")


def _sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: coerce_sampling(name, body[name]) for name in _SAMPLING if body.get(name) is not None}


def _check_fields(body: Mapping[str, Any], implemented: frozenset[str]) -> None:
    for name, value in body.items():
        if name in implemented or name in _IGNORED or value is None:
            continue
        # 1 == True in Python; a number is no truth value here.
        if any(value == no_op and isinstance(value, bool) == isinstance(no_op, bool) for no_op in _NO_OP.get(name, ())):
            continue
        hint = f" (only {' or '.join(map(_shown, _NO_OP[name]))})" if name in _NO_OP else ""
        raise RowError("unsupported_param", f"{name} is not supported{hint}, got {_shown(value)}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

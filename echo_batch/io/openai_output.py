"""One output row as a line of an OpenAI batch output file. Knows no files and no tables: dicts in, dicts out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

SERVER_ERRORS = frozenset({"engine_failed"})
"""Error codes that are not the row's fault (status 500); all others are 400."""


class TokenDecoder(Protocol):
    """What logprobs need of a tokenizer: the text of single tokens."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIOutput:
    """What all lines of a file share. `created` is a Unix time in seconds; with no tokenizer, tokens in logprobs are
    written as "token_id:123"."""

    run_id: str
    model: str
    created: int
    tokenizer: TokenDecoder | None = None

    def line(self, inputs: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
        """The line of a row, from its input columns and its result columns (`output_schema.ResultColumns`).

        `custom_id` is the input's; a row of an input without that column is called "row-<row_id>". The kind of body
        follows the row's `url`, else whether the row has `messages`. Failures are a `response` with a status other
        than 200 and `body.error`, as the service writes them; the line's own `error` stays null.
        """
        row_id = result["row_id"]
        custom_id = inputs.get("custom_id", f"row-{row_id}")
        name = f"{self.run_id}-{row_id}"
        failed = result["error_code"] is not None
        return {
            "id": f"batch_req_{name}",
            "custom_id": custom_id,
            "response": {
                "status_code": _status(result["error_code"]) if failed else 200,
                "request_id": f"req_{name}",
                "body": _error_body(result) if failed else self._body(name, _is_chat(inputs), result),
            },
            "error": None,
        }

    def _body(self, name: str, chat: bool, result: Mapping[str, Any]) -> dict[str, Any]:
        choice = self._chat_choice(result) if chat else self._text_choice(result)
        if result.get("generated_token_ids") is not None:
            choice["token_ids"] = result["generated_token_ids"]
        prompt, generated = result["num_input_tokens"], result["num_generated_tokens"]
        return {
            "id": f"chatcmpl-{name}" if chat else f"cmpl-{name}",
            "object": "chat.completion" if chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": generated,
                "total_tokens": prompt + generated,
                "prompt_tokens_details": {"cached_tokens": result["num_cached_tokens"]},
            },
        }

    def _chat_choice(self, result: Mapping[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": result["generated_text"], "refusal": None}
        if result["reasoning_text"] is not None:
            message["reasoning_content"] = result["reasoning_text"]
        logprobs = None
        if result.get("logprobs") is not None:
            content = []
            for entry in result["logprobs"]:
                top = [self._token(item["token_id"], item["logprob"]) for item in entry["top"]]
                content.append({**self._token(entry["token_id"], entry["logprob"]), "top_logprobs": top})
            logprobs = {"content": content, "refusal": None}
        return {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": result["finish_reason"]}

    def _text_choice(self, result: Mapping[str, Any]) -> dict[str, Any]:
        logprobs = None
        if result.get("logprobs") is not None:
            tokens = [self._text(entry["token_id"]) for entry in result["logprobs"]]
            offsets = [0]
            for token in tokens[:-1]:
                offsets.append(offsets[-1] + len(token))
            logprobs = {
                "tokens": tokens,
                "token_logprobs": [_finite(entry["logprob"]) for entry in result["logprobs"]],
                "top_logprobs": [
                    {self._text(item["token_id"]): _finite(item["logprob"]) for item in entry["top"]}
                    for entry in result["logprobs"]
                ],
                "text_offset": offsets[: len(tokens)],
            }
        text = result["generated_text"]
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": result["finish_reason"]}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        token = self._text(token_id)
        return {"token": token, "logprob": _finite(logprob), "bytes": list(token.encode("utf-8", "replace"))}

    def _text(self, token_id: int) -> str:
        if self.tokenizer is None:
            return f"token_id:{token_id}"
        return self.tokenizer.decode([token_id], skip_special_tokens=False)


def _is_chat(inputs: Mapping[str, Any]) -> bool:
    url = inputs.get("url")
    if isinstance(url, str):
        return not url.rstrip("/").endswith("/v1/completions")
    return inputs.get("messages") is not None


def _status(code: str) -> int:
    return 500 if code in SERVER_ERRORS else 400


def _error_body(result: Mapping[str, Any]) -> dict[str, Any]:
    server = result["error_code"] in SERVER_ERRORS
    return {
        "error": {
            "message": result["error_message"],
            "type": "server_error" if server else "invalid_request_error",
            "param": None,
            "code": result["error_code"],
        }
    }


def _finite(logprob: float) -> float:
    """JSON has no infinity: the service writes -9999 for a token that cannot be."""
    return max(logprob, -9999.0)

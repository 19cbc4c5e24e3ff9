from typing import Any

import pytest

from echo_batch.errors import RowError
from echo_batch.io.openai import CHAT_URL, COMPLETIONS_URL, custom_id, openai_parts
from echo_batch.io.schema import RowParts

MESSAGES = [{"role": "user", "content": "q"}]


def row(body: Any, url: Any = CHAT_URL, **changes: Any) -> dict[str, Any]:
    return {"custom_id": "id-1", "method": "POST", "url": url, "body": body, **changes}


def failure(values: dict[str, Any]) -> tuple[str, str]:
    with pytest.raises(RowError) as error:
        openai_parts(values)
    return error.value.code, error.value.message


def chat(**fields: Any) -> dict[str, Any]:
    return row({"model": "any", "messages": MESSAGES, **fields})


def completion(prompt: Any, **fields: Any) -> dict[str, Any]:
    return row({"prompt": prompt, **fields}, COMPLETIONS_URL)


def test_chat() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    found = openai_parts(
        chat(
            max_tokens=5,
            max_completion_tokens=7,
            temperature=0,
            top_p=1,
            stop="X",
            seed=3,
            logprobs=True,
            top_logprobs=2,
            tools=tools,
            tool_choice="auto",
            chat_template_kwargs={"thinking": True},
            top_k=-1,
        )
    )
    assert found == RowParts(
        messages=MESSAGES,
        tools=tools,
        chat_kwargs={"thinking": True},
        sampling={
            "max_tokens": 7,
            "temperature": 0.0,
            "top_p": 1.0,
            "stop": ("X",),
            "seed": 3,
            "logprobs": 2,
            "top_k": 0,
        },
    )
    assert openai_parts(chat(tools=tools, tool_choice="none")).tools is None
    assert openai_parts(chat(logprobs=True)).sampling == {"logprobs": 0}
    assert openai_parts(chat(logprobs=False)).sampling == {}


def test_completions() -> None:
    assert openai_parts(completion("a", max_tokens=5, logprobs=3)) == RowParts(
        text="a", sampling={"max_tokens": 5, "logprobs": 3}
    )
    assert openai_parts(completion([1, 2])) == RowParts(token_ids=[1, 2])
    assert openai_parts(completion(["a"])) == RowParts(text="a")
    assert openai_parts(completion([[1, 2]])) == RowParts(token_ids=[1, 2])
    assert openai_parts(completion([])) == RowParts(token_ids=[])
    assert failure(completion(["a", "b"])) == (
        "unsupported_param",
        "prompt: several prompts in one row; give each its own row",
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 1),
        ("stream", False),
        ("frequency_penalty", 0),
        ("presence_penalty", 0.0),
        ("logit_bias", {}),
        ("response_format", {"type": "text"}),
        ("repetition_penalty", 1.0),
        ("user", "someone"),
        ("metadata", {"a": "b"}),
        ("store", True),
        ("reasoning_effort", None),
        ("never_heard_of", None),
        ("parallel_tool_calls", False),
    ],
)
def test_fields_that_change_nothing(field: str, value: Any) -> None:
    assert openai_parts(chat(**{field: value})) == RowParts(messages=MESSAGES)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("n", True),
        ("stream", True),
        ("stream", 0),
        ("frequency_penalty", 0.1),
        ("logit_bias", {"5": 1}),
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("reasoning_effort", "high"),
        ("prompt", "x"),
        ("never_heard_of", 1),
    ],
)
def test_unsupported_fields_are_named(field: str, value: Any) -> None:
    code, message = failure(chat(**{field: value}))
    assert code == "unsupported_param" and message.startswith(f"{field} is not supported")


def test_the_message_says_what_would_do() -> None:
    assert failure(chat(n=2))[1] == "n is not supported (only 1), got 2"


@pytest.mark.parametrize(
    ("values", "code"),
    [
        (chat() | {"custom_id": None}, "bad_params"),
        (chat() | {"custom_id": ""}, "bad_params"),
        (chat() | {"custom_id": 5}, "bad_params"),
        (chat() | {"method": "GET"}, "bad_params"),
        ({k: v for k, v in chat().items() if k != "method"}, "bad_params"),
        (chat() | {"url": "/v1/embeddings"}, "bad_params"),
        (chat() | {"body": None}, "bad_params"),
        (chat() | {"body": "text"}, "bad_params"),
        (row({}), "no_prompt"),
        (row({"messages": "text"}), "bad_params"),
        (row({"messages": []}), "empty_prompt"),
        (row({"messages": MESSAGES, "tools": {}}), "bad_params"),
        (row({"messages": MESSAGES, "logprobs": 5}), "bad_params"),
        (row({"messages": MESSAGES, "top_logprobs": 5}), "bad_params"),
        (row({"messages": MESSAGES, "temperature": "x"}), "bad_params"),
        (row({"messages": MESSAGES, "chat_template_kwargs": []}), "bad_params"),
        (row({}, COMPLETIONS_URL), "no_prompt"),
        (completion(5), "bad_params"),
        (completion({"a": 1}), "bad_params"),
    ],
)
def test_bad_rows(values: dict[str, Any], code: str) -> None:
    assert failure(values)[0] == code


def test_custom_id() -> None:
    assert custom_id({"custom_id": "a"}) == "a"
    assert custom_id({}) is custom_id({"custom_id": 5}) is custom_id({"custom_id": ""}) is None

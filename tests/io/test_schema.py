import json
from typing import Any

import pytest

from echo_batch.config import InputConfig
from echo_batch.errors import RowError
from echo_batch.io.schema import PROMPT_COLUMNS, Record, RowParts, RowReader, request_columns

CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]


def parts(values: dict[str, Any], **options: Any) -> RowParts:
    return RowReader(InputConfig(**options)).request_parts(Record(0, values))


def failure(values: dict[str, Any], **options: Any) -> tuple[str, str]:
    with pytest.raises(RowError) as error:
        parts(values, **options)
    return error.value.code, error.value.message


def test_the_prompt_columns() -> None:
    assert parts({"prompt": "a", "other": 1}) == RowParts(text="a")
    assert parts({"messages": CHAT, "prompt": None}) == RowParts(messages=CHAT)
    assert parts({"messages": json.dumps(CHAT)}) == RowParts(messages=CHAT)
    assert parts({"prompt_token_ids": [1, 2], "messages": float("nan")}) == RowParts(token_ids=[1, 2])
    assert parts({"prompt_token_ids": "[1, 2]"}) == RowParts(token_ids=[1, 2])
    # As trl's and OpenAI's data have it.
    assert parts({"prompt": CHAT}) == RowParts(messages=CHAT)
    assert parts({"prompt": [5, 6]}) == RowParts(token_ids=[5, 6])
    assert parts({"prompt": ""}).text == ""


def test_none_or_several_prompts() -> None:
    assert failure({}) == ("no_prompt", "the row has none of prompt, messages, prompt_token_ids or conversations")
    assert failure({"prompt": None, "messages": None})[0] == "no_prompt"
    code, message = failure({"prompt": "a", "messages": CHAT})
    assert code == "no_prompt" and message == "the row has prompt and messages: choose one by --prompt-column"
    assert parts({"prompt": "a", "messages": CHAT}, prompt_column="messages") == RowParts(messages=CHAT)


@pytest.mark.parametrize("value", ["text", CHAT, [1, 2, 3]])
def test_prompt_column_of_any_kind(value: Any) -> None:
    found = parts({"q": value, "prompt": "not this"}, prompt_column="q")
    assert [found.text, found.messages, found.token_ids].count(None) == 2
    assert value in (found.text, found.messages, found.token_ids)


@pytest.mark.parametrize("value", [None, float("nan"), 5, {"a": 1}, True])
def test_prompt_column_without_a_prompt(value: Any) -> None:
    assert failure({"q": value}, prompt_column="q")[0] == "no_prompt"
    assert failure({"prompt": "a"}, prompt_column="q") == ("no_prompt", "column 'q' is missing or null")


def test_bytes_are_text() -> None:
    assert parts({"prompt": "é".encode() + b"\xff"}).text == "é�"


def test_template() -> None:
    assert parts({"c": "C", "i": 7, "seed": 1}, prompt_template="{c}:{i}") == RowParts(text="C:7", sampling={"seed": 1})
    assert failure({"c": "C"}, prompt_template="{c}:{i}")[0] == "no_prompt"


def test_share_gpt() -> None:
    turns = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "q1"},
        {"from": "gpt", "value": "a1"},
        {"from": "Human", "value": "q2"},
        {"from": "gpt", "value": "a2"},
    ]
    want = [("system", "s"), ("user", "q1"), ("assistant", "a1"), ("user", "q2")]
    for values in ({"conversations": turns}, {"conversations": json.dumps(turns)}, {"id": 1, "conversations": turns}):
        found = parts(values).messages
        assert found is not None and [(m["role"], m["content"]) for m in found] == want
    with_roles = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert parts({"conversations": with_roles}).messages == with_roles[:1]
    found = parts({"turns": turns}, prompt_column="turns").messages
    assert found is not None and len(found) == 4
    assert failure({"conversations": turns[2:3]})[0] == "no_prompt"
    assert failure({"conversations": []})[0] == "empty_prompt"
    assert failure({"conversations": [{"from": "alien", "value": "x"}]})[0] == "bad_params"


def test_contents_become_text() -> None:
    content = [{"type": "text", "text": "a"}, {"text": "b"}, "c"]
    messages = [{"role": "user", "content": content, "name": None}, {"role": "assistant", "content": None}]
    found = parts({"messages": messages}).messages
    assert found == [{"role": "user", "content": "a\nb\nc"}, {"role": "assistant", "content": None}]


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ([], "empty_prompt"),
        ("[]", "empty_prompt"),
        ("not json", "bad_params"),
        ("[" * 100_000, "bad_params"),
        ('{"role": "user"}', "bad_params"),
        (["hi"], "bad_params"),
        ([{"content": "x"}], "bad_params"),
        ([{"role": 5, "content": "x"}], "bad_params"),
        ([{"role": "user", "content": 5}], "bad_params"),
        ([{"role": "user", "content": [5]}], "unsupported_param"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "unsupported_param"),
    ],
)
def test_bad_messages(messages: Any, code: str) -> None:
    assert failure({"messages": messages})[0] == code


def test_tools_of_a_row() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert parts({"messages": CHAT, "tools": tools}).tools == tools
    assert parts({"messages": CHAT, "tools": json.dumps(tools)}).tools == tools
    assert failure({"messages": CHAT, "tools": 5})[0] == "bad_params"
    for prompt in ({"prompt": "a"}, {"prompt_token_ids": [1]}):
        assert parts({**prompt, "tools": "hammer"}).tools is None  # no business of a prompt without a chat


def test_sampling_columns() -> None:
    values = {
        "max_tokens": 64.0,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": -1,
        "min_p": None,
        "seed": 7,
        "stop": "END",
        "stop_token_ids": [1, 2.0],
        "logprobs": 3,
        "ignore_eos": True,
    }
    assert parts({"prompt": "a", **values}).sampling == {
        "max_tokens": 64,
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 0,
        "seed": 7,
        "stop": ("END",),
        "stop_token_ids": (1, 2),
        "logprobs": 3,
        "ignore_eos": True,
    }
    assert parts({"prompt": "a", "max_tokens": float("nan"), "stop": ["a", "b"]}).sampling == {"stop": ("a", "b")}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", "64"),
        ("max_tokens", 6.5),
        ("max_tokens", True),
        ("temperature", "hot"),
        ("temperature", True),
        ("seed", [1]),
        ("stop", 5),
        ("stop", ["a", 5]),
        ("stop_token_ids", 5),
        ("stop_token_ids", ["a"]),
        ("ignore_eos", 1),
        ("logprobs", True),
    ],
)
def test_bad_sampling_values_name_the_field(name: str, value: Any) -> None:
    code, message = failure({"prompt": "a", name: value})
    assert code == "bad_params" and message.startswith(name)


def test_request_columns() -> None:
    names = ["id", "prompt", "q", "seed", "messages", "tools", "answer"]
    assert request_columns(InputConfig(), names) == ["prompt", "seed", "messages", "tools"]
    assert request_columns(InputConfig(prompt_column="q"), names) == ["q", "seed", "tools"]
    assert request_columns(InputConfig(prompt_template="{id}{answer}"), names) == ["id", "seed", "tools", "answer"]
    assert set(PROMPT_COLUMNS) == {"prompt", "messages", "prompt_token_ids", "conversations"}

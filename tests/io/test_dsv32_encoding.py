import json
from typing import Any

import pytest

from echo_batch.io.dsv32_encoding import encode_chat

B, E, U, A, D = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "｜DSML｜"
CALL = {"id": "1", "type": "function", "function": {"name": "get", "arguments": '{"city": "Paris", "days": 2}'}}
CALL_TEXT = (
    f"\n\n<{D}function_calls>\n"
    f'<{D}invoke name="get">\n'
    f'<{D}parameter name="city" string="true">Paris</{D}parameter>\n'
    f'<{D}parameter name="days" string="false">2</{D}parameter>\n'
    f"</{D}invoke>\n"
    f"</{D}function_calls>"
)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": "1"}


def test_one_turn() -> None:
    assert encode_chat([user("hello")]) == f"{B}{U}hello{A}</think>"
    assert encode_chat([user("hello")], thinking=True) == f"{B}{U}hello{A}<think>"
    assert encode_chat([{"role": "system", "content": "S"}, user("q")]) == f"{B}S{U}q{A}</think>"
    assert encode_chat([{"role": "developer", "content": "S"}, user("q")]) == f"{B}S{U}q{A}</think>"
    assert encode_chat([user("q")], add_generation_prompt=False) == f"{B}{U}q"


def test_golden_of_the_model_card() -> None:
    """[bos, User, hello, Assistant, </think>, ..., eos, User, ..., Assistant, <think>]: reasoning before the last user
    turn is dropped."""
    chat = [user("hello"), assistant("Hi!", reasoning_content="think"), user("1+1=?")]
    assert encode_chat(chat, thinking=True) == f"{B}{U}hello{A}</think>Hi!{E}{U}1+1=?{A}<think>"
    assert encode_chat(chat) == f"{B}{U}hello{A}</think>Hi!{E}{U}1+1=?{A}</think>"


@pytest.mark.parametrize("thinking", [False, True])
def test_tool_calls(thinking: bool) -> None:
    chat = [user("weather?"), assistant(None, reasoning_content="R", tool_calls=[CALL]), tool("sunny"), tool("warm")]
    opened = "<think>" if thinking else "</think>"
    reasoning = "R</think>" if thinking else ""
    want = (
        f"{B}{U}weather?{A}{opened}{reasoning}{CALL_TEXT}{E}"
        "\n\n<function_results>\n<result>sunny</result>\n<result>warm</result>\n</function_results>"
        f"\n\n{opened}"
    )
    assert encode_chat(chat, thinking=thinking) == want
    # Later the same turns stand before the last user turn: no reasoning in them.
    later = encode_chat([*chat, assistant("A"), user("thanks")], thinking=thinking)
    closed = want.replace("<think>", "</think>").replace("R</think>", "")
    assert later == f"{closed}A{E}{U}thanks{A}{opened}"


def test_arguments_of_other_types() -> None:
    arguments = {"a": 'raw <text> "q"', "b": [1, "é"], "c": True, "d": None, "e": {"x": 1.5}}
    text = encode_chat(
        [user("q"), assistant("", tool_calls=[{"function": {"name": "f", "arguments": arguments}}]), tool("")]
    )
    for key, value in arguments.items():
        is_string = isinstance(value, str)
        shown = value if is_string else json.dumps(value, ensure_ascii=False)
        assert f'<{D}parameter name="{key}" string="{str(is_string).lower()}">{shown}</{D}parameter>' in text


def test_tools_stand_in_the_system_message() -> None:
    tools = [{"type": "function", "function": {"name": "get", "description": "é", "parameters": {}}}]
    schema = '{"name": "get", "description": "é", "parameters": {}}'
    with_system = encode_chat([{"role": "system", "content": "S"}, user("q")], tools=tools)
    assert with_system.startswith(f"{B}S\n\n## Tools\n")
    assert f"<functions>\n{schema}\n</functions>" in with_system
    assert with_system.endswith(f"{U}q{A}</think>")
    assert encode_chat([user("q")], tools=tools).startswith(f"{B}## Tools\n")
    assert encode_chat([user("q")], tools=[]) == encode_chat([user("q")])


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([], "nothing to answer"),
        ([user("q"), assistant("a")], "nothing to answer"),
        ([{"role": "system", "content": "s"}], "nothing to answer"),
        ([{"role": "alien", "content": "s"}], "unknown role 'alien'"),
        ([tool("x")], "must follow"),
        ([user("q"), tool("x")], "must follow"),
        ([user("q"), assistant("", tool_calls=[{"function": {"name": "f", "arguments": "{"}}]), tool("x")], "not JSON"),
        ([user("q"), assistant("", tool_calls=[{"function": {"arguments": "{}"}}]), tool("x")], "needs a name"),
        ([user("q"), assistant("", tool_calls=[{"function": {"name": "f", "arguments": [1]}}]), tool("x")], "object"),
        ([{"role": "user", "content": ["parts"]}], "must be a text"),
    ],
)
def test_chats_that_cannot_be_written(chat: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_chat(chat)


def test_bad_tools() -> None:
    with pytest.raises(ValueError, match="tools must be"):
        encode_chat([user("q")], tools=["f"])

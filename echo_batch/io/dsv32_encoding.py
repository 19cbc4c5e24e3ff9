"""DeepSeek-V3.2's chat format, which comes without a Jinja template. Written from its description (model spec, section
6: chat), not from its code; knows strings only.

    <bos>{system}[tools]<｜User｜>{user}<｜Assistant｜>{</think> or <think>...}

The prose around the tools is ours. A checkpoint's own encoder, if it has one, is used with --trust-remote-code.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"
_DSML = "｜DSML｜"

_TOOLS = f"""## Tools

You can call the functions listed below. To call functions, write a block of this form in your reply:

<{_DSML}function_calls>
<{_DSML}invoke name="$FUNCTION_NAME">
<{_DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{_DSML}parameter>
...
</{_DSML}invoke>
...
</{_DSML}function_calls>

Parameters of type string are written as they are, with string="true"; all others as JSON, with string="false".

The functions, as JSON schemas:

<functions>
{{schemas}}
</functions>
"""


def encode_chat(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Any] | None = None,
    thinking: bool = False,
    add_generation_prompt: bool = True,
) -> str:
    """The prompt of a chat; encode it without adding special tokens.

    `messages` have roles system, developer (the same), user, assistant and tool, and string contents; assistants may
    have `reasoning_content` and `tool_calls`. With `thinking` the prompt ends in <think>, else in </think>. Reasoning
    before the last user turn is dropped. Raises ValueError naming the message.
    """
    last_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    pieces = [BOS]
    tools_text = _tools_text(tools) if tools else ""
    if tools_text and (not messages or messages[0]["role"] not in ("system", "developer")):
        pieces.append(tools_text)
        tools_text = ""
    for i, message in enumerate(messages):
        role = message["role"]
        opened = THINK if thinking and i >= last_user else END_THINK
        # The turn after this one is the assistant's: the last one only if a generation is asked for.
        turn = ASSISTANT if i + 1 < len(messages) or add_generation_prompt else ""
        if role in ("system", "developer"):
            pieces.append(_content(message))
            if tools_text:
                pieces.append("\n\n" + tools_text)
                tools_text = ""
        elif role == "user":
            pieces.append(f"{USER}{_content(message)}{turn}{opened if turn else ''}")
        elif role == "assistant":
            pieces.append(_assistant(message, keep_reasoning=thinking and i > last_user))
        elif role == "tool":
            pieces.append(_result(messages, i))
            if i + 1 == len(messages) or messages[i + 1]["role"] != "tool":
                pieces.append("\n</function_results>" + (f"\n\n{opened}" if turn else ""))
        else:
            raise ValueError(f"messages[{i}]: unknown role {role!r}")
    if add_generation_prompt and (not messages or messages[-1]["role"] not in ("user", "tool")):
        raise ValueError("the last message must be from user or tool: there is nothing to answer")
    return "".join(pieces)


def _assistant(message: Mapping[str, Any], keep_reasoning: bool) -> str:
    calls = message.get("tool_calls") or []
    reasoning = ""
    if keep_reasoning:
        # <think> stands at the end of the turn before.
        reasoning = (message.get("reasoning_content") or message.get("reasoning") or "") + END_THINK
    block = ""
    if calls:
        invokes = "\n".join(_invoke(call) for call in calls)
        block = f"\n\n<{_DSML}function_calls>\n{invokes}\n</{_DSML}function_calls>"
    return f"{reasoning}{_content(message)}{block}{EOS}"


def _invoke(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    name, arguments = function.get("name"), function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise ValueError(f"arguments of the call of {name!r} are not JSON: {error}") from error
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("a tool call needs a name and an object of arguments")
    lines = [f'<{_DSML}invoke name="{name}">']
    for key, value in arguments.items():
        is_string = isinstance(value, str)
        text = value if is_string else json.dumps(value, ensure_ascii=False)
        lines.append(f'<{_DSML}parameter name="{key}" string="{str(is_string).lower()}">{text}</{_DSML}parameter>')
    lines.append(f"</{_DSML}invoke>")
    return "\n".join(lines)


def _result(messages: Sequence[Mapping[str, Any]], i: int) -> str:
    before = messages[i - 1]["role"] if i else None
    if before not in ("tool", "assistant"):
        raise ValueError(f"messages[{i}]: a tool result must follow the assistant's call")
    start = "" if before == "tool" else "\n\n<function_results>"
    return f"{start}\n<result>{_content(messages[i])}</result>"


def _tools_text(tools: Sequence[Any]) -> str:
    schemas = []
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping):
            raise ValueError("tools must be a list of function objects")
        schemas.append(json.dumps(function, ensure_ascii=False))
    return _TOOLS.format(schemas="\n".join(schemas))


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if not isinstance(content, str):
        raise ValueError(f"content of a {message['role']} message must be a text")
    return content

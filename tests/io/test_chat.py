from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from echo_batch.errors import ConfigError, ModelError, RowError
from echo_batch.io.chat import ChatEncoder, load_chat, opens_thinking, split_reasoning
from echo_batch.io.dsv32_encoding import encode_chat
from echo_batch.io.tokenizer import load_tokenizer
from tests.tiny_tokenizer import SPECIAL, write_tokenizer

NOW = datetime(2026, 3, 1)
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <short> & 'kind'."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello", "reasoning_content": "r"},
    {"role": "user", "content": "été?"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": "é<&>"}}}]
# Written after GLM's and Qwen's habits: whitespace control, namespaces, kwargs, tojson, loop controls.
GLM_LIKE = """[gMASK]<sop>
{%- if tools %}<|system|>
{%- for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{%- endfor %}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
  {%- if m.role == 'skip' %}{% continue %}{% endif %}
<|{{ m.role }}|>
{%- if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content if m.content is string else '' }}
  {%- for call in m.tool_calls or [] %}
<tool_call>{{ call.function.name }}
    {%- for key, value in call.function.arguments.items() %}
<arg_key>{{ key }}</arg_key><arg_value>{{ value if value is string else value | tojson }}</arg_value>
    {%- endfor %}</tool_call>
  {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{{- '</think>' if enable_thinking is defined and not enable_thinking else '<think>' }}
{%- endif %}
"""
GENERATION = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}{{ eos_token }}"
JSON = "{{ messages | tojson(indent=2) }}{{ tools | tojson }}{{ bos_token }}"
LOOP = """{% for m in messages %}
    {% if loop.index > 3 %}
    {% break %}
    {% endif %}
  {{ m['content'] | trim }} {{- '\\n' }}
{% endfor %}"""


def encoder(tmp_path: Path, template: Any = None, kwargs: dict[str, Any] | None = None, **options: Any) -> ChatEncoder:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, {"chat_template": template}))
    options = {"model_type": "glm_moe_dsa", "now": NOW, **options}
    return load_chat(tmp_path, tokenizer=tokenizer, kwargs=kwargs, **options)


def failure(chat: ChatEncoder, messages: list[dict[str, Any]] = CHAT, **options: Any) -> str:
    with pytest.raises(RowError) as error:
        chat.render(messages, **options)
    assert error.value.code == "tokenize_failed"
    return error.value.message


@pytest.mark.parametrize("template", [GLM_LIKE, GENERATION, JSON, LOOP])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_templates_render_as_in_transformers(tmp_path: Path, template: str, tools: Any) -> None:
    from transformers import PreTrainedTokenizerFast

    write_tokenizer(tmp_path)
    oracle = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token=SPECIAL[0], eos_token=SPECIAL[1]
    )
    for kwargs in ({}, {"enable_thinking": False}):
        want = oracle.apply_chat_template(
            CHAT, tools=tools, chat_template=template, tokenize=False, add_generation_prompt=True, **kwargs
        )
        assert encoder(tmp_path, template, kwargs).render(CHAT, tools=tools) == want


def test_glm_prompt(tmp_path: Path) -> None:
    chat = encoder(tmp_path, GLM_LIKE)
    prompt = chat.render(CHAT)
    assert prompt.startswith("[gMASK]<sop><|system|>Be <short> & 'kind'.") and prompt.endswith("<|assistant|><think>")
    assert opens_thinking(prompt) and opens_thinking(prompt + "\n")
    off = chat.render(CHAT, kwargs={"enable_thinking": False})
    assert off.endswith("<|assistant|></think>") and not opens_thinking(off)
    assert chat.generation_suffix(CHAT) == "<|assistant|><think>"


def test_arguments_of_calls_are_objects_in_templates(tmp_path: Path) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": '{"city": "Paris", "n": [1]}'}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    text = encoder(tmp_path, GLM_LIKE).render(messages)
    assert "<arg_key>city</arg_key><arg_value>Paris</arg_value>" in text
    assert "<arg_key>n</arg_key><arg_value>[1]</arg_value>" in text
    assert call["function"]["arguments"] == '{"city": "Paris", "n": [1]}'  # the row's own object is left alone


def test_where_templates_are_found(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    chat = encoder(tmp_path, listed, model_type="deepseek_v32")
    assert chat.render(CHAT) == "D" and chat.render(CHAT, tools=TOOLS) == "T"
    (tmp_path / "chat_template.jinja").write_text("F{{ bos_token }}")
    assert encoder(tmp_path, "D", model_type="deepseek_v32").render(CHAT) == "F" + SPECIAL[0]
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("A")
    assert encoder(tmp_path, "D").render(CHAT, tools=TOOLS) == "A"


def test_without_a_template(tmp_path: Path) -> None:
    assert encoder(tmp_path, model_type="deepseek_v32").render(CHAT) == encode_chat(CHAT)
    thinking = encoder(tmp_path, model_type="deepseek_v32", kwargs={"thinking": True})
    assert thinking.render(CHAT).endswith("<think>")
    assert thinking.render(CHAT, kwargs={"thinking": False}).endswith("</think>")
    assert encoder(tmp_path, model_type="deepseek_v32", kwargs={"thinking_mode": "chat"}).render(CHAT) == encode_chat(
        CHAT
    )
    assert "no chat template" in failure(encoder(tmp_path))
    assert "nothing to answer" in failure(encoder(tmp_path, model_type="deepseek_v32"), CHAT[:1])
    assert thinking.generation_suffix(CHAT) == "<｜Assistant｜><think>"


def test_unknown_kwargs_of_the_built_in_encoder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="thinkin="):
        encoder(tmp_path, model_type="deepseek_v32", kwargs={"thinkin": True})
    chat = encoder(tmp_path, model_type="deepseek_v32")
    assert "thinking" in failure(chat, kwargs={"thinking": "yes"})


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[0].nothing.more }}", "no attribute 'nothing'"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% include 'x' %}", "no loader"),
    ],
)
def test_failing_and_hostile_templates_fail_the_row(tmp_path: Path, template: str, message: str) -> None:
    assert message in failure(encoder(tmp_path, template))


def test_time_is_fixed_for_the_job(tmp_path: Path) -> None:
    assert encoder(tmp_path, "{{ strftime_now('%Y-%m-%d') }}").render(CHAT) == "2026-03-01"


def test_the_checkpoints_own_encoder_needs_trust(tmp_path: Path) -> None:
    (tmp_path / "encoding").mkdir()
    code = """
def encode_messages(messages, thinking_mode):
    return repr((thinking_mode, messages[0].get("tools"), [m["role"] for m in messages]))
"""
    (tmp_path / "encoding" / "encoding_dsv32.py").write_text(code)
    assert encoder(tmp_path, model_type="deepseek_v32").render(CHAT) == encode_chat(CHAT)
    chat = encoder(tmp_path, model_type="deepseek_v32", trust_remote_code=True)
    assert chat.render(CHAT[1:2], tools=TOOLS) == repr(("chat", TOOLS, ["system", "user"]))
    assert chat.render(CHAT, kwargs={"thinking": True}).startswith("('thinking', None")
    assert chat.generation_suffix(CHAT) == ""
    assert encoder(tmp_path, "D", trust_remote_code=True).render(CHAT) == "D"
    (tmp_path / "encoding" / "encoding_dsv32.py").write_text("x = 1")
    with pytest.raises(ModelError, match="no function encode_messages"):
        encoder(tmp_path, trust_remote_code=True)
    (tmp_path / "encoding" / "encoding_dsv32.py").write_text("1/0")
    with pytest.raises(ModelError, match="division"):
        encoder(tmp_path, trust_remote_code=True)


def test_split_reasoning() -> None:
    assert split_reasoning("answer", None) == ("answer", None)
    assert split_reasoning("why\n</think>\n\nanswer", "</think>") == ("answer", "why")
    assert split_reasoning("a</think>b</think>c", "</think>") == ("b</think>c", "a")
    assert split_reasoning("never closed", "</think>") == ("", "never closed")

"""Chats to prompt text: the checkpoint's Jinja template in a sandbox, else a built-in encoder.

The only place where Jinja runs. Knows no token ids; prompts from here are encoded without special tokens.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from echo_batch.errors import ConfigError, ModelError, RowError
from echo_batch.io.dsv32_encoding import THINK, encode_chat
from echo_batch.io.tokenizer import Tokenizer

_BUILT_IN = ("deepseek_v32",)
_ENCODER_FILE = Path("encoding") / "encoding_dsv32.py"


class GeneratedText(NamedTuple):
    """Generated text in two parts; `reasoning` is None when the prompt opened no thinking part."""

    content: str
    reasoning: str | None


@dataclass(frozen=True, kw_only=True)
class ChatEncoder:
    """Renders chats for one checkpoint. Make it with `load_chat`.

    `templates` by name ("default", "tool_use") win; else `encode` (a checkpoint's or the built-in encoder); else no
    chat can be rendered. `kwargs` are --chat-template-kwargs; a row's own win over them.
    """

    templates: Mapping[str, str]
    special_tokens: Mapping[str, str]
    encode: Callable[..., str] | None
    kwargs: Mapping[str, Any]
    environment: ImmutableSandboxedEnvironment
    _compiled: dict[str, jinja2.Template] = field(default_factory=dict)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt text of one chat. Raises RowError tokenize_failed with the template's own message."""
        merged = {**self.kwargs, **(kwargs or {})}
        try:
            if self.templates:
                return self._render_template(messages, tools, merged, add_generation_prompt)
            if self.encode is not None:
                options = {"thinking": _thinking(merged), "add_generation_prompt": add_generation_prompt}
                return self.encode(messages, tools=tools, **options)
        except Exception as error:  # a template can raise anything
            reason = str(error) or type(error).__name__
            raise RowError("tokenize_failed", f"the chat template failed: {reason[:300]}") from error
        raise RowError("tokenize_failed", "the model has no chat template: give prompts as text or token ids")

    def generation_suffix(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The end of the prompt that opens the assistant's turn, "" if it cannot be told."""
        whole = self.render(messages, tools=tools, kwargs=kwargs)
        try:
            body = self.render(messages, tools=tools, kwargs=kwargs, add_generation_prompt=False)
        except RowError:
            return ""
        return whole[len(body) :] if whole.startswith(body) else ""

    def _render_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        kwargs: Mapping[str, Any],
        add_generation_prompt: bool,
    ) -> str:
        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            name = next(iter(self.templates))
        template = self._compiled.get(name)
        if template is None:
            template = self._compiled[name] = self.environment.from_string(self.templates[name])
        return template.render(
            **{
                "documents": None,
                **self.special_tokens,
                **kwargs,
                "messages": [_with_parsed_arguments(message) for message in messages],
                "tools": list(tools) if tools else None,
                "add_generation_prompt": add_generation_prompt,
            }
        )


def load_chat(
    path: Path | str | None,
    *,
    tokenizer: Tokenizer | None,
    model_type: str | None,
    kwargs: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    now: datetime | None = None,
) -> ChatEncoder:
    """The chat encoder of a checkpoint directory (the tokenizer's, when that is another one).

    A chat_template (chat_template.jinja, else tokenizer_config.json) wins for every family; then the checkpoint's own
    encoder file, only with `trust_remote_code`; then the built-in one of `model_type`. `now` is what strftime_now
    tells templates: fixed for the job. Raises ModelError, ConfigError (kwargs that the encoder does not know).
    """
    templates = _find_templates(Path(path) if path is not None else None, tokenizer)
    encode: Callable[..., str] | None = None
    if not templates:
        if trust_remote_code and path is not None and (Path(path) / _ENCODER_FILE).is_file():
            encode = _load_encoder(Path(path) / _ENCODER_FILE)
        elif model_type in _BUILT_IN:
            encode = encode_chat
        if encode is not None:
            try:
                _thinking(kwargs or {})
            except ValueError as error:
                raise ConfigError(f"--chat-template-kwargs: {error}") from error
    return ChatEncoder(
        templates=templates,
        special_tokens=tokenizer.special_tokens if tokenizer is not None else {},
        encode=encode,
        kwargs=dict(kwargs or {}),
        environment=_environment(now or datetime.now()),
    )


def opens_thinking(prompt: str) -> bool:
    """Whether a prompt ends inside a thinking part that it opened."""
    return prompt.rstrip().endswith(THINK)


def split_reasoning(text: str, thinking_end: str | None) -> GeneratedText:
    """Generated text in reasoning and answer. Without `thinking_end` all is answer; if it never comes, all is
    reasoning. Newlines around the mark are dropped."""
    if thinking_end is None:
        return GeneratedText(text, None)
    reasoning, mark, content = text.partition(thinking_end)
    return GeneratedText(content.lstrip("\n"), reasoning.strip("\n")) if mark else GeneratedText("", text)


def _thinking(kwargs: Mapping[str, Any]) -> bool:
    """Thinking on or off from the keyword arguments of encoders without a template."""
    values = []
    for key, value in kwargs.items():
        if key in ("thinking", "enable_thinking") and isinstance(value, bool):
            values.append(value)
        elif key == "thinking_mode" and value in ("thinking", "chat"):
            values.append(value == "thinking")
        else:
            raise ValueError(
                f"{key}={value!r} is unknown to this model's chat encoder; it takes thinking (true, false)"
            )
    return values[-1] if values else False


def _find_templates(path: Path | None, tokenizer: Tokenizer | None) -> dict[str, str]:
    listed = tokenizer.chat_template if tokenizer is not None else None
    templates: dict[str, str] = {}
    if isinstance(listed, str):
        templates["default"] = listed
    elif isinstance(listed, list):
        for entry in listed:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                templates[str(entry.get("name", "default"))] = entry["template"]
    if path is None:
        return templates
    files = {"default": path / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    for name, file in files.items():
        if file.is_file():
            try:
                templates[name] = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelError(f"{file}: {error}") from error
    return templates


def _with_parsed_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Templates walk through a call's arguments; OpenAI's form has them as JSON text."""
    result = dict(message)
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return result
    result["tool_calls"] = parsed = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"] or "{}")
            except ValueError:
                arguments = function["arguments"]
            call = {**call, "function": {**function, "arguments": arguments}}
        parsed.append(call)
    return result


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: datetime) -> ImmutableSandboxedEnvironment:
    """The environment that chat templates of Hugging Face checkpoints are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Unlike jinja2's own filter, which escapes HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = now.strftime
    return environment


def _load_encoder(file: Path) -> Callable[..., str]:
    """The checkpoint's own encoder, as a function of the built-in one's form. Runs its code: the user trusted it."""
    spec = spec_from_file_location("echo_batch_checkpoint_encoder", file)
    assert spec is not None and spec.loader is not None
    module: ModuleType = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ModelError(f"{file}: {error}") from error
    encode_messages = getattr(module, "encode_messages", None)
    if not callable(encode_messages):
        raise ModelError(f"{file}: no function encode_messages")

    def encode(
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        thinking: bool = False,
        add_generation_prompt: bool = True,
    ) -> str:
        if not add_generation_prompt:
            raise ValueError("this encoder always opens the assistant's turn")
        rows = [dict(message) for message in messages]
        if tools:
            # This encoder reads tools from the system message.
            if not rows or rows[0]["role"] != "system":
                rows.insert(0, {"role": "system", "content": ""})
            rows[0]["tools"] = list(tools)
        return str(encode_messages(rows, thinking_mode="thinking" if thinking else "chat"))

    return encode

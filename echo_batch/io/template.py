"""Prompt templates: `{column}`, doubled braces and backslash escapes, and nothing else. No code can run in one."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo_batch.errors import ConfigError, RowError

_TOKEN = re.compile(
    r"\\(?:u(?P<u>[0-9a-fA-F]{4})|x(?P<x>[0-9a-fA-F]{2})|(?P<escape>.?))"
    r"|(?P<double>\{\{|\}\})"
    r"|\{(?P<column>[^{}]*)\}"
    r"|(?P<brace>[{}])"
    r"|(?P<text>[^\\{}]+)",
    re.DOTALL,
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "'": "'", "{": "{", "}": "}", "0": "\0"}


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """Literal texts and column names in turn: texts[0] columns[0] texts[1] ... texts[-1]."""

    texts: tuple[str, ...]
    columns: tuple[str, ...]

    @classmethod
    def parse(cls, template: str) -> "PromptTemplate":
        r"""Read a template, or the file behind `@path` (one newline at its end is dropped).

        Escapes (\n \t \r \\ \" \' \{ \} \0 \xNN \uNNNN) are decoded in both. Raises ConfigError naming the place.
        """
        template = expand_template(template)
        texts, columns = [""], []
        for match in _TOKEN.finditer(template):
            if match["column"] is not None:
                _check_name(match["column"], match.start())
                columns.append(match["column"])
                texts.append("")
            else:
                texts[-1] += _literal(match)
        if not columns:
            raise ConfigError("--prompt-template names no {column}: every row would have the same prompt")
        return cls(tuple(texts), tuple(columns))

    def render(self, values: Mapping[str, Any]) -> str:
        """The prompt of one row; numbers, lists and objects appear as JSON. Raises RowError no_prompt for a column
        that the row lacks."""
        pieces = [self.texts[0]]
        for column, text in zip(self.columns, self.texts[1:]):
            value = values.get(column)
            if value is None or value != value:  # NaN stands for null in some tables
                raise RowError("no_prompt", f"column {column!r} of the prompt template is missing or null")
            if isinstance(value, bytes):
                value = value.decode("utf-8", "replace")
            pieces += (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str), text)
        return "".join(pieces)


def expand_template(template: str) -> str:
    """The template itself, or the content of the file behind `@path`: what a job's fingerprint must hold.

    Expanding twice changes nothing. Raises ConfigError for a file that cannot be read.
    """
    if not template.startswith("@"):
        return template
    path = template[1:]
    try:
        text = Path(os.path.expanduser(path)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompt-template @{path}: {getattr(error, 'strerror', None) or error}") from error
    text = text.removesuffix("\n").removesuffix("\r")
    return "\\x40" + text[1:] if text.startswith("@") else text


def _literal(match: re.Match[str]) -> str:
    if match["text"] is not None:
        return match["text"]
    if match["double"] is not None:
        return match["double"][0]
    if match["brace"] is not None:
        raise ConfigError(
            f"--prompt-template: single {match['brace']!r} at {match.start()}; double it for a literal one"
        )
    code = match["u"] or match["x"]
    if code is not None:
        character = chr(int(code, 16))
        if "\ud800" <= character <= "\udfff":
            raise ConfigError(f"--prompt-template: \\u{code} is half a character; write the character itself")
        return character
    if match["escape"] not in _ESCAPES:
        raise ConfigError(f"--prompt-template: unknown escape \\{match['escape']}; write \\\\ for a backslash")
    return _ESCAPES[match["escape"]]


def _check_name(name: str, at: int) -> None:
    if not name:
        raise ConfigError(f"--prompt-template: empty {{}} at {at}; name a column")
    if any(c in name for c in ".[]!:\\"):
        raise ConfigError(f"--prompt-template: {{{name}}}: only whole columns, no attributes, indexes or formats")

"""Typed reading of a JSON object from a checkpoint directory: every problem is one ModelError that names the field."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from echo_batch.errors import ModelError

T = TypeVar("T")
_REQUIRED: Any = object()


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; ModelError if the file is missing, unreadable, not JSON or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


class Fields:
    """A mapping read field by field. A field that is null counts as missing, as Hugging Face writes it."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix

    def error(self, name: str, problem: str) -> ModelError:
        """A ModelError about field `name`."""
        return ModelError(f"config.json: {self._prefix}{name} {problem}")

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def get(self, name: str, default: Any = _REQUIRED) -> Any:
        value = self._values.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise self.error(name, "is missing")
        return default

    def integer(self, name: str, default: Any = _REQUIRED, *, minimum: int = 1) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"must be an integer, got {value!r}")
        if value < minimum:
            raise self.error(name, f"must be at least {minimum}, got {value}")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """A finite number above 0."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, f"must be a number, got {value!r}")
        if not 0.0 < value < float("inf"):
            raise self.error(name, f"must be a finite number above 0, got {value!r}")
        return float(value)

    def boolean(self, name: str, default: Any = _REQUIRED) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, got {value!r}")
        return value

    def text(self, name: str, default: Any = _REQUIRED) -> str:
        value = self.get(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"must be a string, got {value!r}")
        return value

    def list_of(self, name: str, kind: type[T]) -> list[T]:
        value = self.get(name)
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise self.error(name, f"must be a list of {kind.__name__}, got {value!r}")
        return value

    def section(self, name: str) -> "Fields":
        value = self.get(name)
        if not isinstance(value, dict):
            raise self.error(name, f"must be an object, got {value!r}")
        return Fields(value, f"{self._prefix}{name}.")

    def expect(self, name: str, *allowed: Any) -> None:
        """The field is missing or has one of the values that this engine implements."""
        if self.has(name) and not any(self._values[name] == value for value in allowed):
            supported = " or ".join(repr(value) for value in allowed)
            raise self.error(name, f"is {self._values[name]!r}, and only {supported} is supported")

"""Whether a file at the place of the output is this job's own. Knows the output's forms, not how they are written."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq

from echo_batch.errors import ConfigError

OutputFormat = Literal["parquet", "jsonl", "openai"]

METADATA_KEY = b"echo_batch"
_SUFFIXES: dict[str, OutputFormat] = {".parquet": "parquet", ".pq": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl"}


def local_output_path(output: str) -> Path:
    """The local path of an output as the user wrote it; `file://` is taken off.

    Raises ConfigError for a name that is not UTF-8 (Arrow cannot open it) and for another URL: the run directory needs
    locks and renames that object stores do not have.
    """
    try:
        output.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(f"output {output}: its name is not valid UTF-8; give another -o") from None
    scheme, separator, rest = output.partition("://")
    if not separator:
        return Path(output)
    if scheme == "file":
        return Path("/" + rest.lstrip("/"))
    raise ConfigError(
        f"output {output}: remote outputs are not supported yet; write to a local path and copy the file afterwards"
    )


def output_format(output: Path | str, asked: OutputFormat | None = None) -> OutputFormat:
    """The form of an output file: as asked with --format, else by its suffix. Raises ConfigError when neither says."""
    if asked is not None:
        return asked
    suffix = Path(output).suffix.lower()
    if suffix not in _SUFFIXES:
        raise ConfigError(
            f"output {output}: cannot tell its form from the suffix {suffix!r}; "
            "name it .parquet or .jsonl, or give --format parquet|jsonl|openai"
        )
    return _SUFFIXES[suffix]


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Enough of a file to recognise it: a rename keeps it, a write does not."""

    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> "FileStamp":
        stat = path.stat()
        return cls(stat.st_size, stat.st_mtime_ns)

    def as_list(self) -> list[int]:
        return [self.size, self.mtime_ns]


def read_output_metadata(path: Path) -> dict[str, Any] | None:
    """The echo_batch metadata of a Parquet output: run id, fingerprint, versions. None for any other file."""
    try:
        metadata = pq.read_metadata(path).metadata or {}
        value = json.loads(metadata[METADATA_KEY])
    except (OSError, ValueError, KeyError):  # not Parquet (pyarrow's ArrowInvalid is a ValueError), or not ours
        return None
    return value if isinstance(value, dict) else None

"""Which files an input is: paths, directories, globs and URLs become one sorted list of files of one form.

Knows suffixes and file systems; knows nothing of what is inside a file but the first character of a `.json`.
"""

import glob
import hashlib
import io
import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, cast

import fsspec
import pyarrow as pa
import zstandard

from echo_batch.errors import InputError, InputMissingError

Form = Literal["parquet", "jsonl", "array"]
Compression = Literal["gz", "zst"]

SUFFIXES = {".parquet": "parquet", ".pq": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json"}
COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst", ".zstd": "zst"}
SUPPORTED = ".parquet, .jsonl, .json (the text forms also as .gz or .zst)"
# What may lie beside data in a directory without being a mistake.
_NOT_DATA = (".md", ".txt", ".crc", ".py", ".yaml", ".yml", ".toml", ".gitattributes", ".license")
_BUFFER_BYTES = 1 << 20
_SAMPLE_BYTES = 64 * 1024
_NUM_SAMPLES = 16
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file: `fs` is None for local files, else an fsspec file system in which `path` is valid."""

    path: str
    size_bytes: int
    form: Form
    compression: Compression | None
    fs: Any = None

    @property
    def name(self) -> str:
        """The last part of the path, for messages and fingerprints ("?" where it is not UTF-8)."""
        return self.path.rstrip("/").rpartition("/")[2].encode("utf-8", "replace").decode()

    def read_errors(self) -> AbstractContextManager[None]:
        """`read_errors` for this file."""
        return read_errors(self.path, remote=self.fs is not None)

    def open(self, *, buffer_bytes: int = _BUFFER_BYTES) -> BinaryIO:
        """The stored bytes, seekable; `buffer_bytes` is what a local read fetches at a time. Raises InputError."""
        with self.read_errors():
            return _open(self.fs, self.path, buffer_bytes)

    def open_text(self) -> BinaryIO:
        """The bytes of the text inside, decompressed, to be read from the beginning to the end. Raises InputError."""
        return _decompress(self.open(), self.compression)


@contextmanager
def read_errors(path: str, *, remote: bool = False) -> Iterator[None]:
    """Turns what goes wrong while reading a file (missing, unreadable, corrupt archive) into our errors.

    Drivers of `remote` file systems raise anything (no credentials, no network): all of it is ours to report.
    """
    try:
        yield
    except (InputError, InputMissingError):
        raise
    except FileNotFoundError as error:
        raise InputMissingError(f"{path}: no such file") from error
    except EOFError as error:
        raise InputError(f"cannot read {path}: the compressed file ends too early") from error
    except (OSError, zlib.error, zstandard.ZstdError, ValueError, pa.ArrowException) as error:
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    except Exception as error:
        if not remote:
            raise
        raise InputError(f"cannot read {path}: {type(error).__name__}: {error}") from error


def resolve_inputs(paths: Sequence[str], *, exclude: Iterable[str] = ()) -> tuple[InputFile, ...]:
    """Files behind paths, directories, globs and URLs, each once, sorted by path.

    Directories are walked whole; names that begin with "." or "_", run directories (`*.run`) and the local files in
    `exclude` (the job's own output) are left out. Raises InputMissingError when a path or glob matches nothing,
    InputError for an unknown type or files of different forms.
    """
    if not paths:
        raise InputMissingError("no input was given")
    own = {os.path.realpath(path) for path in exclude}
    found: dict[str, InputFile] = {}
    for path in paths:
        with read_errors(path, remote="://" in path):
            for fs, name, explicit in _expand(path):
                if name in found or (fs is None and not explicit and os.path.realpath(name) in own):
                    continue
                kind = _kind(name, explicit)
                if kind is not None:
                    found[name] = _describe(fs, name, *kind)
    files = tuple(found[name] for name in sorted(found))
    if not files:
        raise InputMissingError(f"no input files in {', '.join(paths)}: expected {SUPPORTED}")
    _check_one_form(files)
    return files


def is_among(file: str, paths: Sequence[str]) -> bool:
    """Whether the local `file` lies in one of the directories or matches one of the globs of `paths`."""
    wanted = os.path.realpath(file)
    for path in paths:
        if "://" not in path or path.startswith("file://"):
            with read_errors(path, remote=False):
                if any(os.path.realpath(name) == wanted for fs, name, _ in _expand(path) if fs is None):
                    return True
    return False


def files_fingerprint(files: Sequence[InputFile]) -> list[dict[str, Any]]:
    """Name, size and a hash of each file's content.

    The hash covers up to 16 samples of 64 KiB spread over the file, ends included, so small files are covered whole.
    Times are left out on purpose: a restarted container that downloads the same input again must be able to resume.
    An edit in place that keeps the size of a file above 1 MiB can go unseen if it misses every sample.
    """
    described = []
    for file in files:
        digest = hashlib.blake2b(digest_size=8)
        with file.read_errors(), file.open() as stream:
            if file.size_bytes <= _SAMPLE_BYTES * _NUM_SAMPLES:
                digest.update(stream.read())
            else:
                for i in range(_NUM_SAMPLES):
                    stream.seek((file.size_bytes - _SAMPLE_BYTES) * i // (_NUM_SAMPLES - 1))
                    digest.update(stream.read(_SAMPLE_BYTES))
        described.append({"name": file.name, "size_bytes": file.size_bytes, "hash": digest.hexdigest()})
    return described


def _expand(path: str) -> Iterator[tuple[Any, str, bool]]:
    """(file system, path, named literally by the user) of every file behind one path."""
    fs, name = _file_system(path)
    if fs is None:
        yield from ((None, file, explicit) for file, explicit in _expand_local(name))
        return
    if fs.isdir(name):
        for file in sorted(fs.find(name)):
            if not _is_hidden(file[len(name) :]):
                yield fs, file, False
    elif any(c in name for c in "*?[") and not fs.exists(name):
        matches = [match for match in sorted(fs.glob(name)) if not fs.isdir(match)]
        if not matches:
            raise InputMissingError(f"{path}: nothing matches")
        yield from ((fs, match, False) for match in matches if not _is_hidden(match.rpartition("/")[2]))
    elif fs.exists(name):
        yield fs, name, True
    else:
        raise InputMissingError(f"{path}: no such file or directory")


def _expand_local(name: str) -> Iterator[tuple[str, bool]]:
    if os.path.isdir(name):
        yield from ((file, False) for file in _walk(name))
    elif os.path.lexists(name):
        yield os.path.abspath(name), True
    elif glob.has_magic(name):
        matches = sorted(glob.glob(name, recursive=True))
        if not matches:
            raise InputMissingError(f"{name}: nothing matches")
        for match in matches:
            if _is_hidden(os.path.basename(match)):
                continue
            if os.path.isdir(match):
                yield from ((file, False) for file in _walk(match))
            else:
                yield os.path.abspath(match), False
    else:
        raise InputMissingError(f"{name}: no such file or directory")


def _walk(directory: str) -> Iterator[str]:
    def stop(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(os.path.abspath(directory), onerror=stop):
        folders[:] = [name for name in folders if not _is_hidden(name)]
        yield from (os.path.join(folder, name) for name in names if not _is_hidden(name))


def _is_hidden(relative: str) -> bool:
    parts = [part for part in relative.split("/") if part]
    return any(part[0] in "._" for part in parts) or any(part.endswith(".run") for part in parts)


def _file_system(path: str) -> tuple[Any, str]:
    if "://" not in path:
        return None, os.path.expanduser(path)
    try:
        fs, name = fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as error:
        fs, name = _arrow_file_system(path, error)
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    return (None, name) if "file" in protocols else (fs, name)


def _arrow_file_system(path: str, reason: Exception) -> tuple[Any, str]:
    """pyarrow brings S3, GCS and HDFS of its own: enough when the fsspec driver is not installed."""
    from fsspec.implementations.arrow import ArrowFSWrapper
    from pyarrow import fs as arrow_fs

    try:
        inner, name = arrow_fs.FileSystem.from_uri(path)
    except (OSError, ValueError, ImportError):
        raise InputError(f"cannot open {path}: {reason}") from reason
    return ArrowFSWrapper(inner), name


def _kind(name: str, explicit: bool) -> tuple[str, Compression | None] | None:
    stem, suffix = os.path.splitext(name.lower())
    compression = COMPRESSIONS.get(suffix)
    if compression is not None:
        suffix = os.path.splitext(stem)[1]
    form = SUFFIXES.get(suffix)
    if form is None or (form == "parquet" and compression is not None):
        if not explicit and suffix in _NOT_DATA:
            return None
        raise InputError(f"{name}: unknown type of file; expected {SUPPORTED}")
    return form, compression


def _describe(fs: Any, name: str, kind: str, compression: Compression | None) -> InputFile:
    size = _local_size(name) if fs is None else int(fs.size(name) or 0)
    form: Form = "parquet" if kind == "parquet" else "jsonl"
    if kind == "json":
        form = _sniff(fs, name, compression)
    return InputFile(name, size, form, compression, fs)


def _local_size(name: str) -> int:
    status = os.stat(name)
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{name}: not a regular file; an input is read more than once, which a pipe cannot be")
    return status.st_size


def _sniff(fs: Any, name: str, compression: Compression | None) -> Form:
    """One array or JSON Lines: the first character tells. Raises InputError for a single object over many lines."""
    with read_errors(name), _decompress(_open(fs, name), compression) as stream:
        head = stream.read(4096).removeprefix(_BOM).lstrip()
    if head[:1] == b"[":
        return "array"
    if head.split(b"\n", 1)[0].strip() == b"{":
        raise InputError(f"{name}: one JSON object over many lines; expected JSON Lines or one array of objects")
    return "jsonl"


def _check_one_form(files: Sequence[InputFile]) -> None:
    first = files[0]
    names = {"parquet": "Parquet", "jsonl": "JSON Lines", "array": "one JSON array"}
    for file in files:
        if file.form != first.form:
            raise InputError(
                f"files of different forms: {first.path} is {names[first.form]}, {file.path} is {names[file.form]};"
                " run them as separate jobs"
            )


def _open(fs: Any, path: str, buffer_bytes: int = _BUFFER_BYTES) -> BinaryIO:
    if fs is None:
        return open(path, "rb", buffering=buffer_bytes)
    return cast(BinaryIO, fs.open(path, "rb"))


def _decompress(stream: BinaryIO, compression: Compression | None) -> BinaryIO:
    if compression is None:
        return stream
    return cast(BinaryIO, io.BufferedReader(_Decompressed(stream, compression), _BUFFER_BYTES))


def stored_bytes_read(stream: BinaryIO) -> int:
    """How much of the stored file a stream of `InputFile.open_text` has read, for progress."""
    raw = getattr(stream, "raw", None)
    return raw.stored_bytes_read() if isinstance(raw, _Decompressed) else stream.tell()


class _Decompressed(io.RawIOBase):
    """Gzip members or Zstandard frames, one after another. A cut-off one raises EOFError, which python-zstandard's own
    reader would take for a whole one."""

    def __init__(self, stream: BinaryIO, compression: Compression) -> None:
        self._stream = stream
        self._is_gzip = compression == "gz"
        # A few KiB of Zstandard can hold hundreds of megabytes of repeated text.
        self._chunk_bytes = 64 * 1024 if self._is_gzip else 4 * 1024
        self._zstd = zstandard.ZstdDecompressor()
        self._frame: Any = None
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            data = self._input or self._stream.read(self._chunk_bytes)
            self._input = b""
            if not data:
                if self._frame is not None:
                    raise EOFError
                return 0
            if self._frame is None:
                if self._is_gzip and not (data := data.lstrip(b"\0")):
                    continue  # zero padding after a member is legal
                self._frame = zlib.decompressobj(31) if self._is_gzip else self._zstd.decompressobj()
            self._output = memoryview(self._frame.decompress(data))
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count

    def stored_bytes_read(self) -> int:
        return self._stream.tell()

    def close(self) -> None:
        self._stream.close()
        super().close()

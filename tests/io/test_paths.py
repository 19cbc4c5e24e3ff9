import gzip
import io
import os
from pathlib import Path

import fsspec
import pytest
import zstandard

from echo_batch.errors import InputError, InputMissingError
from echo_batch.io.paths import InputFile, files_fingerprint, resolve_inputs


def touch(path: Path, data: bytes = b'{"prompt": "a"}\n') -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def names(files: tuple[InputFile, ...]) -> list[str]:
    return [file.name for file in files]


def test_directory_is_sorted_and_leaves_out_what_is_not_data(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", "_SUCCESS", ".hidden.jsonl", "README.md", "x.crc"):
        touch(tmp_path / name)
    touch(tmp_path / "out.jsonl.run" / "parts" / "p.parquet", b"not for us")
    touch(tmp_path / "out.jsonl")
    files = resolve_inputs([str(tmp_path)], exclude=[str(tmp_path / "out.jsonl")])
    assert names(files) == ["a.jsonl", "b.jsonl", "c.jsonl"]
    (tmp_path / "sub" / "_link").symlink_to(tmp_path)
    assert len(resolve_inputs([str(tmp_path / "sub" / "_link")], exclude=[str(tmp_path / "out.jsonl")])) == 3
    assert all(file.form == "jsonl" and file.fs is None for file in files)


def test_paths_are_sorted_and_each_file_is_read_once(tmp_path: Path) -> None:
    for name in ("10.jsonl", "2.jsonl", "x/1.jsonl"):
        touch(tmp_path / name)
    paths = [
        str(tmp_path / "2.jsonl"),
        str(tmp_path),
        str(tmp_path / "*.jsonl"),
        str(tmp_path / "x" / ".." / "2.jsonl"),
    ]
    assert names(resolve_inputs(paths)) == ["10.jsonl", "2.jsonl", "1.jsonl"]


def test_globs(tmp_path: Path) -> None:
    for name in ("a/1.jsonl", "b/2.jsonl", "b/out.jsonl"):
        touch(tmp_path / name)
    own = str(tmp_path / "b" / "out.jsonl")
    assert names(resolve_inputs([str(tmp_path / "**" / "*.jsonl")], exclude=[own])) == ["1.jsonl", "2.jsonl"]
    assert names(resolve_inputs([own], exclude=[own])) == ["out.jsonl"]  # named literally
    with pytest.raises(InputMissingError, match="nothing matches"):
        resolve_inputs([str(tmp_path / "*.parquet")])


def test_a_name_with_glob_characters_is_a_name_if_it_exists(tmp_path: Path) -> None:
    touch(tmp_path / "rows[1].jsonl")
    assert names(resolve_inputs([str(tmp_path / "rows[1].jsonl")])) == ["rows[1].jsonl"]


@pytest.mark.parametrize(
    "path", ["no.jsonl", "no/such/dir/", "no*.jsonl", "memory://no/file.jsonl", "memory://no*.json"]
)
def test_missing(path: str) -> None:
    with pytest.raises(InputMissingError):
        resolve_inputs([path])


def test_a_pipe_is_refused_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(InputError, match="not a regular file"):
        resolve_inputs([str(tmp_path / "pipe.jsonl")])


def test_empty_directory_is_missing_input(tmp_path: Path) -> None:
    with pytest.raises(InputMissingError, match="no input files"):
        resolve_inputs([str(tmp_path)])
    with pytest.raises(InputMissingError):
        resolve_inputs([])


@pytest.mark.parametrize("name", ["rows.csv", "rows", "rows.parquet.gz", "rows.gz", "rows.jsonl.bz2"])
def test_unknown_type(tmp_path: Path, name: str) -> None:
    touch(tmp_path / name)
    with pytest.raises(InputError, match="unknown type"):
        resolve_inputs([str(tmp_path / name)])
    touch(tmp_path / "good.jsonl")
    with pytest.raises(InputError, match="unknown type"):  # never dropped silently
        resolve_inputs([str(tmp_path)])


def test_mixed_forms(tmp_path: Path) -> None:
    touch(tmp_path / "a.jsonl")
    touch(tmp_path / "b.parquet")
    with pytest.raises(InputError, match=r"different forms.*a\.jsonl is JSON Lines.*b\.parquet is Parquet"):
        resolve_inputs([str(tmp_path)])
    touch(tmp_path / "b.parquet").unlink()
    touch(tmp_path / "c.json", b' \n [{"prompt": "a"}]')
    with pytest.raises(InputError, match="one JSON array"):
        resolve_inputs([str(tmp_path)])


def test_compressions_may_be_mixed(tmp_path: Path) -> None:
    touch(tmp_path / "a.jsonl")
    touch(tmp_path / "b.jsonl.gz", gzip.compress(b"{}\n"))
    touch(tmp_path / "c.ndjson.zst", zstandard.compress(b"{}\n"))
    assert [file.compression for file in resolve_inputs([str(tmp_path)])] == [None, "gz", "zst"]


@pytest.mark.parametrize(
    ("data", "form"),
    [(b'{"a": 1}\n{"a": 2}\n', "jsonl"), (b"", "jsonl"), (b"\xef\xbb\xbf [1]", "array"), (b"\n\n[]", "array")],
)
def test_json_is_told_by_its_first_character(tmp_path: Path, data: bytes, form: str) -> None:
    touch(tmp_path / "a.json", data)
    touch(tmp_path / "b.json.gz", gzip.compress(data))
    assert [file.form for file in resolve_inputs([str(tmp_path)])] == [form, form]


def test_one_object_over_many_lines_is_named(tmp_path: Path) -> None:
    touch(tmp_path / "a.json", b'{\n  "prompt": "x"\n}\n')
    with pytest.raises(InputError, match="one JSON object over many lines"):
        resolve_inputs([str(tmp_path / "a.json")])


def test_remote_files(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    for name in ("/paths-test/b.jsonl", "/paths-test/a.jsonl", "/paths-test/.x.jsonl", "/paths-test/o.run/a.parquet"):
        memory.pipe_file(name, b"{}\n")
    files = resolve_inputs(["memory://paths-test"])
    assert names(files) == ["a.jsonl", "b.jsonl"]
    assert names(resolve_inputs(["memory://paths-test/*.jsonl"])) == ["a.jsonl", "b.jsonl"]
    assert [file.size_bytes for file in files] == [3, 3]
    with files[0].open() as stream:
        assert stream.read() == b"{}\n"
    local = touch(tmp_path / "x.jsonl")
    assert resolve_inputs([f"file://{local}"])[0].fs is None
    with pytest.raises(InputError, match="cannot open nosuch://x"):
        resolve_inputs(["nosuch://x/a.jsonl"])


def test_drivers_of_remote_file_systems_may_raise_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCredentials(Exception):
        pass

    memory = fsspec.filesystem("memory")
    memory.pipe_file("/remote-errors/a.jsonl", b"{}\n")
    file = resolve_inputs(["memory://remote-errors"])[0]

    def refuse(*args: object, **kwargs: object) -> None:
        raise NoCredentials("unable to locate credentials")

    monkeypatch.setattr(type(memory), "open", refuse)
    with pytest.raises(InputError, match="NoCredentials: unable"):
        file.open()
    monkeypatch.setattr(type(memory), "isdir", refuse)
    with pytest.raises(InputError, match="memory://x: NoCredentials"):
        resolve_inputs(["memory://x"])


def test_compressed_text(tmp_path: Path) -> None:
    text = b"".join(b'{"n": %d}\n' % i for i in range(50_000))
    half = len(text) // 2
    stored = {
        "a.jsonl.gz": gzip.compress(text),
        "b.jsonl.gz": gzip.compress(text[:half]) + gzip.compress(text[half:]) + b"\0" * 512,  # members and padding
        "c.jsonl.zst": zstandard.compress(text),
        "d.jsonl.zst": zstandard.compress(text[:half]) + zstandard.compress(text[half:]),  # frames
    }
    for name, data in stored.items():
        file = resolve_inputs([str(touch(tmp_path / name, data))])[0]
        with file.open_text() as stream:
            assert stream.read() == text, name


@pytest.mark.parametrize("keep", [0.3, 0.9])
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_cut_off_archives_are_errors(tmp_path: Path, name: str, keep: float) -> None:
    from echo_batch.io.paths import read_errors

    text = bytes(range(256)) * 400
    data = gzip.compress(text, 0) if name.endswith("gz") else zstandard.ZstdCompressor(level=1).compress(text)
    file = resolve_inputs([str(touch(tmp_path / name, data[: int(len(data) * keep)]))])[0]
    with pytest.raises(InputError, match="ends too early"), read_errors(name), file.open_text() as stream:
        stream.read()


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_garbage_in_an_archive_is_an_error(tmp_path: Path, name: str) -> None:
    from echo_batch.io.paths import read_errors

    file = resolve_inputs([str(touch(tmp_path / name, b"this is plain text\n" * 100))])[0]
    with pytest.raises(InputError, match="cannot read"), read_errors(name), file.open_text() as stream:
        stream.read()


def test_fingerprint_follows_content_not_times(tmp_path: Path) -> None:
    path = touch(tmp_path / "a.jsonl", bytes(3_000_000))
    before = files_fingerprint(resolve_inputs([str(path)]))
    path.touch()
    moved = touch(tmp_path / "elsewhere" / "a.jsonl", bytes(3_000_000))
    assert files_fingerprint(resolve_inputs([str(path)])) == before
    assert files_fingerprint(resolve_inputs([str(moved)])) == before
    for at in (0, 2_999_999):
        data = bytearray(3_000_000)
        data[at] = 1
        touch(path, bytes(data))
        assert files_fingerprint(resolve_inputs([str(path)])) != before
    small = touch(tmp_path / "s.jsonl", bytes(500_000))
    before = files_fingerprint(resolve_inputs([str(small)]))
    touch(small, bytes(250_001) + b"\1" + bytes(249_998))
    assert files_fingerprint(resolve_inputs([str(small)])) != before


def test_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = resolve_inputs([str(touch(tmp_path / "a.jsonl"))])[0]

    def refuse(*args: object, **kwargs: object) -> io.BytesIO:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(InputError, match=r"a\.jsonl: Permission denied"):
        file.open()

import errno
import json
import sqlite3

import pytest

from echo_batch.errors import OutputError
from echo_batch.files import temporary_name, write_errors, write_json_atomic, write_text_atomic


def test_write_text_atomic_replaces_the_whole_file_and_leaves_no_temporary(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a longer old text")
    write_text_atomic(path, "new é")
    assert path.read_text(encoding="utf-8") == "new é"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    write_json_atomic(path, {"a": 1})
    with pytest.raises(ValueError):
        write_json_atomic(path, {"a": float("nan")})
    with pytest.raises(UnicodeEncodeError):
        write_text_atomic(path, "\ud800")
    assert json.loads(path.read_text()) == {"a": 1}
    write_json_atomic(path, {"é\udce9": 1})
    assert json.loads(path.read_text()) == {"é\udce9": 1}
    assert not temporary_name(path).exists()


def test_unwritable_places_are_output_errors(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write .*file/x\.json") as caught:
        write_text_atomic(tmp_path / "file" / "x.json", "")
    assert caught.value.exit_code == 73


def test_a_full_disk_is_an_output_error_for_files_and_sqlite(tmp_path):
    with pytest.raises(OutputError, match="No space left on device"), write_errors("x"):
        raise OSError(errno.ENOSPC, "No space left on device")
    db = sqlite3.connect(tmp_path / "db")
    db.execute("PRAGMA page_size=512")
    db.execute("CREATE TABLE t (a)")
    db.execute("PRAGMA max_page_count=10")
    with pytest.raises(OutputError, match="full"), write_errors("x"):
        db.executemany("INSERT INTO t VALUES (?)", [("a" * 400,)] * 100)


def test_other_errors_pass(tmp_path):
    with pytest.raises(sqlite3.OperationalError), write_errors("x"):
        sqlite3.connect(tmp_path / "db").execute("SELECT nonsense")
    with pytest.raises(KeyError), write_errors("x"):
        raise KeyError("x")

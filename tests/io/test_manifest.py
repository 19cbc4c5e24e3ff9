import sqlite3

import pytest

from echo_batch.errors import ConfigError
from echo_batch.io.manifest import Manifest, PartEntry
from echo_batch.request import RowFailure


@pytest.fixture
def path(tmp_path):
    return tmp_path / "manifest.sqlite"


@pytest.fixture
def manifest(path):
    manifest = Manifest(path)
    manifest.create({"barren_starts": 1})
    yield manifest
    manifest.close()


def entry(rows, failures=(), tokens=(0, 0, 0)):
    return PartEntry(
        rows=rows,
        failures=failures,
        num_input_tokens=tokens[0],
        num_cached_tokens=tokens[1],
        num_generated_tokens=tokens[2],
    )


def test_committed_rows_and_totals(manifest):
    bad = RowFailure(code="too_long", message="9 > 8")
    manifest.commit_part(1, entry([(5, 100), (2, 50)], tokens=(10, 4, 7)))
    manifest.commit_part(2, entry([(0, 8), (9, 9)], [(9, bad)], tokens=(1, 0, 1)))
    assert manifest.parts() == [1, 2]
    assert list(manifest.iter_rows()) == [(0, 8), (2, 50), (5, 100), (9, 9)]
    assert list(manifest.uncommitted([9, 8, 5, 1])) == [8, 1]
    assert manifest.num_committed() == 4
    assert list(manifest.iter_failures()) == [(9, bad)]
    totals = manifest.totals()
    assert (totals.rows, totals.failed_rows, totals.failed) == (4, 1, (("too_long", 1),))
    assert (totals.input_tokens, totals.cached_tokens, totals.generated_tokens) == (11, 4, 8)
    assert manifest.get("barren_starts") == 0


@pytest.mark.parametrize("rows", [[(7, 1), (5, 1)], [(7, 1), (7, 1)]])
def test_a_row_committed_twice_is_a_broken_invariant_and_commits_nothing(manifest, rows):
    manifest.commit_part(1, entry([(5, 1)]))
    with pytest.raises(AssertionError, match="committed already"):
        manifest.commit_part(2, entry(rows))
    assert manifest.parts() == [1]
    assert not manifest.is_committed(7)


def test_it_is_durable_at_every_commit(manifest, path):
    assert manifest._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    manifest.mark_in_flight([1])  # switches off fsync for itself
    assert manifest._db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
    with sqlite3.connect(path) as reader:
        assert reader.execute("SELECT row_id FROM in_flight").fetchall() == [(1,)]


def test_a_tidy_close_leaves_one_plain_file_that_reading_does_not_touch(manifest, path):
    manifest.set(x=1)
    manifest.close(tidy=True)
    before = path.read_bytes(), path.stat().st_mtime_ns
    again = Manifest(path)
    assert again.exists and again.get("x") == 1
    again.close(tidy=True)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert [p.name for p in path.parent.iterdir()] == ["manifest.sqlite"]


def test_losses_count_rows_in_flight_and_forget_committed_ones(manifest):
    manifest.mark_in_flight([1, 2])
    manifest.mark_in_flight([2, 3])
    manifest.commit_part(1, entry([(1, 1)]))
    assert manifest.in_flight() == [2, 3]
    manifest.count_losses()
    assert (manifest.losses(), manifest.in_flight()) == ({2: 1, 3: 1}, [])
    for _ in range(3):
        manifest.mark_in_flight([3])
        manifest.count_losses(at_most=2)
    assert manifest.losses() == {2: 1, 3: 2}
    manifest.mark_in_flight([3])
    manifest.count_losses()
    assert manifest.losses()[3] == 3
    manifest.mark_in_flight([3])
    manifest.count_losses(at_most=2)  # never takes a loss back
    assert manifest.losses()[3] == 3
    manifest.commit_part(2, entry([(3, 1)]))
    assert manifest.losses() == {2: 1}


def test_an_unfinished_file_is_no_manifest(path):
    sqlite3.connect(path).close()
    path.touch()
    manifest = Manifest(path)
    assert not manifest.exists
    manifest.close()


def test_damage_and_other_versions_are_clear_errors(path):
    path.write_bytes(b"not a database at all, but long enough to be looked at as one" * 50)
    with pytest.raises(ConfigError, match=r"damaged.*--restart"):
        Manifest(path)
    path.unlink()
    manifest = Manifest(path)
    manifest.create({"format": 99})
    manifest.close()
    with pytest.raises(ConfigError, match="format 99"):
        Manifest(path)

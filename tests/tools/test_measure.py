"""The runner of measurements: limits, going on after a cut, what it shows. On processes that need no GPU."""

import json
import sys
import time
from pathlib import Path

import pytest
from typer.main import get_command

from echo_batch.bench.cli import app
from tools import measure
from tools.measure import ITEMS, Item, chosen, is_done, run, summary


def python(name: str, code: str, *, seconds: int = 20) -> Item:
    return Item(name, "tests", (sys.executable, "-c", code), seconds)


def test_what_ended_well_is_not_run_again(tmp_path: Path):
    mark = "import pathlib; p = pathlib.Path(r'{0}'); p.write_text((p.read_text() if p.exists() else '') + 'x')"
    good = python("good", mark.format(tmp_path / "good.txt"))
    bad = python("bad", mark.format(tmp_path / "bad.txt") + "; raise SystemExit(3)")
    for _ in range(2):
        assert run([good, bad], tmp_path, time.monotonic() + 60) == ["bad"]
    assert (tmp_path / "good.txt").read_text() == "x" and (tmp_path / "bad.txt").read_text() == "xx"
    assert is_done(tmp_path, good) and not is_done(tmp_path, bad)


def test_a_hanging_item_is_cut_and_the_next_one_runs(tmp_path: Path):
    items = [python("hangs", "import time; time.sleep(60)", seconds=1), python("next", "print('1 passed')")]
    assert run(items, tmp_path, time.monotonic() + 60) == ["hangs"]
    assert [line.split() for line in summary(tmp_path, items)][1:] == [
        ["hangs", "not", "done"],
        ["next", "1", "passed"],
    ]


def test_nothing_starts_after_the_deadline(tmp_path: Path):
    assert run([python("late", "pass")], tmp_path, time.monotonic() - 1) == ["late"]
    assert not (tmp_path / "late.log").exists()


def test_ratios_are_of_the_named_cases(tmp_path: Path):
    offload = [(f"deep-{pool}", [(18, rate)]) for pool, rate in (("110K", 360.0), ("200K", 370.0), ("380K", 390.0))]
    for name, cases in (*offload, ("deep-off", [(1, 60.0), (2, 100.0), (3, 150.0)])):
        found = {"cases": [{"batch": batch, "tok_s": rate, "step_ms": 1.0} for batch, rate in cases]}
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    lines = list(summary(tmp_path, [i for i in ITEMS if i.group == "deep"]))
    assert [line.rsplit(" ", 1)[1] for line in lines if line.endswith("x")] == ["6.000x", "3.700x", "2.600x", "2.400x"]


def test_items_can_be_chosen(tmp_path: Path):
    assert {i.group for i in chosen(ITEMS, {"deep", "tests"}, {"deep-off"})} == {"deep", "tests"}
    assert "deep-off" not in {i.name for i in chosen(ITEMS, set(), {"deep-off"})}
    with pytest.raises(SystemExit, match="nonsense"):
        chosen(ITEMS, {"nonsense"}, set())


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.name)
def test_every_item_is_a_command_that_exists(item: Item):
    words = item.command[3:]
    if item.group == "tests":
        assert item.command[2] == "pytest" and (Path(measure.__file__).parents[1] / words[-1]).is_dir()
    elif item.command[2] == "echo_batch.cli":
        command = get_command(app).commands[words[1]]  # type: ignore[attr-defined]
        command.make_context(words[1], list(words[2:]))
    else:
        assert (Path(measure.__file__).parents[1] / (item.command[2].replace(".", "/") + ".py")).exists()


def test_names_are_unique():
    assert len({i.name for i in ITEMS}) == len(ITEMS)

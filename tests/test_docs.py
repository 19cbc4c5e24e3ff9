"""The documentation names everything that can be set, and every exit code."""

import re
from pathlib import Path

from echo_batch import errors
from echo_batch.config_file import config_keys
from tests.test_options import RUN_OPTIONS

DOCS = Path(__file__).parent.parent / "docs"


def test_configuration_lists_every_key_and_option() -> None:
    text = (DOCS / "configuration.md").read_text(encoding="utf-8")
    assert [key for key in config_keys() if f"| `{key}` |" not in text] == []
    options = {name for names in RUN_OPTIONS for name in names.split("/")} - {"--input", "--config", "--set"}
    assert sorted(name for name in options if f"`{name}" not in text) == []


def test_configuration_has_no_key_that_does_not_exist() -> None:
    rows = [line for line in (DOCS / "configuration.md").read_text(encoding="utf-8").splitlines() if line[:3] == "| `"]
    named = [line.split("`")[1] for line in rows]
    assert {key for key in named if "." in key and key.split(".")[0].islower() and "M" not in key} <= set(config_keys())


def test_configuration_lists_every_exit_code() -> None:
    text = (DOCS / "configuration.md").read_text(encoding="utf-8")
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.EchoBatchError)
    ]
    codes = {0, 1, 10} | {kind.exit_code for kind in kinds}
    assert sorted(code for code in codes if f"| {code} |" not in text) == []


def test_tests_that_are_named_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (DOCS / "lossless.md").read_text(encoding="utf-8"))
    assert len(named) > 15
    missing = [f"{p}::{n}" for p, n in named if f"def {n}(" not in (DOCS.parent / p).read_text(encoding="utf-8")]
    assert missing == []


def test_links_between_documents_lead_somewhere() -> None:
    for path in [*DOCS.glob("*.md"), DOCS.parent / "README.md"]:
        for part in path.read_text(encoding="utf-8").split("](")[1:]:
            target = part.split(")")[0].split("#")[0]
            if target and "://" not in target:
                assert (path.parent / target).exists(), f"{path.name}: {target}"

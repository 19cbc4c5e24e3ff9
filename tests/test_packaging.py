"""The wheel holds what the package needs, and nothing reaches in or out of the rules of pyproject.toml."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names in a wheel built from a copy of the sources, without network or isolation."""
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "echo_batch", source / "echo_batch", ignore=shutil.ignore_patterns("__pycache__"))
    code = "import setuptools.build_meta as backend; backend.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True, timeout=120)
    (wheel,) = (source / "dist").glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_wheel_contains_every_file_of_the_package(wheel_names: list[str]) -> None:
    files = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "echo_batch").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert files - set(wheel_names) == set()
    assert "echo_batch/py.typed" in files and any(f.startswith("echo_batch/bundled/echo-tiny/") for f in files)


def test_wheel_contains_nothing_else(wheel_names: list[str]) -> None:
    roots = {name.split("/")[0] for name in wheel_names}
    assert "echo_batch" in roots and len(roots) == 2
    assert any(name.endswith("entry_points.txt") for name in wheel_names)
    assert any(name.endswith("licenses/LICENSE") for name in wheel_names)


def test_constraints_pin_only_what_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    names = {d.split(";")[0].split("=")[0].split(">")[0].split("[")[0].strip().lower() for d in declared}
    for path in (ROOT / "constraints").glob("*.txt"):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
        assert all("==" in line for line in lines), path
        assert {line.split("==")[0].lower() for line in lines} <= names, path

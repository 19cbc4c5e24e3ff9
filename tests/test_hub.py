"""What --model may be, and what is said when it cannot be had."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from echo_batch.errors import ModelError
from echo_batch.hub import demo_model_dir, resolve_model


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, list[str]]]:
    """Instead of downloads, what would have been asked for."""
    asked: list[tuple[str, list[str]]] = []

    def snapshot_download(repo_id: str, *, allow_patterns: list[str]) -> str:
        asked.append((repo_id, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_a_directory_is_taken_as_it_is(tmp_path: Path, downloads: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("owner/name", weights=True) == "owner/name"
    assert resolve_model(str(tmp_path), weights=True) == str(tmp_path)
    assert downloads == []


def test_demo_is_the_bundled_model() -> None:
    assert resolve_model("demo", weights=True) == str(demo_model_dir())
    assert (demo_model_dir() / "config.json").is_file()


def test_hub_ids_fetch_weights_only_for_a_run_and_code_only_with_trust(downloads: list[tuple[str, list[str]]]) -> None:
    resolve_model("owner/name-1.0", weights=False)
    resolve_model("owner/name-1.0", weights=True)
    resolve_model("owner/name-1.0", weights=True, trust_remote_code=True)
    plan, run, trusted = (patterns for _, patterns in downloads)
    assert "*.safetensors" not in plan and "*.json" in plan
    assert "*.safetensors" in run and "*.py" not in run
    assert "*.py" in trusted
    assert not any(p.endswith((".bin", ".pt", ".pth", ".pkl")) for p in trusted)


@pytest.mark.parametrize(
    "name",
    [
        "a/b/c",
        "x" * 300,
        "~nobody-of-that-name/x",
        "nowhere",
        "/no/such/dir",
        "owner/../name",
        "http://x/y",
        "-x/y",
        "",
    ],
)
def test_what_is_neither_directory_nor_id(name: str, downloads: list[Any]) -> None:
    with pytest.raises(ModelError, match="--model"):
        resolve_model(name, weights=True)
    assert downloads == []


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (LocalEntryNotFoundError("x"), "HF_HUB_OFFLINE"),
        (OSError("disk on fire"), "disk on fire"),
        (RuntimeError("proxy said no"), "proxy said no"),
    ],
)
def test_a_failed_download_is_a_model_error(monkeypatch: pytest.MonkeyPatch, error: Exception, words: str) -> None:
    def snapshot_download(repo_id: str, *, allow_patterns: list[str]) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelError, match="--model owner/name") as caught:
        resolve_model("owner/name", weights=True)
    assert words in str(caught.value) and caught.value.exit_code == 2

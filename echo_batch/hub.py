"""From what `--model` says to a local directory: a path, a Hub id, or the bundled demo model. Imports no torch."""

import os
import re
from pathlib import Path

from echo_batch.errors import ModelError

DEMO_MODEL = "demo"
"""The word for the bundled model on the command line."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_CONFIG_FILES = ("*.json", "*.jinja", "tokenizer*", "*.model")


def demo_model_dir() -> Path:
    """Directory of the model that ships in the package."""
    return Path(__file__).parent / "bundled" / "echo-tiny"


def resolve_model(name: str, *, weights: bool, trust_remote_code: bool = False) -> str:
    """The local directory of a model, downloaded or taken from the Hub's cache if `name` is a Hub id.

    `weights` False fetches configuration and tokenizer only (a plan needs no more). Never fetches pickled weights;
    Python files come along only with `trust_remote_code`. Raises ModelError when there is nothing to be had.
    """
    # os.path's functions, unlike Path's, take names that are too long and homes that are unknown.
    path = os.path.expanduser(name)
    if name and os.path.isdir(path):
        return str(Path(path))
    if name == DEMO_MODEL:
        return str(demo_model_dir())
    if name and os.path.exists(path):
        raise ModelError(f"--model {name}: is a file; give the directory that holds config.json")
    if not _HUB_ID.fullmatch(name) or ".." in name:
        raise ModelError(f"--model {name}: no such directory (and not a Hub id of the form owner/name)")
    return _download(name, weights=weights, trust_remote_code=trust_remote_code)


def _download(repo_id: str, *, weights: bool, trust_remote_code: bool) -> str:
    import huggingface_hub
    from huggingface_hub import errors

    patterns = [*_CONFIG_FILES, *(("*.safetensors",) if weights else ()), *(("*.py",) if trust_remote_code else ())]
    try:
        return huggingface_hub.snapshot_download(repo_id, allow_patterns=patterns)
    except errors.GatedRepoError:
        reason = "access is restricted: accept its licence on the Hub and log in with `hf auth login`"
    except errors.RepositoryNotFoundError:
        reason = "neither a local directory nor a model on the Hub (private ones need `hf auth login`)"
    except errors.LocalEntryNotFoundError:
        reason = "not in the local Hub cache, and the Hub cannot be reached (or HF_HUB_OFFLINE is set)"
    except Exception as error:  # whatever its HTTP client, proxies and disks may raise
        lines = str(error).strip().splitlines()
        reason = f"download failed: {lines[0] if lines else type(error).__name__}"
    raise ModelError(f"--model {repo_id}: {reason}")

"""echo-batch: throughput-first offline batch inference for sparse-attention models.

`Engine` and `SamplingParams` are exported lazily, so that `import echo_batch` loads no torch.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Engine", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from echo_batch.api import Engine
    from echo_batch.request import SamplingParams


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from echo_batch.api import Engine

        return Engine
    if name == "SamplingParams":
        from echo_batch.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

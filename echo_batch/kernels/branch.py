"""A second line of launches beside the current stream: in a captured graph, a second branch."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Branch:
    """Launches that neither wait for nor hold up what the current stream does meanwhile. On a CPU they happen at once.

    What is launched in `fork` comes after everything launched before it; `join` makes what the current stream launches
    next come after the branch. Tensors made in the branch must live until `join`, and so must those of the current
    stream that it reads: only then may the allocator give their memory to others.
    """

    def __init__(self, device: torch.device) -> None:
        # The lowest priority: what is captured with a higher one (GraphRunner) gets the multiprocessors first.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Launches go to the branch."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """The current stream goes on after the branch."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

"""Tensors of a checkpoint read by several threads ahead of their use: from files through pinned buffers to the device.

The reader knows the order in which tensors will be asked for. It reads pieces of files (large tensors are cut), so that
all threads are busy whatever the sizes are, and keeps a bounded number of bytes that nobody has asked for yet.
"""

import os
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from echo_batch.errors import ModelError
from echo_batch.models.checkpoint import StoredTensor

NUM_THREADS = 8
PIECE_BYTES = 16 << 20
"""Read at once into a pinned buffer; a thread has two."""
AHEAD_BYTES = 1 << 30
"""Read or being read, and not asked for yet."""

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""What check_checkpoint lets pass."""


@dataclass(slots=True)
class _Loading:
    """A tensor on its way: its bytes on the device, and what is missing."""

    name: str
    stored: StoredTensor
    data: Tensor
    pieces_left: int
    events: list["torch.cuda.Event"] = field(default_factory=list)
    error: BaseException | None = None


class TensorReader:
    """Reads `wanted` (name, where it is), in this order; `take` gives each on the device. A context manager.

    `take` must be called in the order of `wanted`, from one thread; what it returns belongs to the caller.
    """

    def __init__(
        self,
        wanted: Iterable[tuple[str, StoredTensor]],
        device: torch.device,
        *,
        num_threads: int = NUM_THREADS,
        piece_bytes: int = PIECE_BYTES,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:
        if device.type == "cuda" and device.index is None:
            # Which device is current is a matter of each thread.
            device = torch.device("cuda", torch.cuda.current_device())
        self._wanted = iter(wanted)
        self._device = device
        self._piece_bytes = piece_bytes
        self._ahead_bytes = ahead_bytes
        self._changed = threading.Condition()
        self._pieces: deque[tuple[_Loading, int, int]] = deque()
        self._loading: deque[_Loading] = deque()
        self._outstanding_bytes = 0
        self._ended = self._closed = False
        self._failure: BaseException | None = None
        self._files: dict[Path, int] = {}
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take(self, name: str) -> Tensor:
        """The next tensor, which must be `name`; waits for it. ModelError if its file cannot be read."""
        with self._changed:
            self._changed.wait_for(lambda: self._loading or self._ended or self._failure)
            if not self._loading:
                raise self._failure or AssertionError(f"{name} was not announced")
            loading = self._loading[0]
            assert loading.name == name, f"{loading.name} was announced, {name} is asked for"
            self._changed.wait_for(lambda: loading.pieces_left == 0 or loading.error is not None)
            self._loading.popleft()
            self._outstanding_bytes -= loading.stored.num_bytes
            self._changed.notify_all()
        if loading.error is not None:
            raise ModelError(f"{loading.stored.file}: tensor {name} cannot be read: {loading.error}") from None
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            for event in loading.events:
                stream.wait_event(event)
            loading.data.record_stream(stream)
        return loading.data.view(DTYPES[loading.stored.dtype]).view(loading.stored.shape)

    def close(self) -> None:
        """Stop the threads and close the files; what is being read is finished."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _work(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        buffers = _Buffers(self._device, self._piece_bytes)
        while True:
            with self._changed:
                piece = self._next_piece()
                if piece is None:
                    return
                loading, start, end = piece
                descriptor = self._descriptor(loading)
            event, error = None, None
            try:
                if descriptor is not None:
                    event = buffers.read(descriptor, loading, start, end)
            except (OSError, RuntimeError) as problem:
                error = problem
            with self._changed:
                loading.error = loading.error or error
                loading.pieces_left -= 1
                if event is not None:
                    loading.events.append(event)
                self._changed.notify_all()

    def _next_piece(self) -> tuple[_Loading, int, int] | None:
        """The next piece to read; waits until there may be one more. None: no more. Called with the lock held."""
        while not self._closed:
            if self._pieces:
                return self._pieces.popleft()
            if self._ended:
                return None
            if self._outstanding_bytes >= self._ahead_bytes:
                self._changed.wait()
                continue
            try:
                self._announce()
            except BaseException as failure:  # told to whoever waits in `take`
                self._failure, self._ended = failure, True
                self._changed.notify_all()
        return None

    def _announce(self) -> None:
        """Make room for the next tensor and cut it into pieces. Called with the lock held."""
        following = next(self._wanted, None)
        if following is None:
            self._ended = True
            self._changed.notify_all()
            return
        name, stored = following
        size = stored.num_bytes
        cuts = range(0, size, self._piece_bytes)
        loading = _Loading(name, stored, torch.empty(size, dtype=torch.uint8, device=self._device), len(cuts))
        if self._device.type == "cuda":
            # Whatever had this memory before must be done with it before another stream writes to it.
            loading.events.append(torch.cuda.current_stream(self._device).record_event())
        self._outstanding_bytes += size
        self._loading.append(loading)
        self._pieces.extend((loading, start, min(start + self._piece_bytes, size)) for start in cuts)
        self._changed.notify_all()

    def _descriptor(self, loading: _Loading) -> int | None:
        file = loading.stored.file
        if file not in self._files:
            try:
                self._files[file] = os.open(file, os.O_RDONLY)
            except OSError as error:
                loading.error = error
                return None
        return self._files[file]


class _Buffers:
    """One thread's way to the device: two pinned buffers that take turns on a stream (on a CPU: none)."""

    def __init__(self, device: torch.device, piece_bytes: int) -> None:
        self._device = device
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._pinned = [torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            self._free = [torch.cuda.Event() for _ in range(2)]
            self._turn = 0

    def read(self, descriptor: int, loading: _Loading, start: int, end: int) -> "torch.cuda.Event | None":
        """Bytes start..end of a tensor to their place; the event after which they are there (None: now)."""
        target = loading.data[start:end]
        offset = loading.stored.offset + start
        if self._device.type != "cuda":
            _read_exactly(descriptor, target, offset)
            return None
        self._turn = 1 - self._turn
        free = self._free[self._turn]
        free.synchronize()
        buffer = self._pinned[self._turn][: end - start]
        _read_exactly(descriptor, buffer, offset)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(loading.events[0])
            target.copy_(buffer, non_blocking=True)
            loading.data.record_stream(self._stream)
            free.record(self._stream)
            return self._stream.record_event()


def _read_exactly(descriptor: int, target: Tensor, offset: int) -> None:
    """Fill `target` (uint8, on the CPU) from a file."""
    view = target.numpy().data
    while view:
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise OSError("the file ends within the tensor")
        view, offset = view[count:], offset + count

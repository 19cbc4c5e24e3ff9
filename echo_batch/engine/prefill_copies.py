"""Copies between a prefill's buffers and the pools, on streams of their own beside the compute (on a CPU: at once)."""

from collections import deque

import torch
from torch import Tensor

from echo_batch.cache.manager import KVCache


class HostCopies:
    """Writes finished rows of layers to the host pool and reads those of prefixes ahead of their use.

    `join` must come before anyone else uses what was written, also when a prefill is given up halfway.
    """

    def __init__(self, cache: KVCache, device: torch.device) -> None:
        self._cache = cache
        self._writes = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._reads = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._reads is not None:
            # What earlier work wrote to the host is read.
            self._reads.wait_stream(torch.cuda.current_stream(device))
        self._ahead: deque[tuple[int, Tensor]] = deque()

    def write(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        """Write rows (uint8 `[n, row_bytes]`) of slots (int32 `[n]`) once what is launched so far is done."""
        if self._writes is None:
            self._cache.write_host(layer, slots, rows)
            return
        self._writes.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._writes):
            self._cache.write_host(layer, slots, rows)
        for tensor in (slots, rows):
            tensor.record_stream(self._writes)

    def read_ahead(self, layer: int, slots: Tensor) -> None:
        """Start to read rows of slots (int32 `[n]`); `take` them later, in the same order."""
        if self._reads is None:
            self._ahead.append((layer, self._cache.read_host(layer, slots)))
            return
        with torch.cuda.stream(self._reads):
            self._ahead.append((layer, self._cache.read_host(layer, slots)))
        slots.record_stream(self._reads)

    def take(self, layer: int) -> Tensor:
        """Rows that `read_ahead` has read: uint8 `[n, row_bytes]`."""
        number, rows = self._ahead.popleft()
        assert number == layer, (number, layer)
        if self._reads is not None:
            current = torch.cuda.current_stream()
            current.wait_stream(self._reads)
            rows.record_stream(current)
        return rows

    def join(self) -> None:
        """What is launched from now on comes after all copies."""
        for stream in (self._writes, self._reads):
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)

"""Text of a running request: incremental detokenization, stop strings, the thinking part. Knows no torch.

Stop token ids are the sampler's (they end a row on the device); stop strings are found here, a step or two later.
"""

from dataclasses import dataclass
from typing import Protocol


class Detokenizer(Protocol):
    """Incremental detokenizer of one request (io.tokenizer.IncrementalDetokenizer)."""

    def add(self, token_ids: list[int]) -> str:
        """Text that these tokens add; what may still change stays back."""
        ...

    def finish(self) -> str:
        """Text held back at the end (an incomplete character becomes U+FFFD)."""
        ...


@dataclass(frozen=True, slots=True)
class FinishedText:
    """Text of a finished request; `reasoning` is what stood before the end of the thinking part, None without one."""

    text: str
    reasoning: str | None


class StopChecker:
    """Watches the text of one request. Stop strings sleep inside the thinking part and are cut from the text."""

    def __init__(self, detokenizer: Detokenizer, stop: tuple[str, ...], thinking_end: str | None) -> None:
        self._detokenizer = detokenizer
        self._stop = stop
        self._thinking_end = thinking_end
        self._pieces: list[str] = []
        # The last characters, in which a pattern may have begun: the whole text is joined only once, at the end.
        self._window = ""
        self._window_length = max((len(s) for s in (*stop, thinking_end or "")), default=1) - 1
        self._length = 0
        self._answer_start = None if thinking_end else 0
        self._cut: int | None = None

    def add(self, token_id: int) -> bool:
        """Take one token; True when a stop string is complete."""
        return self._extend(self._detokenizer.add([token_id]))

    def finish(self) -> FinishedText:
        """Text up to the stop string (if one was found), with what the detokenizer still held."""
        if self._cut is None:
            self._extend(self._detokenizer.finish())
        text = "".join(self._pieces)[: self._cut]
        if self._thinking_end is None:
            return FinishedText(text, None)
        if self._answer_start is None:
            # Generation ended while thinking: there is no answer.
            return FinishedText("", text)
        end = self._answer_start - len(self._thinking_end)
        return FinishedText(text[self._answer_start :].lstrip("\n"), text[:end].strip("\n"))

    def _extend(self, added: str) -> bool:
        if not added:
            return False
        recent = self._window + added
        base = self._length - len(self._window)
        self._pieces.append(added)
        self._length += len(added)
        self._window = recent[len(recent) - self._window_length :] if self._window_length else ""
        if self._answer_start is None:
            assert self._thinking_end is not None
            at = recent.find(self._thinking_end)
            if at < 0:
                return False
            self._answer_start = base + at + len(self._thinking_end)
        begin = max(0, self._answer_start - base)
        found = [at for s in self._stop if (at := recent.find(s, begin)) >= 0]
        if not found:
            return False
        self._cut = base + min(found)
        return True

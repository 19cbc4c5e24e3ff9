import pytest

from echo_batch.engine.stops import FinishedText, StopChecker


class Pieces:
    """Detokenizer over a list of pieces; the last piece is held back until `finish` when `held` is given."""

    def __init__(self, pieces: list[str], held: str = "") -> None:
        self.pieces, self.held = pieces, held

    def add(self, token_ids: list[int]) -> str:
        return "".join(self.pieces[i] for i in token_ids)

    def finish(self) -> str:
        return self.held


def run(pieces: list[str], stop: tuple[str, ...], thinking_end: str | None = None) -> tuple[int | None, FinishedText]:
    checker = StopChecker(Pieces(pieces), stop, thinking_end)
    for i in range(len(pieces)):
        if checker.add(i):
            return i, checker.finish()
    return None, checker.finish()


@pytest.mark.parametrize(
    ("pieces", "stop", "at", "text"),
    [
        (["ab", "cd"], ("bc",), 1, "a"),
        (["a", "b", "c", "d"], ("abc", "d"), 2, ""),
        (["xxSTO", "P", "yy"], ("STOP",), 1, "xx"),
        (["aXbY"], ("Y", "X"), 0, "a"),
        (["abc"], ("z",), None, "abc"),
        (["abc"], (), None, "abc"),
        (["", "a", ""], ("a",), 1, ""),
    ],
)
def test_stop_strings_across_pieces(pieces: list[str], stop: tuple[str, ...], at: int | None, text: str) -> None:
    assert run(pieces, stop) == (at, FinishedText(text, None))


def test_stop_strings_sleep_inside_the_thinking_part() -> None:
    at, finished = run(["so END ", "on</th", "ink>\n", "yes", "END"], ("END",), "</think>")
    assert at == 4
    assert finished == FinishedText("yes", "so END on")


def test_stop_string_right_behind_the_thinking_part_in_one_piece() -> None:
    at, finished = run(["a END</think>ok END more"], ("END",), "</think>")
    assert at == 0
    assert finished == FinishedText("ok ", "a END")


def test_ended_while_thinking() -> None:
    assert run(["hm", "m"], ("m",), "</think>") == (None, FinishedText("", "hmm"))


def test_held_text_counts_at_the_end() -> None:
    checker = StopChecker(Pieces(["a"], held="\ufffd"), (), None)
    assert not checker.add(0)
    assert checker.finish() == FinishedText("a\ufffd", None)

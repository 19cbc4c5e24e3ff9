"""What the compiled code of a GPU kernel waits for, read from its machine code.

On sm_90 an instruction of 128 bits says in bits 110 to 112 which of six scoreboards counts until its result has come,
and in bits 116 to 121 for which of them it waits before it is issued. NVIDIA does not document these bits; assemblers
for its GPUs that others have written agree on them.
"""

import importlib.util
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(r"\s*/\*([0-9a-f]{4,5})\*/\s+(.*?);\s*/\* 0x([0-9a-f]{16}) \*/")
_SECOND_HALF = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/")
_NO_SCOREBOARD = 7


class Instruction(NamedTuple):
    address: str
    text: str
    scoreboard: int
    """that counts until the result is there; 7: none"""
    waits: int
    """bits of the scoreboards that it waits for"""


def find_disassembler() -> Path | None:
    """nvdisasm, as it comes with Triton."""
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        return None
    path = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return path if path.exists() else None


def disassemble(cubin: Path) -> list[Instruction]:
    """All instructions of a cubin, in the order of their addresses."""
    command = [str(find_disassembler()), "-hex", "-c", str(cubin)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found: list[Instruction] = []
    first: tuple[str, str] | None = None
    for line in lines:
        if (match := _LINE.match(line)) is not None:
            first = match[1], match[2]
        elif first is not None and (match := _SECOND_HALF.match(line)) is not None:
            high = int(match[1], 16)
            found.append(Instruction(*first, high >> 46 & 7, high >> 52 & 63))
            first = None
    return found


def delayed_loads(code: list[Instruction], loads: str, ends: str) -> list[str]:
    """Instructions in front of which something waits for an earlier one of their group. A group is what matches `loads`
    until something matches `ends` (which may be the last of them)."""
    delayed: list[str] = []
    pending, has_waited = 0, False
    for instruction in code:
        has_waited |= bool(instruction.waits & pending)
        if re.search(loads, instruction.text):
            if has_waited:
                delayed.append(f"{instruction.address} {instruction.text}")
            if instruction.scoreboard != _NO_SCOREBOARD:
                pending |= 1 << instruction.scoreboard
        if re.search(ends, instruction.text):
            pending, has_waited = 0, False
    return delayed

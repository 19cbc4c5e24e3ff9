"""Filler text for echo-tiny: the King James Bible and Python's documentation, from two Debian packages.

Knows how to fetch, unpack and clean them; knows nothing about tokens or tasks. One paragraph a line, ASCII only.
Run `python -m tools.train_tiny.corpus OUT_DIR` (needs apt-get and dpkg); it writes train.txt and heldout.txt.
"""

import argparse
import re
import struct
import subprocess
import tempfile
from pathlib import Path

PACKAGES = ("bible-kjv-text", "python3.11-doc")
HELDOUT_EVERY = 20  # every 20th block of paragraphs is never trained on
BLOCK_CHARS = 60_000

_LZW_MAGIC = b"\x1f\x9d\x90"  # header of compress(1), 16 bits, block mode: the file stores its windows without it
_ROLE = re.compile(r":[\w:+-]+:`([^`]*)`")
_LINK_TARGET = re.compile(r"\s*<[^<>`]*>")


def fetch_packages(folder: Path) -> None:
    """Download and unpack both Debian packages below `folder`. Raises CalledProcessError when apt-get or dpkg fails."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, check=True)
    for package in sorted(folder.glob("*.deb")):
        subprocess.run(["dpkg", "-x", package.name, "."], cwd=folder, check=True)


def read_bible(path: Path) -> list[str]:
    """Paragraphs of the King James Bible (one a chapter) from Debian's `bible.data`.

    Layout: 24 bytes of magic, padding, then big-endian u32: window size at 84, header size, window offsets from 92;
    each window is an LZW stream of compress(1) without its 3-byte magic.
    """
    data = path.read_bytes()
    first = struct.unpack(">I", data[92:96])[0]
    count = (first - len(_LZW_MAGIC) - 92) // 4
    offsets = [o for o in struct.unpack(f">{count}I", data[92 : 92 + 4 * count]) if o]
    text = bytearray()
    for start, end in zip(offsets, [*offsets[1:], len(data)], strict=True):
        packed = _LZW_MAGIC + data[start:end]
        text += subprocess.run(["gzip", "-dc"], input=packed, capture_output=True, check=False).stdout
    chapters: dict[str, list[str]] = {}
    for line in text.decode("ascii", "ignore").splitlines():
        match = re.match(r"(\w+?\d+):\d+ (.*)", line)
        if match:
            chapters.setdefault(match[1], []).append(match[2].strip())
    return [" ".join(verses) for verses in chapters.values()]


def read_python_docs(folder: Path) -> list[str]:
    """Prose paragraphs of Python's reStructuredText documentation, markup and code blocks dropped."""
    paragraphs: list[str] = []
    for path in sorted(folder.rglob("*.rst.txt")):
        for block in re.split(r"\n\s*\n", path.read_text(encoding="utf-8")):
            lines = block.strip().splitlines()
            text = " ".join(line.strip() for line in lines)
            text = _LINK_TARGET.sub("", _ROLE.sub(r"\1", text)).replace("``", "").replace("`", "").replace("**", "")
            text = re.sub(r"\s+", " ", text)
            letters = sum(c.isalpha() or c == " " for c in text)
            if len(text) < 200 or text.startswith("..") or not text.isascii() or letters < 0.85 * len(text):
                continue
            if text.rstrip().endswith((".", ":")) and ">>>" not in text:
                paragraphs.append(text)
    return paragraphs


def split_corpus(paragraphs: list[str]) -> tuple[list[str], list[str]]:
    """(train, held out) paragraphs: consecutive blocks of about BLOCK_CHARS, every HELDOUT_EVERY-th one held out."""
    parts: tuple[list[str], list[str]] = ([], [])
    chars = 0
    for paragraph in paragraphs:
        parts[(chars // BLOCK_CHARS) % HELDOUT_EVERY == HELDOUT_EVERY // 2].append(paragraph)
        chars += len(paragraph)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--packages-dir", type=Path, help="where the packages are already unpacked")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.packages_dir or Path(scratch)
        if args.packages_dir is None:
            fetch_packages(folder)
        bible = read_bible(folder / "usr/lib/bible.data")
        docs = read_python_docs(folder / "usr/share/doc/python3.11")
    args.out_dir.mkdir(parents=True, exist_ok=True)
    for name, pick in (("train", 0), ("heldout", 1)):
        lines = split_corpus(bible)[pick] + split_corpus(docs)[pick]
        (args.out_dir / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="ascii")
        print(f"{name}: {len(lines)} paragraphs, {sum(map(len, lines)) / 1e6:.2f} M characters")


if __name__ == "__main__":
    main()

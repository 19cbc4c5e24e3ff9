"""Time and peak memory of the whole read path over an input: scan, preflight index, every row pulled in the order of
work, and all columns read again for the merge. Prints one JSON line.

    python tools/measure_input.py big.jsonl --tokenizer DIR
"""

import argparse
import json
import tempfile
import time
from itertools import islice
from pathlib import Path

from echo_batch.config import InputConfig, RunConfig
from echo_batch.io.chat import load_chat
from echo_batch.io.index import RowIndex, build_index
from echo_batch.io.reader import open_source
from echo_batch.io.requests import PromptLimits, RequestBuilder
from echo_batch.io.tokenizer import load_tokenizer

_PULL_ROWS = 64


def measure(path: str, tokenizer_dir: str, directory: Path, pull_rows: int | None) -> dict[str, float | int]:
    """Seconds of each stage, counts, and peak resident memory in MB."""
    seconds: dict[str, float] = {}
    start = time.monotonic()

    def lap(name: str) -> None:
        nonlocal start
        seconds[name] = round(time.monotonic() - start, 2)
        start = time.monotonic()

    config = RunConfig(input=InputConfig())
    source = open_source([path], spool_dir=directory, config=config.input)
    lap("scan_s")
    tokenizer = load_tokenizer(tokenizer_dir)
    chat = load_chat(None, tokenizer=tokenizer, model_type=None)
    limits = PromptLimits(context_tokens=1 << 20, vocab_size=1 << 20)
    builder = RequestBuilder(config, tokenizer, chat, limits, is_openai=source.is_openai)
    for _ in build_index(directory / "index.sqlite", source, builder, fingerprint=source.fingerprint()):
        pass
    lap("index_s")
    index = RowIndex(directory / "index.sqlite")
    order = islice(index.iter_order(), pull_rows)
    pulled = 0
    while ids := list(islice(order, _PULL_ROWS)):
        pulled += sum(1 for _ in source.read_records(ids))
    lap("pull_s")
    merged = sum(batch.num_rows for batch in source.iter_batches())
    lap("merge_s")
    totals = index.totals()
    assert pulled == min(totals.num_good, pull_rows or totals.num_good) and merged == totals.num_rows
    return {
        "rows": totals.num_rows,
        "tokens": totals.prompt_tokens,
        "index_bytes_per_row": round((directory / "index.sqlite").stat().st_size / max(1, totals.num_rows), 1),
        **seconds,
        "peak_rss_mb": peak_rss_mb(),
    }


def peak_rss_mb() -> int:
    """Peak resident memory of this process. Not ru_maxrss, which a child inherits from the process that started it."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) // 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("input")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--pull-rows", type=int, help="pull only the first rows of the order of work")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(measure(args.input, args.tokenizer, Path(directory), args.pull_rows)))


if __name__ == "__main__":
    main()

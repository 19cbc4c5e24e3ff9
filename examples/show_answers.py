"""Show what a demo run answered: python examples/show_answers.py out/demo.parquet"""

import sys

import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table


def main(path: str) -> int:
    """Print one line per row; returns 1 if a row failed."""
    rows = pq.read_table(path).to_pylist()
    table = Table(show_edge=False, pad_edge=False)
    for name in ("id", "question", "expected", "answer", ""):
        table.add_column(name, justify="right" if name in ("expected", "answer") else "left")
    right = failed = 0
    for row in rows:
        answer = row["generated_text"]
        failed += row["error_code"] is not None
        good = answer is not None and answer.strip().startswith(row["answer"])
        right += good
        mark = "[green]right[/]" if good else f"[red]{row['error_code'] or 'wrong'}[/]"
        table.add_row(row["id"], question(row["prompt"]), row["answer"], (answer or "").strip()[:20], mark)
    console = Console()
    console.print(table)
    console.print(f"{right} of {len(rows)} answers are right, {failed} rows failed")
    return 1 if failed else 0


def question(prompt: str) -> str:
    """The line that asks, without the long context before it."""
    lines = [line for line in prompt.splitlines() if line.startswith("Question:")]
    return lines[-1].removeprefix("Question:").strip() if lines else prompt[-60:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

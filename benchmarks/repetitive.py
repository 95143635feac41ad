"""Writes the 40 prompts of `benchmarks/data/repetitive`, whose answers repeat much of them.

    python -m benchmarks.repetitive

Made from the shipped prompts and from this project's own pages; each has the answer of somebody
who does as asked as its `reference`. The same sources give the same file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
DATA = ROOT / "benchmarks" / "data"
FILE = DATA / "repetitive" / "repetitive.jsonl"
EACH = 10
PAGES = ("architecture", "feeding", "sampling", "faults", "security")
# What a table shows after the number of a row.
COLUMNS = {
    "square": lambda n: n * n,
    "double": lambda n: 2 * n,
    "cube": lambda n: n**3,
    "hex": hex,
    "even": lambda n: "yes" if n % 2 == 0 else "no",
    "day": lambda n: ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")[n % 7],
}


def shipped(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def edited_code() -> Iterator[tuple[str, str, str]]:
    """Functions whose first parameter gets another name."""
    count = 0
    for item in shipped("humaneval"):
        code = item["prompt"].strip() + "\n" + item["reference"].rstrip()
        name = re.search(rf"def {item['entry_point']}\((\w+)", code)
        if name is None or code.count(name[1]) < 4 or len(code) < 500:
            continue
        new = ("values", "given", "source", "first")[count % 4]
        ask = f"Rename the variable {name[1]} to {new} in this code and print all of it:\n\n"
        told = re.sub(rf"\b{name[1]}\b", new, code)
        yield f"edit/{item['id']}", f"{ask}{code}\n\nThe edited code:\n\n", told
        count += 1


def quoted_passages() -> Iterator[tuple[str, str, str]]:
    for item in shipped("gsm8k"):
        if len(item["prompt"]) > 250:
            ask = f"{item['prompt']}\n\nQuote this passage.\n\n"
            yield f"quote/{item['id']}", ask, f'"{item["prompt"]}"\n'


def continued_tables() -> Iterator[tuple[str, str, str]]:
    names = [*COLUMNS]
    for i in range(EACH):
        first, second = names[i % 6], names[(i + 1 + i // 6) % 6]

        def line(n: int, first: str = first, second: str = second) -> str:
            return f"| {n} | {COLUMNS[first](n)} | {COLUMNS[second](n)} |"

        start = 3 + 7 * i
        head = f"| n | {first} | {second} |\n|---|---|---|\n"
        rows = [line(start + n) for n in range(24)]
        ask = f"Continue this table by twelve rows:\n\n{head}" + "\n".join(rows[:12]) + "\n"
        yield f"table/{i}", ask, "\n".join(rows[12:]) + "\n"


def corrected_pages() -> Iterator[tuple[str, str, str]]:
    """Paragraphs of ours in which one word is exchanged wherever it stands."""
    for page in PAGES:
        paragraphs = (ROOT / "docs" / f"{page}.md").read_text().split("\n\n")
        long = [each for each in paragraphs if 450 < len(each) < 1500 and each[0].isalpha()][:3]
        for i, paragraph in enumerate(long):
            old, new = "the", "THE"
            ask = f"Write every '{old}' of this paragraph in capitals:\n\n{paragraph}\n\n"
            yield f"correct/{page}/{i}", ask, re.sub(rf"\b{old}\b", new, paragraph)


def main() -> None:
    lines = []
    for kind in (edited_code, quoted_passages, continued_tables, corrected_pages):
        found = [made for made, _ in zip(kind(), range(EACH), strict=False)]
        assert len(found) == EACH, (kind.__name__, len(found))
        lines += [
            json.dumps(
                {"id": name, "benchmark": "repetitive", "prompt": ask, "reference": told},
                ensure_ascii=False,
            )
            for name, ask, told in found
        ]
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

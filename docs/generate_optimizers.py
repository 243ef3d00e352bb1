"""Write the table of optimizer classes into how-to/optimizers.md, from the campaign's results.

``make soak CAMPAIGN=optimizers`` runs every class and writes optimizers.json; ``make pages`` writes
the table. Classes of a package with the same verdicts share a row.
"""

import json
from collections import Counter
from itertools import groupby
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "how-to" / "optimizers.md"
BEGIN = "<!-- The table is written by `make pages` from docs/optimizers.json. -->\n"
END = "<!-- End of the table. -->\n"
COLUMNS = {
    "rows": ("stage 1 rows", "stage 3 rows"),
    "flat": ("stage 3 flat",),
    "matrices": ("stage 3 matrices",),
    "fully_shard": ("fully_shard",),
}
RIGHT = ("bits", "rounding", "codes")
NOTES = {
    "without the scalar": "¹",
    "matrices": "²",
    "matrices of one shape": "³",
}


def optimizers_page() -> str:
    """Return the page with the table of the results."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    results = json.loads((DOCS / "optimizers.json").read_text(encoding="utf-8"))
    return (
        before
        + BEGIN
        + "\n"
        + _summary(results)
        + _table(results)
        + _left_out(results)
        + END
        + after
    )


def _summary(results) -> str:
    rows = [row for each in results["classes"].values() for row in each if "cases" in row]
    counts = Counter(map(_standing, rows))
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    told = ", ".join(f"{counts[name]} {name}" for name in STANDINGS if counts[name])
    return f"{len(rows)} classes on {results['ranks']} ranks: {told}. Tried with {versions}.\n\n"


STANDINGS = (
    "right in every layout and with `fully_shard`",
    "right in some layouts and refused in others",
    "right with `gathering` alone",
    "refused when sharded",
    "wrong or failing",
)


def _standing(row) -> str:
    cells = [_cell(row, cases) for cases in COLUMNS.values()]
    if any(cell.startswith(("WRONG", "ERROR", "HANG")) for cell in cells):
        return STANDINGS[4]
    is_right = [cell.partition(" ")[0] in RIGHT for cell in cells]
    if all(is_right):
        return STANDINGS[0]
    if any(is_right):
        return STANDINGS[1]
    return STANDINGS[2] if any("gathering" in cell for cell in cells) else STANDINGS[3]


def _table(results) -> str:
    text = "| optimizers | " + " | ".join(f"`{name}`" for name in COLUMNS) + " |\n"
    text += "|---" * (len(COLUMNS) + 1) + "|\n"
    for package, rows in results["classes"].items():
        text += f"| **{package}** |" + " |" * len(COLUMNS) + "\n"
        ran = [row for row in rows if "cases" in row]
        told = [(tuple(_cell(row, cases) for cases in COLUMNS.values()), row) for row in ran]
        told.sort(key=lambda each: (_rank(each[0]), each[0], each[1]["class"].lower()))
        for cells, same in groupby(told, key=lambda each: each[0]):
            names = ", ".join(row["class"] + NOTES.get(row["parameters"], "") for _, row in same)
            text += f"| {names} | " + " | ".join(cells) + " |\n"
    return text + "\n"


def _rank(cells) -> int:
    return sum(cell.partition(" ")[0] not in RIGHT for cell in cells)


def _cell(row, cases) -> str:
    """Return a verdict; a refused one with the ways out that the message names, all tried."""
    verdicts = {case: row["cases"][case]["verdict"] for case in cases if case in row["cases"]}
    if len(set(verdicts.values())) > 1 and set(verdicts.values()) <= set(RIGHT):
        return max(verdicts.values(), key=RIGHT.index)
    verdict, case = next((v, c) for c, v in verdicts.items())
    if len(set(verdicts.values())) > 1:
        return "; ".join(f"{v} ({c})" for c, v in verdicts.items())
    if verdict != "refused":
        return verdict
    gathered = row["cases"].get(f"{case}, gathering", {}).get("verdict")
    if gathered in RIGHT:
        return f"gathering: {gathered}"
    ways = [way for way, works in row["cases"][case].get("remedies", {}).items() if works]
    return f"refused: {', '.join(ways)}" if ways else "refused"


def _left_out(results) -> str:
    rows = [
        f"- {package}'s {row['class']}: {row['left out']}\n"
        for package, each in results["classes"].items()
        for row in each
        if "left out" in row
    ]
    return "Not in the table:\n\n" + "".join(rows) + "\n"

"""The page on other engines: the results of torch's FSDPs for each requirement."""

from collections import Counter

from docs_build.reading.text import counted, table
from docs_build.recording import engines, results
from docs_build.recording.records import of_record

TITLES = {
    "bug": "Bugs of torch",
    "limit": "Limits of torch",
    "stricter": "Stricter in minifsdp",
    "extra": "Only in minifsdp",
    "differs": "Different, and both correct",
    "test": "Tests of internals",
}


@of_record("engine-torch")
def summary(record: dict) -> str:
    """The number of requirements by verdict, as Markdown."""
    rows = results.all_rows()
    counts = Counter(engines.verdict("torch", row) for row in rows)
    lines = [("passes", counts["passes"], "all tests of the requirement that ran on torch passed")]
    lines += [(TITLES[kind], counts[kind], engines.KINDS[kind]) for kind in TITLES if counts[kind]]
    lines.append(("not run", counts[None], "its tests check minifsdp's own code, its own features, or a text"))
    when = f"Run on {record['date']}; {record['machine']}."
    return f"{table(['verdict', 'requirements', 'meaning'], lines, 'lrl')}\n\n{when}"


@of_record("engine-torch")
def failures(record: dict) -> str:
    """The requirements with a failed test, with the reason of each, by kind, as Markdown."""
    parts = []
    for kind, title in TITLES.items():
        rows = [row for row in results.all_rows() if engines.verdict("torch", row) == kind]
        if rows:
            shown = [(row, _reason(row), _numbers(record["rows"][row])) for row in rows]
            parts.append(f"### {title}\n\n{table(['requirement', 'with torch', 'passed'], shown, 'llr')}")
    return "\n\n".join(parts)


def _reason(row: str) -> str:
    reason = engines.reasons("torch")[row]
    case = f" [Program](torch-is-wrong.md#{reason['case']})." if "case" in reason else ""
    return reason["reason"].replace("|", "\\|") + case


def _numbers(result: dict) -> str:
    return f"{result['passed']} of {result['passed'] + len(result['failed'])}"


@of_record("engine-naive")
def naive(record: dict) -> str:
    """The score of the tutorial's FSDP in one sentence."""
    rows = record["rows"].values()
    some, whole = sum(row["passed"] > 0 for row in rows), sum(not row["failed"] for row in rows)
    return f"It passes a test of {some} of the {counted(len(rows), 'requirement')} that ran, and all tests of {whole}."


def mark(row: str) -> str:
    """The verdict of torch for the spec page; empty if no test of the requirement ran."""
    verdict = engines.verdict("torch", row)
    if verdict is None:
        return ""
    return "torch passes" if verdict == "passes" else f"torch: {TITLES.get(verdict, 'fails').lower()}"

"""The evidence for correctness: figures of the first page and of the page on evidence, computed from the records.

``docs/data/torch-tests.json`` is the record of a run of PyTorch's own FSDP tests, written manually from a harness that
is not part of this project: when, where, of which commit, and how many tests ran and passed in each file.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

from docs_build import results
from docs_build.order import ROOT

__all__ = ["figures", "mutants", "torch_tests", "torch_tests_table", "where_table"]

DATA = ROOT / "docs" / "data"


def figures() -> str:
    """Four figures, each with a link to its explanation."""
    cells = "".join(
        f'<li><a href="{address}"><b>{escape(figure)}</b> <span>{escape(words)}</span></a></li>'
        for figure, words, address in (_torch_tests(), _beside_torch(), _where(), _breaks())
    )
    return f'<ul class="evidence">{cells}</ul>'


def _read(name: str) -> Any:
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def torch_tests() -> tuple[int, int]:
    """The number of PyTorch's own tests that passed, and the number that ran."""
    files = _read("torch-tests")["files"].values()
    return sum(passed for passed, _ in files), sum(ran for _, ran in files)


def _torch_tests() -> tuple[str, str, str]:
    passed, ran = torch_tests()
    words = "of PyTorch's own FSDP tests pass with minifsdp instead of torch's FSDP, on CPUs"
    return f"{passed} of {ran}", words, "evidence.html#torchs-own-tests"


def _beside_torch() -> tuple[str, str, str]:
    ratios = _read("benchmarks")["ratios"]
    ours = [one["median"] for rows in ratios.values() for name, one in rows.items() if name.startswith("minifsdp")]
    words = f"the time of torch's fastest FSDP, equal losses, in {len(ratios)} workloads on two CPU cores"
    return f"{min(ours):.2f} to {max(ours):.2f} \N{MULTIPLICATION SIGN}", words, "benchmarks.html"


def _where() -> tuple[str, str, str]:
    rows = results.recorded()["rows"].values()
    cpu, simulated, cuda = (sum(row["results"].get(name) == "proven" for row in rows) for name in results.BACKENDS)
    gpus = f"{cuda} on GPUs" if cuda else "none on a GPU yet"
    words = f"requirements tested on CPUs, {simulated} on the simulated accelerator, {gpus}"
    return f"{cpu} of {len(rows)}", words, "spec.html"


def mutants() -> tuple[int, int, int]:
    """The numbers of detected mutants of the package, of all mutants, and of requirements that detect them."""
    known = _read("mutants")["mutants"].values()
    return sum(bool(one["red"]) for one in known), len(known), len({row for one in known for row in one["red"]})


def _breaks() -> tuple[str, str, str]:
    noticed, total, _ = mutants()
    return (
        f"{noticed} of {total}",
        "mutations of the package make a test of a requirement fail",
        "evidence.html#broken-on-purpose",
    )


def torch_tests_table() -> str:
    """PyTorch's test files, with the numbers of tests that ran and passed, as Markdown."""
    record = _read("torch-tests")
    rows = "\n".join(f"| `{name}` | {passed} | {ran} |" for name, (passed, ran) in sorted(record["files"].items()))
    passed, ran = torch_tests()
    head = f"| file of PyTorch {record['tests_of']} | passed | ran |\n|---|--:|--:|\n"
    return (
        f"{head}{rows}\n| all | {passed} | {ran} |\n\n"
        f"Run on {record['date']} at commit `{record['commit'][:10]}`; {record['machine']}."
    )


def where_table() -> str:
    """The number of tested requirements for each backend, with the date, as Markdown."""
    record = results.recorded()
    lines = ["| backend | requirements tested | date | machine |", "|---|--:|---|---|"]
    for backend, words in results.WHERE.items():
        proven = sum(row["results"].get(backend) == "proven" for row in record["rows"].values())
        run = record["runs"].get(backend, {"date": "never run", "machine": ""})
        lines.append(f"| {words} | {proven} of {len(record['rows'])} | {run['date']} | {run['machine']} |")
    return "\n".join(lines)

"""The evidence for correctness: figures of the first page and of the page on evidence, computed from the records.

``docs/data/torch-tests.json`` is the record of a run of PyTorch's own FSDP tests, written manually from a harness that
is not part of this project. It has the date, the machine, the commit, and for each file the number of tests that ran
and passed.
"""

from docs_build.recording import results
from docs_build.recording.records import load
from docs_build.templates import PAGES


def figures() -> str:
    """Four figures, each with a link to its explanation."""
    ratios = load("benchmarks")["ratios"]
    ours = [one["median"] for rows in ratios.values() for name, one in rows.items() if name.startswith("minifsdp")]
    passed, ran = map(sum, zip(*load("torch-tests")["files"].values(), strict=True))
    proven, total = map(results.num_proven, results.BACKENDS), len(results.recorded()["rows"])
    return PAGES.evidence((passed, ran), (min(ours), max(ours)), len(ratios), list(proven), total, mutants())


def mutants() -> tuple[int, int, int]:
    """The numbers of detected mutants of the package, of all mutants, and of requirements that detect them."""
    known = load("mutants")["mutants"].values()
    return sum(bool(one["red"]) for one in known), len(known), len({row for one in known for row in one["red"]})

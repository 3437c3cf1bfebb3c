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
    cpu, simulated, cuda = map(results.num_proven, results.BACKENDS)
    noticed, total, _ = mutants()
    gpus = f"{cuda} on GPUs" if cuda else "not recorded on a GPU yet"
    shown = [
        "{} of {}".format(*torch_tests()),
        f"{min(ours):.2f} to {max(ours):.2f} \N{MULTIPLICATION SIGN}",
        f"{cpu} of {len(results.recorded()['rows'])}",
        f"{noticed} of {total}",
    ]
    return PAGES.evidence(shown, len(ratios), f"{simulated} on the simulated accelerator, {gpus}")


def torch_tests() -> tuple[int, int]:
    """The number of PyTorch's own tests that passed, and the number that ran."""
    files = load("torch-tests")["files"].values()
    return sum(passed for passed, _ in files), sum(ran for _, ran in files)


def mutants() -> tuple[int, int, int]:
    """The numbers of detected mutants of the package, of all mutants, and of requirements that detect them."""
    known = load("mutants")["mutants"].values()
    return sum(bool(one["red"]) for one in known), len(known), len({row for one in known for row in one["red"]})

"""The evidence for correctness: figures of the first page and of the page on evidence, computed from the records.

``docs/data/torch-tests.json`` is the record of a run of PyTorch's own FSDP tests, written manually from a harness that
is not part of this project. It has the date, the machine, the commit, and for each file the number of tests that ran
and passed.
"""

from docs_build.reading.text import table
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


def torch_tests_table() -> str:
    """PyTorch's test files, with the numbers of tests that ran and passed, as Markdown."""
    record = load("torch-tests")
    rows = [(f"`{name}`", *numbers) for name, numbers in sorted(record["files"].items())]
    heads = [f"file of PyTorch {record['tests_of']}", "passed", "ran"]
    where = f"Run on {record['date']} at commit `{record['commit'][:10]}`; {record['machine']}."
    return f"{table(heads, [*rows, ('all', *torch_tests())], 'lr')}\n\n{where}"


def where_table() -> str:
    """The number of tested requirements for each backend, with the date, as Markdown."""
    record, rows = results.recorded(), []
    for backend, words in results.WHERE.items():
        run = record["runs"].get(backend, {"date": "never run", "machine": ""})
        proven = f"{results.num_proven(backend)} of {len(record['rows'])}"
        rows.append([words, proven, run["date"], run["machine"]])
    return table(["backend", "requirements tested", "date", "machine"], rows, "lrl")

"""The tables of the page "Which optimizers may I use?", from recorded training on two ranks."""

import inspect
from typing import Any

from docs_build.reading.text import table
from docs_build.recording.optimizer_runs import CASES, FORMS, NAME, OnUnsharded
from docs_build.recording.records import of_record

# A deviation up to SAME is rounding of float64. One up to CLOSE is small, compared with what training changes.
SAME, CLOSE = 1e-9, 0.05
HEADS = {
    "flat": "flat",
    "original": "original",
    "fully_shard": "fully_shard",
    "original, unsharded": "unsharded, wrapper",
    "fully_shard, unsharded": "unsharded, fully_shard",
}
# For each kind of optimizer: the values from which it computes the update of an element, and advice.
NEEDS = {
    "element": ("this element of the gradient", "Use it with each API."),
    "block": (
        "a block of consecutive elements, which share a scale",
        "Use it with each API. Blocks begin at other elements, so that values are rounded differently.",
    ),
    "tensor": (
        "norms of the parameter, and averages over its rows and columns",
        "Use unsharded copies.",
    ),
    "matrix": ("products with all rows and all columns of the matrix", "Use unsharded copies."),
    "all": (
        "norms or products over all parameters",
        "Sum these numbers over all ranks in the optimizer, or use unsharded copies.",
    ),
}


def verdict(run: dict[str, Any]) -> str:
    """``same``, ``close``, ``different`` or ``error``, from the measured deviation."""
    if run["error"]:
        return "error"
    deviation = run["deviation"]
    return "same" if deviation <= SAME else "close" if deviation <= CLOSE else "different"


@of_record(NAME)
def deviations(record: Any) -> str:
    """The verdict and the deviation of each optimizer on each kind of shards."""
    rows = [[case.name, *(_cell(record["cases"][case.name][form]) for form in HEADS)] for case in CASES]
    return table(["optimizer", *HEADS.values()], rows)


def _cell(run: dict[str, Any]) -> str:
    word = verdict(run)
    number = f", {run['deviation']:.1%}" if word in ("close", "different") else ""
    return f"{word}{number}{', warning' if run['warned'] else ''}"


@of_record(NAME)
def kinds(record: Any) -> str:
    """The kinds of optimizers, with the verdicts that occur, and the remedy."""
    rows = []
    for kind, (needs, remedy) in NEEDS.items():
        names = [case.name for case in CASES if case.needs == kind and case.of_shards is None]
        runs = [record["cases"][name] for name in names]
        found = [" or ".join(dict.fromkeys(verdict(run[form]) for run in runs)) for form in FORMS]
        rows.append([needs, ", ".join(names), *found, remedy])
    heads = ["an element is computed from", "optimizers", *(HEADS[form] for form in FORMS), "what to do"]
    return table(heads, rows)


@of_record(NAME)
def errors(record: Any) -> str:
    """The error messages, each with the optimizer and the kind of shards."""
    runs = ((name, form, by_form[form]["error"]) for name, by_form in record["cases"].items() for form in HEADS)
    rows = [[name, HEADS[form], error.replace("|", "\\|")] for name, form, error in runs if error]
    return table(["optimizer", "parameters", "error"], rows)


@of_record(NAME)
def shards(record: Any) -> str:
    """The shapes of the parameters on each rank."""
    rows = [
        [HEADS[form], *(", ".join(f"`{tuple(shape)}`" for shape in shapes) for shapes in ranks)]
        for form, ranks in record["shapes"].items()
    ]
    return table(["parameters", "rank 0", "rank 1"], rows)


@of_record(NAME)
def about(record: Any) -> str:
    """The circumstances of the record."""
    return f"{record['steps']} steps on two ranks, float64; {record['date']}, {record['machine']}."


def copies() -> str:
    """The code of the optimizer on unsharded copies, as a block of Markdown."""
    return f"```python\n{inspect.getsource(OnUnsharded)}```"

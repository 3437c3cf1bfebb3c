"""Labels for a requirement: where it was tested, how, and what is still open.

Three things weaken a result, and each has its own labels:

* **Where.** A requirement tagged ``[cuda]`` can only be tested completely on CUDA. A CPU shows a weaker property (``in
  part``). The simulated accelerator shows order, memory and CPU waits, but no kernels and no times.
* **How.** A test may only check the ``order``, compute without the package (``arithmetic``), or read a page (``text``).
* **Whether.** If no run is recorded, the label is ``never run``.

Only behaviour that was tested completely is green. Colours repeat the words and add no information.
"""

from collections import Counter
from collections.abc import Iterable

from docs_build.recording import results
from docs_build.recording.results import BACKENDS, KINDS, WHERE, SpecRow, css_class
from docs_build.templates import PAGES


def _only(kind: str) -> str:
    return kind if kind.endswith("only") else f"{kind} only"


CPU, SIMULATED, CUDA = BACKENDS
SHORT = {CPU: "CPU", SIMULATED: "simulated", CUDA: "CUDA"}
ORDER = ("proven", "in part", *(_only(kind) for kind in KINDS[1:]), "failed")
# The names of a requirement's tags in the filter of the spec page.
FILTERS = {
    "proven": "proven completely, by behaviour",
    "in-part": "proven in part: needs CUDA",
    "open-on-nccl": "open on NCCL",
    "simulated": "proven on the simulated accelerator",
    "order-only": "order only",
    "arithmetic-only": "arithmetic only",
    "text-only": "text only",
    "unproven": "not proven on any backend",
    "not-recorded": "newer than the last recorded run",
    "failed": "failed",
}


def is_whole(row: SpecRow, backend: str) -> bool:
    """Whether a backend can show everything that the requirement states."""
    return backend == CUDA or not row.needs_cuda


def badges(row: SpecRow) -> str:
    """A small label for each backend that has a result."""
    shown = [backend for backend in BACKENDS if backend != SIMULATED or row.results.get(SIMULATED) != "unproven"]
    return " ".join(PAGES.badge(*_said(row, backend), SHORT[backend]) for backend in shown)


def outcomes(of_backends: Iterable[tuple[str, str]]) -> str:
    """A label for each pair of a backend and the outcome of a test there."""
    return " ".join(PAGES.badge(outcome, css_class(outcome), WHERE[backend]) for backend, outcome in of_backends)


def _said(row: SpecRow, backend: str) -> tuple[str, str]:
    """The text and the tone of a badge."""
    verdict, kind = row.results.get(backend, "unproven"), row.kinds.get(backend, KINDS[0])
    if verdict == "failed":
        return "failed", "failed"
    if verdict == "unproven":
        has_run = backend in results.recorded()["runs"] and row.is_recorded
        return ("open" if has_run else "never run"), "open"
    if kind != KINDS[0]:
        return _only(kind), "part"
    if backend == SIMULATED:
        return "proven", "simulated"
    return ("proven", "proven") if is_whole(row, backend) else ("in part", "part")


def tags(row: SpecRow) -> list[str]:
    """The `FILTERS` that show a requirement."""
    proven = [backend for backend in BACKENDS if row.results.get(backend) == "proven"]
    kinds = [row.kinds.get(backend, KINDS[0]) for backend in proven]
    best = min(kinds, key=KINDS.index) if kinds else None
    whole = any(is_whole(row, backend) and row.kinds.get(backend, KINDS[0]) == KINDS[0] for backend in proven)
    asked = {
        "proven": whole,
        "in-part": bool(proven) and row.needs_cuda and CUDA not in proven,
        "open-on-nccl": CUDA not in proven,
        "simulated": SIMULATED in proven,
        **{_only(kind).replace(" ", "-"): best == kind for kind in KINDS[1:]},
        "unproven": not proven,
        "not-recorded": not row.is_recorded,
        "failed": "failed" in row.results.values(),
    }
    return [tag for tag, has in asked.items() if has]


def where_proven(rows: Iterable[SpecRow]) -> str:
    """The number of tested requirements for each backend and label: ``CPU: 7 proven, 1 in part; CUDA: never run``."""
    rows = list(rows)
    parts = []
    for backend, where in WHERE.items():
        said = Counter(_said(row, backend)[0] for row in rows if row.results.get(backend) != "unproven")
        counts = ", ".join(f"{said[words]} {words}" for words in ORDER if said[words])
        none = "none" if backend in results.recorded()["runs"] else "never run"
        parts.append(f"{where}: {counts or none}")
    return "; ".join(parts)

"""Records which tests passed with which version of torch.

    python -m docs_build.recording.versions BACKEND FILE.xml...

Run it in the environment with that version, after runs of the tests with ``--junitxml FILE.xml``. It updates one entry
of ``docs/data/versions.json``. The page "Supported versions" shows them.
"""

import sys
from collections import Counter
from importlib import metadata
from typing import Any
from xml.etree import ElementTree

from docs_build.reading.text import table
from docs_build.recording.records import load, of_record, save, stamp
from docs_build.recording.results import WHERE

KINDS = ("passed", "failed", "skipped")


def outcomes(*paths: str) -> dict[str, Any]:
    """The number of tests with each outcome in files of ``--junitxml``, and the names of those that failed.

    A later file replaces the outcomes of an earlier one, so that a file of tests can be run again.
    """
    found: dict[str, str] = {}
    for path in paths:
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            module, name = str(case.get("classname")), str(case.get("name"))
            # A module that cannot be imported has a case with its name and without a class.
            found.pop(f"::{module}", None)
            found[f"{module}::{name}"] = _outcome(case)
    counts = Counter(found.values())
    failures = sorted(name for name, kind in found.items() if kind == "failed")
    return {**{kind: counts[kind] for kind in KINDS}, "failures": failures}


def _outcome(case: ElementTree.Element) -> str:
    tags = {child.tag for child in case}
    return "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"


@of_record("versions")
def versions(record: Any) -> str:
    """A row for each version of torch and each backend, as Markdown."""
    rows = [
        (f"torch {version}", WHERE[backend], run["date"], run["passed"], run["failed"] or "none")
        for version, backends in sorted(record.items())
        for backend, run in sorted(backends.items())
    ]
    return table(["version", "tests on", "date", "passed", "failed"], rows, "lllrr")


def main(backend: str, *paths: str) -> None:
    """Updates the entry of this version of torch and of the backend."""
    record = load("versions") or {}
    version = metadata.version("torch").partition("+")[0]
    record.setdefault(version, {})[backend] = {**stamp(), **outcomes(*paths)}
    save("versions", record)


if __name__ == "__main__":
    main(*sys.argv[1:])

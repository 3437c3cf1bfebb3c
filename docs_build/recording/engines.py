"""The results of the tests on another engine than minifsdp, requirement by requirement.

``python -m pytest --engine torch`` writes ``build/spec-results-torch.json`` and ``build/spec-errors-torch.json``.
``python -m docs_build.recording.engines torch`` makes the record ``docs/data/engine-torch.json`` of them. Results in
other build folders, of sessions that ran a part of the tests, are arguments after the name of the engine.

The table ``docs/data/engine-torch-reasons.toml`` has a reason for each requirement that fails, written manually::

    [SHARD-10]
    kind = "limit"
    reason = "torch's wrapper warns that NO_SHARD is deprecated."
"""

import json
import sys
import tomllib
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from docs_build.reading.order import ROOT
from docs_build.recording.records import DATA, load, machine, save

# The reasons why a requirement fails with another engine.
KINDS = {
    "bug": "torch contradicts its documentation, a plain module, or itself",
    "limit": "torch does not support this, and documents it or raises an error",
    "stricter": "minifsdp raises an error or warns on purpose, and torch does not",
    "extra": "minifsdp has a feature that torch does not have",
    "differs": "both are correct, and they differ in an order, a message or a representation",
    "test": "the test depends on how minifsdp is built, and the requirement itself may hold with torch",
}


def record(engine: str, folders: list[Path]) -> dict[str, Any]:
    """The record of the sessions whose results are in ``folders``; later folders win for tests that ran twice."""
    rows: dict[str, dict[str, Any]] = {}
    for folder in folders:
        path = folder / f"spec-results-{engine}.json"
        errors = json.loads((folder / f"spec-errors-{engine}.json").read_text())
        for row, result in json.loads(path.read_text()).items():
            tests = rows.setdefault(row, {})
            for name, outcomes in result["tests"].items():
                outcome = outcomes.get("cpu-gloo", "not run")
                if outcome not in ("not run", "skipped"):
                    tests[name] = "" if outcome.startswith("passed") else errors.get(name, "failed")
    when = datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime("%Y-%m-%d")
    return {"date": when, "machine": machine(), "rows": {row: _of_tests(tests) for row, tests in rows.items() if tests}}


def _of_tests(tests: dict[str, str]) -> dict[str, Any]:
    """Numbers of tests without their variants, and an error for each test with a failed variant."""
    failed: dict[str, str] = {}
    for name, error in tests.items():
        if error:
            failed.setdefault(name.partition("[")[0], error)
    names = {name.partition("[")[0] for name in tests}
    return {"passed": len(names) - len(failed), "failed": failed}


@cache
def reasons(engine: str) -> dict[str, dict[str, str]]:
    """The reasons by requirement."""
    path = DATA / f"engine-{engine}-reasons.toml"
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def verdict(engine: str, row: str) -> str | None:
    """``"passes"``, the kind of its reason, ``"fails"`` without a reason, or None if no test of it ran."""
    result = (load(f"engine-{engine}") or {"rows": {}})["rows"].get(row)
    if result is None:
        return None
    return reasons(engine).get(row, {}).get("kind", "fails") if result["failed"] else "passes"


if __name__ == "__main__":
    save(f"engine-{sys.argv[1]}", record(sys.argv[1], [Path(name) for name in sys.argv[2:]] or [ROOT / "build"]))

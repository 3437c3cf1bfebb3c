"""``python -m spec_tools.published``: predicts the published rows, and writes the file. It takes some minutes.

Spec: CHECKED-01 to CHECKED-03.
"""

from __future__ import annotations

import multiprocessing

from minifsdp_tools.simulate.recording import record
from spec_tools.published import table
from spec_tools.published.predictions import lines_of, save
from spec_tools.published.setups import Case, case_of, parts_of


def main() -> None:
    """Runs the command."""
    rows = table.load()
    cases = [case for case in map(case_of, rows) if isinstance(case, Case)]
    setups = list(dict.fromkeys(part for case in cases for part, _ in parts_of(case.setup)))
    # A recording initializes a fake process group.
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        recordings = dict(zip(setups, pool.map(record, setups, chunksize=1), strict=True))
    save(list(lines_of(rows, recordings)))


if __name__ == "__main__":
    main()

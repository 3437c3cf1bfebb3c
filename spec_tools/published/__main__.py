"""``python -m spec_tools.published``: predicts the published rows, and writes the file and the tables of the page.

::

    python -m spec_tools.published                    # record what is missing in build/, fit, predict, write
    python -m spec_tools.published --rows mpt-7b      # print the rows whose names contain a text, write nothing
    python -m spec_tools.published --page             # write the tables of the page from the file

A first run takes some minutes. Spec: CHECKED-01 to CHECKED-05.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from minifsdp_tools.simulate.setup import Setup
from spec_tools.published import compare, page, recordings, setups, table
from spec_tools.published.table import Row


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit status."""
    parser = argparse.ArgumentParser("python -m spec_tools.published", description="Predicts the published rows.")
    parser.add_argument("--rows", help="predict and print only the rows whose names contain this text")
    parser.add_argument("--page", action="store_true", help="write the tables of the page from the file")
    parser.add_argument("--processes", type=int, default=2, help="processes that record")
    given = parser.parse_args(arguments)
    if not given.page:
        rows = table.load()
        lines = compare.compare(rows, recordings.recorded(needed(rows), given.processes))
        if given.rows is not None:
            chosen = [line for line in lines if given.rows in line.row]
            for line in chosen:
                print(f"{line.row:48} {line.quantity:18} {line.predicted} {line.measured} {line.error_percent}")
            return 0
        compare.save(lines)
    text = page.PAGE.read_text(encoding="utf-8")
    page.PAGE.write_text(page.inserted(text, compare.load()), encoding="utf-8")
    return 0


def needed(rows: Iterable[Row]) -> list[Setup]:
    """The setups to record, each once."""
    cases = [case for case in map(setups.case_of, rows) if isinstance(case, setups.Case)]
    return list(dict.fromkeys(part for case in cases for part, _ in setups.parts_of(case.setup)))


if __name__ == "__main__":
    raise SystemExit(main())

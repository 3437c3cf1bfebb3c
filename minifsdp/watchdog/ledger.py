"""``python -m minifsdp.ledger FILE`` prints a report file, which a process that ends by a failed collective writes.

The command prints the state of every rank, and below it the last collectives of the group, with one column for each
rank and one line for each position. ``>`` marks the lines in which the ranks differ::

        group 0, epoch 3      rank 0                           rank 1
        0                     all-gather of 'a' in forward     all-gather of 'a' in forward
        1                   > all-gather of 'b' in forward     order check in backward

*In torch:* ``torchfrtrace`` prints tables of NCCL's flight recorder.

Spec: LEDGER-07, LEDGER-17, LEDGER-20.
"""

import argparse
import json
from itertools import groupby
from pathlib import Path
from typing import Any

from minifsdp.watchdog.report import IDENTITY


def table_of(report: dict[str, Any], most: int) -> str:
    """The table as text.

    Args:
        report: the contents of the file: the text of the report, and the fields of `Findings` by rank.
        most: the number of positions to print, counted from the end.
    """
    text = [
        report["report"],
        "",
        "An epoch ends when the ranks compare their collectives, at the end of a backward.",
    ]
    columns = {
        rank: {tuple(line[:3]): line for line in lines}
        for rank, lines in report["lines"].items()
    }
    cells = {
        rank: {position: f"{line[3]} ({line[4]})" for position, line in column.items()}
        for rank, column in columns.items()
    }
    widest = [len(cell) for column in cells.values() for cell in column.values()]
    width = 2 + max(widest, default=0)
    positions = sorted({position for column in cells.values() for position in column})
    for epoch, of_epoch in groupby(positions[-most:], lambda position: position[:2]):
        heads = "".join(f"rank {rank}".ljust(width) for rank in columns)
        text.append("group {}, epoch {}".format(*epoch).ljust(24) + heads)
        for position in of_epoch:
            identities = {
                tuple(column[position][IDENTITY:])
                for column in columns.values()
                if position in column
            }
            mark = ">" if len(identities) > 1 else " "
            row = "".join(
                column.get(position, "").ljust(width) for column in cells.values()
            )
            text.append(f"{position[2]:>6}{mark:>16}  {row}".rstrip())
    return "\n".join(text)


def main() -> None:
    """Prints the table for the file on the command line."""
    parser = argparse.ArgumentParser(
        "python -m minifsdp.ledger",
        description="Draws the collective logs of a failure.",
    )
    parser.add_argument("file", type=Path, help="the file that the error message names")
    parser.add_argument(
        "--last",
        type=int,
        default=40,
        help="number of collectives to show, counted from the end",
    )
    options = parser.parse_args()
    print(table_of(json.loads(options.file.read_text(encoding="utf-8")), options.last))

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
    positions = sorted(
        {position for column in columns.values() for position in column}
    )[-most:]
    # A cell is a text and a place in parentheses; between columns are two spaces.
    width = 5 + max(
        (
            len(line[3] + line[4])
            for lines in columns.values()
            for line in lines.values()
        ),
        default=0,
    )
    for index, (group, epoch, number) in enumerate(positions):
        if index == 0 or positions[index - 1][:2] != (group, epoch):
            heads = "".join(f"rank {rank}".ljust(width) for rank in columns)
            text.append(f"group {group}, epoch {epoch}".ljust(24) + heads)
        there = [column.get((group, epoch, number)) for column in columns.values()]
        mark = (
            ">" if len({tuple(line[IDENTITY:]) for line in there if line}) > 1 else " "
        )
        cells = "".join(
            (f"{line[3]} ({line[4]})" if line else "").ljust(width) for line in there
        )
        text.append(f"{number:>6}{mark:>16}  {cells}".rstrip())
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


if __name__ == "__main__":
    main()

"""``python -m minifsdp.ledger FILE``: draws the report that a rank has written when a collective failed.

Below the state of every rank, it prints the last collectives of the group: one column for each rank, one line for each
position. ``>`` marks the lines in which the ranks differ::

        group 0, epoch 3      rank 0                                 rank 1
        0                     all-gather of 'a' in forward           all-gather of 'a' in forward
        1                   > all-gather of 'b' in forward           order check in backward

*In torch:* ``torchfrtrace`` prints tables of NCCL's flight recorder.

Spec: LEDGER-07.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from minifsdp.watchdog.report import in_words

WIDTH = 44


def drawn(report: dict[str, Any], most: int) -> str:
    """The drawing as text.

    Args:
        report: the contents of the file: ``states``, ``lines`` and ``diverging``, by rank.
        most: how many positions to print, counted from the end.
    """
    states = {int(rank): state for rank, state in report["states"].items()}
    diverging = {int(rank): line for rank, line in report["diverging"].items()}
    columns = {int(rank): {tuple(line[:3]): line for line in lines} for rank, lines in report["lines"].items()}
    text = [in_words(states, diverging), ""]
    positions = sorted({position for column in columns.values() for position in column})[-most:]
    for index, (group, epoch, number) in enumerate(positions):
        if index == 0 or positions[index - 1][:2] != (group, epoch):
            heads = "".join(f"rank {rank}".ljust(WIDTH) for rank in columns)
            text.append(f"group {group}, epoch {epoch}".ljust(24) + heads)
        there = [column.get((group, epoch, number)) for column in columns.values()]
        mark = ">" if len({line[7] for line in there if line}) > 1 else " "
        cells = "".join((f"{line[3]} ({line[4]})" if line else "").ljust(WIDTH) for line in there)
        text.append(f"{number:>6}{mark:>16}  {cells}".rstrip())
    return "\n".join(text)


def main() -> None:
    """Prints the drawing of the file that is given on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m minifsdp.ledger", description="Draws the collective logs that a rank wrote at a failure."
    )
    parser.add_argument("file", type=Path, help="the file that the error message names")
    parser.add_argument("--last", type=int, default=40, help="number of collectives to show, counted from the end")
    options = parser.parse_args()
    print(drawn(json.loads(options.file.read_text(encoding="utf-8")), options.last))


if __name__ == "__main__":
    main()

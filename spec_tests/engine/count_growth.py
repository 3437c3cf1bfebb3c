"""What grows with the work, counted in a process of its own, which is rank 0 of a world of the size that it is told.

Printed as one line of JSON, by contender: calls of Python functions in a warm step, and bytes that a model made on meta
is stored in. Nothing here is a time.
"""

from __future__ import annotations

import json
import sys

import torch

# The contenders of the benchmark and no others: what its plots show is what is asserted.
from spec_tests.benchmarks.growth.llama import Shape, materialised, stored_bytes
from spec_tests.benchmarks.growth.measure import calls_per_step, join
from spec_tests.benchmarks.growth.points import FSDPS, Point

OURS = [name for name, contender in FSDPS.items() if contender.peer]
UNITS = (12, 24, 48)
PARAMETERS = (4, 16, 64)
# The inner layer has no 64th part, so there is padding.
SHAPE = Shape(2, 128, 200, 320)


def main() -> None:
    ranks = int(sys.argv[1])
    join(ranks)
    torch.manual_seed(0)
    answer = {
        name: {
            "units": [calls_per_step(name, Point(units, ranks)) for units in UNITS],
            "parameters": [calls_per_step(name, Point(2, ranks, number)) for number in PARAMETERS],
            "stored": stored_bytes(materialised(name, SHAPE)),
        }
        for name in OURS
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()

"""Costs that grow with the model, counted in a separate process, which is rank 0 of a world of the given size.

Prints one line of JSON. For each implementation, the line has the number of calls of Python functions in a warm step,
and the number of bytes that store a model created on the meta device. The program measures no times.
"""

from __future__ import annotations

import json
import sys

import torch

# Use the implementations of the benchmark, so that the test covers the results in the plots.
from spec_tools.benchmarks.growth import FSDPS, Point, Shape, calls_per_step, join, materialised, stored_bytes

OURS = [name for name, contender in FSDPS.items() if contender.peer]
UNITS = (12, 24, 48)
PARAMETERS = (4, 16, 64)
# The size of the inner layer is not divisible by 64, so its parameters need padding.
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

"""The models of the problems, as input of the calculator and of the simulator."""

from functools import cache
from typing import Any

import torch

from minifsdp_tools.cost import Job
from minifsdp_tools.simulate.machine import CARDS, Network
from minifsdp_tools.simulate.models import transformer
from minifsdp_tools.simulate.recording import Recording, record
from minifsdp_tools.simulate.replay import Result, replay
from minifsdp_tools.simulate.setup import Setup
from minifsdp_tools.simulate.shapes import SHAPES

Shapes = list[tuple[int, ...]]
# Computation and all-gathers in bfloat16, reductions and stored weights in float32.
MIXED = {"compute": torch.bfloat16, "reduce": torch.float32}


@cache
def sizes(name: str, unit: int = 1) -> tuple[list[Shapes], Shapes]:
    """The shapes of the parameters of each unit, and of the root's own."""
    model = transformer(SHAPES[name], 1, None, "none", unit)
    units = [[tuple(one.shape) for one in module.parameters()] for module in model.units]
    inside = {id(one) for module in model.units for one in module.parameters()}
    return units, [tuple(one.shape) for one in model.module.parameters() if id(one) not in inside]


def job_of(model: str, blocks: int = 1, **choices: Any) -> Job:
    """A job with a published model, and ``blocks`` blocks in each unit."""
    units, root = sizes(model, blocks)
    return Job(units=units, root=root, **choices)


def num_parameters(job: Job) -> int:
    """The number of elements, without padding."""
    return sum(torch.Size(shape).numel() for unit in [job.root, *job.units] for shape in unit)


@cache
def _recorded(setup: Setup) -> Recording:
    return record(setup)


def simulated(setup: Setup, card: str, between: float) -> Result:
    """A simulated step. ``between`` is the rate of a machine's network card in bytes per second."""
    return replay(_recorded(setup), CARDS[card], Network(setup.ranks_per_machine, between=between))

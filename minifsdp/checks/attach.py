"""Attaches the checks to the events of the engine, once in each process.

Worked example: ``MINIFSDP_CHECKS=0 torchrun --nproc-per-node 2 train.py`` trains without any check. Then no rank
compares its collectives with the other ranks, and a hang ends at the time-out of the process group.

*In torch:* the environment variable ``TORCH_DISTRIBUTED_DEBUG`` turns on checks, which are off by default.

Spec: NEW-19, LEDGER-01, CTOR-05.
"""

import os

from minifsdp.checks.collective import BarrierCheck, Collective
from minifsdp.checks.optimizer_checks import OptimizerChecks
from minifsdp.checks.rank_checks import RankChecks, read_all
from minifsdp.engine.events import events, issue
from minifsdp.watchdog import process


def attach() -> None:
    """Called when a model is sharded: attaches the checks and starts the watchdog, unless MINIFSDP_CHECKS is 0."""
    if os.environ.get("MINIFSDP_CHECKS") == "0":
        return
    process.start()
    if events.collective is issue:
        events.collective = Collective
        events.barrier = BarrierCheck
        events.before_state_dict.append(read_all)
        events.roots.append(RankChecks)
        events.optimizers.append(OptimizerChecks())

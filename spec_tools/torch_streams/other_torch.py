"""Runs the same programs with the FSDPs of another version of torch, on top of the installed one.

Use it to find out which versions have a race. No test runs it::

    pip download torch==2.12.0 --no-deps
    unzip -q torch-2.12.0-*.whl 'torch/distributed/fsdp/*' -d other
    python -m spec_tools.torch_streams.other_torch other/torch/distributed

Only ``torch.distributed.fsdp`` comes from the other version. If it does not support a program, the exception is shown.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
import warnings
from typing import Any

import torch.distributed as dist


def pretend(folder: str) -> None:
    """Loads ``torch.distributed.fsdp`` from ``folder``, and adds names that it imports from its version of torch."""
    dist.__path__.insert(0, folder)
    there: Any = dist
    # 2.14 needs these when `torch._dynamo` imports it; 2.11 needs the rest.
    there._spmd_no_typecheck = contextlib.nullcontext
    there._is_spmd_types_available = lambda: False
    base: Any = types.ModuleType("torch._custom_class_base")
    base.CustomClassBase = object
    sys.modules[base.__name__] = base
    import torch._dynamo

    torch._dynamo.config.__dict__["skip_fsdp_hooks"] = True


def main() -> None:
    """Prints each program with races, and the races."""
    pretend(sys.argv[1])
    warnings.simplefilter("ignore")
    import torch.distributed.fsdp
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from spec_tests.harness import simulated
    from spec_tools.torch_streams.torch_fsdp import PROGRAMS
    from spec_tools.torch_streams.torch_hazards import HAZARDS

    print(torch.distributed.fsdp.__file__)
    device, world, store = simulated.install(), simulated.WORLD, FakeStore()
    programs = {**PROGRAMS, **{name: hazard[:2] for name, hazard in HAZARDS.items()}}
    for name, (num_ranks, program) in programs.items():
        dist.init_process_group("simulated", rank=0, world_size=num_ranks, store=store, device_id=device)
        world.begin()
        world.look_at(f"{os.sep}fsdp{os.sep}")
        try:
            program()
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}".splitlines()[0])
        for race in world.races.values():
            print(f"{name}: {race}")
        dist.destroy_process_group()
    print(f"{len(programs)} programs")


if __name__ == "__main__":
    main()

"""Runs complete user programs with torch's ``fully_shard`` and with minifsdp's.

The programs are in ``dropin/``. Each is written for ``torch.distributed.fsdp`` and does not refer to minifsdp. The test
runs each program twice on the same ranks. The second run only replaces the module name in the import lines.
The output of both runs must be bitwise equal on two ranks, in bfloat16 as well as in float32.
"""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
import re
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

import minifsdp
from spec_tests.harness import ranks

PROGRAMS = pathlib.Path(__file__).parent / "dropin"
IMPORT_LINE = re.compile(r"^from torch\.distributed\.fsdp import ", re.MULTILINE)
# These modules look up DTensor's random generators but do not use them.
QUIET = pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support:UserWarning")


# The programs use the GPU with the number of their rank.
pytestmark = [pytest.mark.own_gpus, pytest.mark.not_simulated("foreign programs choose between CUDA and the CPU")]


@contextlib.contextmanager
def a_folder() -> Iterator[str]:
    """One folder that all ranks can access."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own:
        name = [own]
        dist.broadcast_object_list(name)
        yield name[0]
        dist.barrier()


def run(program: str, library_name: str) -> Any:
    """The output of the program on rank 0; ``None`` on the other ranks."""
    text = (PROGRAMS / f"{program}.py").read_text()
    changed = IMPORT_LINE.sub(f"from {library_name} import ", text)
    assert changed.count(f"from {library_name} import ") == 1
    written = io.StringIO()
    with a_folder() as folder, pytest.MonkeyPatch.context() as environment, contextlib.redirect_stdout(written):
        environment.setenv("CHECKPOINTS", folder)
        namespace: dict[str, Any] = {"__name__": f"{program} with {library_name}"}
        exec(compile(changed, f"{program}.py", "exec"), namespace)
        namespace["main"]()
    return json.loads(written.getvalue()) if written.getvalue() else None


def both(program: str) -> tuple[Any, Any]:
    return run(program, minifsdp.__name__), run(program, "torch.distributed.fsdp")


@pytest.mark.spec("MIG-21", "PAR-03", "FS2-SYNC-01", "FS2-PREF-03", "FS2-OPT-03", "FS2-MP-06")
@pytest.mark.parametrize("program", ["language_model", "adapters", "filters"])
@ranks(2)
def test_a_program_for_torch_prints_the_same_numbers(program: str) -> None:
    ours, theirs = both(program)
    assert ours == theirs
    if dist.get_rank() == 0:
        assert len(set(ours["losses"])) == len(ours["losses"]), "it does train"


@pytest.mark.spec("MIG-21", "PAR-03", "FS2-18", "FS2-META-02", "FS2-SD-06", "FS2-SD-11", "PAR-07")
@ranks(4)
def test_a_program_that_resumes_on_a_grid_prints_the_same_numbers() -> None:
    ours, theirs = both("resumed_on_a_grid")
    if dist.get_rank() == 0:
        assert ours["resumed"] == ours["uninterrupted"]
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=1e-5), name

"""Runs user programs with torch's FSDPs and with minifsdp's.

The programs are in ``dropin/``. Each is written for ``torch.distributed.fsdp`` and does not refer to minifsdp. Its
``main`` takes the device of the rank, and returns a report of plain numbers and texts. The tests run each program twice
in the same ranks. The second run only replaces the module name in the import lines. The tests then compare the reports
of the two runs. On two ranks they must be bitwise equal, in float32 and also in low precision.
"""

from __future__ import annotations

import itertools
import pathlib
import re
import tempfile
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch.utils._pytree import tree_flatten

from spec_tests.harness import device, ranks

PROGRAMS = pathlib.Path(__file__).parent / "dropin"
IMPORT_LINE = re.compile(r"^from torch\.distributed\.fsdp((\.\w+)* import )", re.MULTILINE)
# After a few steps, if one sum of gradients is rounded to bfloat16 in one of the two runs only.
ONE_SUM_IN_BFLOAT16 = 1e-2
# If only the sum for a norm has another order, and if all sums have.
ONE_SUM, ALL_SUMS = 1e-6, 1e-5

# The programs have only been run with one GPU for each rank.
pytestmark = pytest.mark.own_gpus


def reports_of(program: str, *options: Any) -> list[Any]:
    """The reports of a program with minifsdp and with torch, on this rank. All ranks share a folder for checkpoints."""
    text = (PROGRAMS / f"{program}.py").read_text()
    found = []
    for source in (IMPORT_LINE.sub(r"from minifsdp\1", text), text):
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own,
            pytest.MonkeyPatch.context() as environment,
            warnings.catch_warnings(),
        ):
            if source is text:
                # torch's deprecations.
                warnings.simplefilter("ignore")
            folder = [own]
            dist.broadcast_object_list(folder)
            environment.setenv("CHECKPOINTS", folder[0])
            namespace: dict[str, Any] = {"__name__": program}
            exec(compile(source, f"{program}.py", "exec"), namespace)
            found.append(namespace["main"](device(), *options))
            dist.barrier()
    return found


def assert_close(found: Any, expected: Any, tolerance: float) -> None:
    """Compares two nested reports."""
    numbers, structure = tree_flatten(found)
    expected_numbers, expected_structure = tree_flatten(expected)
    assert structure == expected_structure
    for one, other in zip(numbers, expected_numbers, strict=True):
        assert one == (pytest.approx(other, rel=tolerance) if isinstance(other, float) else other)


@pytest.mark.spec("PAR-03", "MP-02", "NOSYNC-03", "CLIP-02", "WRAP-08")
@ranks(2)
def test_a_transformer_in_bfloat16_with_accumulation_and_clipping_gives_the_same_numbers() -> None:
    ours, theirs = reports_of("wrapper", torch.bfloat16, False)
    assert ours == theirs
    assert ours["losses"][-1] < ours["losses"][0], "the loss decreases"


@pytest.mark.spec("PAR-03", "MP-29", "ORIG-05", "CLIP-02")
@ranks(2)
def test_float16_with_a_scaler_and_parameter_groups_gives_the_same_numbers() -> None:
    ours, theirs = reports_of("wrapper", torch.float16, True)
    assert_close(ours, theirs, ONE_SUM)
    assert "not finite" in ours["norms"], "at least one step is skipped"
    changes = {after / before for before, after in itertools.pairwise(ours["scales"])}
    assert changes >= {0.5, 2.0}, "the scale falls and rises"


@pytest.mark.not_simulated("the program creates meshes and clips DTensors")
@pytest.mark.spec("MIG-21", "PAR-03", "FS2-SYNC-01", "FS2-PREF-03", "FS2-OPT-03", "FS2-MP-06")
@ranks(2)
def test_a_language_model_with_fully_shard_gives_the_same_numbers() -> None:
    ours, theirs = reports_of("per_parameter")
    # Since 2.15, torch adds the two gradients of a tied bfloat16 weight in float32, if the reduction is in float32.
    if hasattr(torch_fsdp, "GradientReductionHandle"):
        assert_close(ours, theirs, ONE_SUM_IN_BFLOAT16)
    else:
        assert ours == theirs
    assert len(set(ours["losses"])) == len(ours["losses"]), "the weights change"


@pytest.mark.not_simulated("the program creates meshes and saves DTensors")
@pytest.mark.spec("MIG-21", "PAR-03", "FS2-18", "FS2-META-02", "FS2-SD-06", "FS2-SD-11", "PAR-07")
@ranks(4)
def test_a_program_that_resumes_on_a_grid_gives_the_same_numbers() -> None:
    ours, theirs = reports_of("resumed")
    assert_close(ours, theirs, ALL_SUMS)
    assert ours["resumed"] == ours["uninterrupted"]

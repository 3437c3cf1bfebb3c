"""Runs user programs with torch's FSDPs and with minifsdp's.

The programs are in ``dropin/``. Each is written for ``torch.distributed.fsdp`` and does not refer to minifsdp. Its
``main`` takes the device of the rank, and returns a report of plain numbers and texts. The tests run each program twice
in the same ranks. The second run only replaces the module name in the import lines. The tests then compare the reports
of the two runs. On two ranks they must be bitwise equal, in float32 and also in low precision.

torch does not support some features of these programs on the CPU. The test then compares the program with its own
report in one process on the whole batch. That run uses a replacement for the wrapper that shards nothing (see
``alone.py``). It adds numbers in a different order, so the last bits may differ.
"""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import re
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp

from spec_tests.harness import device, ranks
from spec_tests.healthy.alone import as_if_alone

PROGRAMS = pathlib.Path(__file__).parent / "dropin"
TORCH, OURS, ALONE = "torch.distributed.fsdp", "minifsdp", "spec_tests.healthy.alone"
# Tolerances after a few training steps, if all sums have a different order, and if only the sum for the norm has one.
SAME_MATH = 1e-4
SAME_UP_TO_THE_NORM = 1e-6
# After a few steps, if one sum of gradients is rounded to bfloat16 in one of the two runs only.
ONE_SUM_IN_BFLOAT16 = 1e-2

IMPORT_LINE = re.compile(r"^from torch\.distributed\.fsdp(\.\w+)* import ")

# The programs have only been run with one GPU for each rank.
pytestmark = pytest.mark.own_gpus


def text_of(program: str, library: str) -> str:
    """The source of a program, with its import lines changed to another library."""
    lines = []
    for line in (PROGRAMS / f"{program}.py").read_text().splitlines():
        if IMPORT_LINE.match(line):
            instead = ALONE if library == ALONE else rf"{library}\1"
            line = re.sub(r"torch\.distributed\.fsdp(\.\w+)?", instead, line, count=1)
        lines.append(line)
    return "\n".join(lines)


@contextlib.contextmanager
def a_folder() -> Iterator[str]:
    """One temporary folder that all ranks share."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own:
        name = [own]
        dist.broadcast_object_list(name)
        yield name[0]
        dist.barrier()


def run(program: str, library: str) -> Any:
    """The report of the program on this rank."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(a_folder())
        if library == ALONE:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(as_if_alone())
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        environment.setenv("CHECKPOINTS", folder)
        # A node has two ranks. torchrun sets this variable on two small machines.
        environment.setenv("LOCAL_WORLD_SIZE", "2")
        namespace: dict[str, Any] = {"__name__": f"{program} with {library}"}
        exec(compile(text_of(program, library), f"{program}.py", "exec"), namespace)
        return namespace["main"](device())


def close(found: Any, expected: Any, tolerance: float = SAME_MATH) -> bool:
    """Whether two nested results are equal up to ``tolerance``."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(close(found[key], expected[key], tolerance) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(close, found, expected, [tolerance] * len(found)))
    if not isinstance(expected, (int, float)):
        return bool(found == expected)
    return bool(found == pytest.approx(expected, rel=tolerance, abs=1e-6))


def compare(program: str, library: str = TORCH, tolerance: float = 0.0) -> Any:
    """Compares with another library, on every rank, or with the run in one process, on rank 0. Returns our report."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = run(program, library)
    found = run(program, OURS)
    if library == TORCH or dist.get_rank() == 0:
        assert found == expected or (tolerance and close(found, expected, tolerance)), f"{found}\nis not\n{expected}"
    return found


@pytest.mark.spec("PAR-03", "MP-02", "NOSYNC-03", "CLIP-02", "WRAP-08")
@ranks(2)
def test_a_transformer_in_bfloat16_with_accumulation_and_clipping_gives_the_same_numbers() -> None:
    found = compare("transformer_bf16")
    assert found["losses"][-1] < found["losses"][0], "the loss decreases"


@pytest.mark.spec("OFF-04", "OFF-08", "SD-FULL-06", "SD-FULL-10", "SUMMON-02", "WRAP-06")
@ranks(2)
def test_offload_with_averaged_weights_and_a_checkpoint_equals_one_process() -> None:
    compare("offload_ema", ALONE, SAME_MATH)


@pytest.mark.spec("PAR-03", "MP-29", "ORIG-05", "CLIP-02")
@ranks(2)
def test_float16_with_a_scaler_and_parameter_groups_gives_the_same_numbers() -> None:
    found = compare("fp16_scaler", tolerance=SAME_UP_TO_THE_NORM)
    assert "not finite" in found["norms"], "at least one step is skipped"
    changes = [after / before for before, after in itertools.pairwise(found["scales"])]
    assert {0.5, 2.0} <= {*changes}, "the scale falls and rises"


@pytest.mark.spec("HYB-03", "META-03", "SYNC-02", "PAR-07", "SD-SHARD-03", "SD-SHARD-04", "SD-SHARD-08")
@ranks(4)
def test_meta_device_hybrid_with_both_kinds_of_checkpoints_equals_one_process() -> None:
    compare("hybrid_meta", ALONE, SAME_MATH)


@pytest.mark.spec("LEGACY-01", "LEGACY-02", "LEGACY-03", "LEGACY-14", "NAMES-09")
@ranks(2)
def test_script_of_1_11_equals_one_process_and_each_old_name_warns() -> None:
    with pytest.warns(FutureWarning) as caught:
        compare("written_for_1_11", ALONE, SAME_MATH)
    said = " ".join(str(warning.message) for warning in caught)
    for old in ("fsdp_auto_wrap_policy=", "default_auto_wrap_policy", "unwrapped_params", "params_with_grad"):
        assert f"{old} " in said


@pytest.mark.not_simulated("the programs create meshes and clip DTensors")
@pytest.mark.spec("MIG-21", "PAR-03", "FS2-SYNC-01", "FS2-PREF-03", "FS2-OPT-03", "FS2-MP-06")
@ranks(2)
def test_a_language_model_with_fully_shard_gives_the_same_numbers() -> None:
    # Since 2.15, torch adds the two gradients of a tied bfloat16 weight in float32, if the reduction is in float32.
    rounds_less = hasattr(torch_fsdp, "GradientReductionHandle")
    found = compare("language_model", tolerance=ONE_SUM_IN_BFLOAT16 if rounds_less else 0.0)
    assert len(set(found["losses"])) == len(found["losses"]), "the loss decreases"


@pytest.mark.not_simulated("the program creates meshes and saves DTensors")
@pytest.mark.spec("MIG-21", "PAR-03", "FS2-18", "FS2-META-02", "FS2-SD-06", "FS2-SD-11", "PAR-07")
@ranks(4)
def test_a_program_that_resumes_on_a_grid_gives_the_same_numbers() -> None:
    found = compare("resumed_on_a_grid", tolerance=1e-5)
    assert found["resumed"] == found["uninterrupted"]

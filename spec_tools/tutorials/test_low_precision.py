"""The programs in ``tutorials/low_precision`` train as the plain program beside them, and as with torch's FSDP."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from spec_tests.harness.programs import output_of_ranks

FOLDER = Path(__file__).resolve().parents[2] / "tutorials" / "low_precision"
PACKAGES = {
    "float8": "torchao>=0.18",
    "int8": "torchao>=0.18",
    "adam_8bit": "torchao>=0.18",
    "nf4_lora": "torchao>=0.18",
    "bitsandbytes_lora": "bitsandbytes>=0.50",
}
PROGRAMS = [pytest.param(name, marks=pytest.mark.needs(package)) for name, package in PACKAGES.items()]


@cache
def losses_of(program: str, num_ranks: int, folder: Path = FOLDER) -> tuple[list[float], list[float]]:
    """The losses of the plain training and of the other one, of each step."""
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    output = output_of_ranks(folder / f"{program}.py", num_ranks=num_ranks, environment=environment)
    rows = re.findall(r"plain ([\d.]+)   low ([\d.]+)", output)
    return [float(plain) for plain, _ in rows], [float(low) for _, low in rows]


@pytest.mark.spec("TRAIN-33")
@pytest.mark.in_turn(1)
@pytest.mark.parametrize("program", PROGRAMS)
def test_low_precision_learns_as_the_plain_training_does(program: str) -> None:
    plain, low = losses_of(program, 2)

    assert len(plain) == 30
    assert plain[-1] < plain[0] - 0.3, "it learns"
    assert low == pytest.approx(plain, rel=0.02)
    assert low != plain, "something is rounded"


@pytest.mark.spec("TRAIN-33")
@pytest.mark.in_turn(1)
@pytest.mark.parametrize("program", PROGRAMS)
def test_losses_are_those_of_torch(program: str, tmp_path: Path) -> None:
    for script in FOLDER.glob("*.py"):
        text = script.read_text(encoding="utf-8").replace("from minifsdp", "from torch.distributed.fsdp")
        # gloo cannot send the 8-bit floats of torch's all-gather.
        text = text.replace("enable_fsdp_float8_all_gather=True", "enable_fsdp_float8_all_gather=False")
        text = text.replace("after_step=precompute_float8_dynamic_scale_for_fsdp", "after_step=id")
        (tmp_path / script.name).write_text(text, encoding="utf-8")

    # Float8 rounds a weight in the same way before and after an all-gather.
    assert losses_of(program, 2)[1] == pytest.approx(losses_of(program, 2, tmp_path)[1], rel=2e-3)

"""The programs in ``tutorials/parallel`` train equally with 1, 4 and 8 ranks, and as with torch's ``fully_shard``."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from spec_tests.harness.programs import output_of_ranks

FOLDER = Path(__file__).resolve().parents[2] / "tutorials" / "parallel"
PROGRAMS = ["context", "experts", "pipeline", "tensor", "together"]


@cache
def numbers_of(program: str, num_ranks: int, *arguments: str, folder: Path = FOLDER) -> list[float]:
    """The losses and the gradient norms of all steps, in turn."""
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    output = output_of_ranks(folder / f"{program}.py", *arguments, num_ranks=num_ranks, environment=environment)
    return [float(number) for number in re.findall(r"(?:loss|norm) +([\d.]+)", output)]


@pytest.mark.spec("TRAIN-32")
@pytest.mark.parametrize("program", PROGRAMS)
def test_losses_and_norms_do_not_depend_on_the_number_of_ranks(program: str) -> None:
    most = 8 if program == "together" else 4

    assert numbers_of(program, most) == pytest.approx(numbers_of(program, 1), rel=1e-3)
    losses = numbers_of(program, 1)[::2]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.5, "it learns"


@pytest.mark.spec("TRAIN-32")
def test_a_training_continues_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    found = numbers_of("together", 4, "--steps", "2", "--save", f"{tmp_path}/1")
    found += numbers_of("together", 2, "--steps", "2", "--load", f"{tmp_path}/1", "--save", f"{tmp_path}/2")
    found += numbers_of("together", 8, "--steps", "2", "--load", f"{tmp_path}/2", "--save", f"{tmp_path}/3")
    found += numbers_of("together", 1, "--steps", "2", "--load", f"{tmp_path}/3")

    assert found == pytest.approx(numbers_of("together", 1), rel=1e-3)


@pytest.mark.spec("TRAIN-32")
@pytest.mark.parametrize("program", PROGRAMS)
def test_with_torch_the_programs_have_the_same_losses(program: str, tmp_path: Path) -> None:
    for script in FOLDER.glob("*.py"):
        text = script.read_text(encoding="utf-8").replace("from minifsdp import", "from torch.distributed.fsdp import")
        # torch cannot multiply in a reduction of gloo.
        text = text.replace(
            "    experts.set_grad", "    experts.set_force_sum_reduction_for_comms(True)\n    experts.set_grad"
        )
        (tmp_path / script.name).write_text(text, encoding="utf-8")

    assert numbers_of(program, 4, folder=tmp_path) == pytest.approx(numbers_of(program, 1), rel=1e-3)


@pytest.mark.spec("TRAIN-32")
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_has_at_most_80_lines(program: str) -> None:
    assert len((FOLDER / f"{program}.py").read_text(encoding="utf-8").splitlines()) <= 80

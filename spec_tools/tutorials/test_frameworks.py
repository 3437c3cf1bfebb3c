"""The programs in ``tutorials/frameworks`` have the losses of torch's FSDP, and their units are those of minifsdp.

On CPUs, Lightning raises an error and accelerate uses DDP. So each program runs with the lines of `ON_CPUS` after the
import of minifsdp's names.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from spec_tests.harness.programs import output_of_ranks

pytestmark = pytest.mark.spec("PROG-109")

FOLDER = Path(__file__).resolve().parents[2] / "tutorials" / "frameworks"
IMPORT = "import instead_of_torch  # noqa: F401\n"
# Accelerate chooses FSDP only with GPUs.
ACCELERATE = """
import accelerate.state

make = accelerate.state.AcceleratorState.__init__

def make_sharded(state, *args, fsdp_plugin=None, **options):
    make(state, *args, fsdp_plugin=fsdp_plugin, **options)
    if fsdp_plugin is not None:
        state.distributed_type, state.fsdp_plugin = accelerate.DistributedType.FSDP, fsdp_plugin

accelerate.state.AcceleratorState.__init__ = make_sharded
"""
# Lightning refuses its class without a GPU, and not a subclass. torch's wrapper needs a GPU or `device_id`.
LIGHTNING = """
import torch.distributed.fsdp.fully_sharded_data_parallel as implementation
from torch.distributed.fsdp._common_utils import _FSDPDeviceHandle

import lightning.{0}.strategies as strategies

def use_cpu(state, *args):
    state._device_handle = _FSDPDeviceHandle.from_device(implementation.torch.device("cpu"))
    return state

implementation._init_device_handle = use_cpu
strategies.FSDPStrategy = type("Strategy", (strategies.FSDPStrategy,), dict())
"""
ON_CPUS = {
    "accelerate_gpt": ACCELERATE,
    "fabric_gpt": LIGHTNING.format("fabric"),
    "hf_trainer": ACCELERATE,
    "lightning_trainer": LIGHTNING.format("pytorch"),
}
# The package of the objects that store the parameters of a unit.
LAST_LINES = """
import gc

CLASSES = ("Unit", "FlatParamHandle", "FSDPParamGroup")
print("units of", *sorted({type(o).__module__.split(".")[0] for o in gc.get_objects() if type(o).__name__ in CLASSES}))
"""


@cache
def output_of(program: str, first_line: str) -> str:
    """The output of two ranks, with ``first_line`` instead of the import of minifsdp's names."""
    text = (FOLDER / f"{program}.py").read_text(encoding="utf-8")
    assert text.count(IMPORT) == 1
    text = text.replace(IMPORT, first_line + ON_CPUS[program]) + LAST_LINES
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    with TemporaryDirectory() as folder:
        script = Path(folder) / f"{program}.py"
        script.write_text(text, encoding="utf-8")
        replacement = (FOLDER / "instead_of_torch.py").read_text(encoding="utf-8")
        (Path(folder) / "instead_of_torch.py").write_text(replacement, encoding="utf-8")
        return output_of_ranks(script, num_ranks=2, environment=environment)


NAMES = """
from torch.distributed._composable.fsdp import fully_shard
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.api import ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

for value in [fully_shard, get_state_dict, FullyShardedDataParallel, ShardingStrategy, ShardedGradScaler]:
    print(value.__module__)
print(ModuleWrapPolicy.__module__)
"""


def losses_in(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"^loss ([\d.]+)", output, re.MULTILINE)]


def programs(*packages_and_programs: tuple[str, str]) -> list[object]:
    return [pytest.param(program, marks=pytest.mark.needs(package)) for package, program in packages_and_programs]


@pytest.mark.needs("transformers")
@pytest.mark.in_turn(1)
@pytest.mark.parametrize(
    "program",
    programs(
        ("accelerate", "accelerate_gpt"),
        ("lightning", "fabric_gpt"),
        ("accelerate", "hf_trainer"),
        ("lightning", "lightning_trainer"),
    ),
)
def test_a_framework_trains_with_minifsdp_as_with_torch(program: str) -> None:
    ours, of_torch = output_of(program, IMPORT), output_of(program, "")

    assert losses_in(ours) == pytest.approx(losses_in(of_torch), abs=1e-4)
    assert len(losses_in(ours)) == 8
    assert losses_in(ours)[-1] < losses_in(ours)[0]
    assert ours.count("units of minifsdp\n") == 2
    assert of_torch.count("units of torch\n") == 2


def test_a_later_import_from_torch_gets_the_names_of_minifsdp(tmp_path: Path) -> None:
    script = tmp_path / "names.py"
    script.write_text((FOLDER / "instead_of_torch.py").read_text(encoding="utf-8") + NAMES, encoding="utf-8")

    output = output_of_ranks(script, num_ranks=1, environment={})

    assert re.findall(r"^(\w+)\.", output, re.MULTILINE) == ["minifsdp"] * 6


@pytest.mark.parametrize("program", ON_CPUS)
def test_a_program_has_at_most_50_lines(program: str) -> None:
    assert len((FOLDER / f"{program}.py").read_text(encoding="utf-8").splitlines()) <= 50

"""Names, signatures, fields and base classes are those of torch, or a row of a table explains the difference.

A script can migrate by changing its import lines only if all names that it uses exist and have the same signatures.
``surface.py`` describes both packages as facts and compares them. The table is on the page *API*. A difference without
a row fails, and so does a row without a difference. The comparison uses the installed torch, so the tests detect a
renamed symbol as soon as a new version is installed.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import minifsdp
from spec_tests.compat.surface import MODULES, differences, differences_of, names_of
from spec_tests.harness import device, ranks
from spec_tests.models.modules import seeded
from spec_tests.subject import FlatParameter, FullyShardedDataParallel, MixedPrecision

API_PAGE = Path(minifsdp.__file__).parents[1] / "docs" / "api.md"
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


# --- the table ---


@dataclass(frozen=True)
class Row:
    """A row of the table of differences: the versions of torch that it is about, the difference, and its reason."""

    name: str
    versions: str
    difference: str
    reason: str

    @property
    def applies(self) -> bool:
        """Whether the row is about the installed torch: "all", "before 2.13", or "from 2.15"."""
        words, _, number = self.versions.rpartition(" ")
        limit = tuple(int(part) for part in number.split(".")) if words else ()
        return {"": True, "before": limit > VERSION, "from": limit <= VERSION}[words]


def rows_of_the_page() -> list[Row]:
    section = API_PAGE.read_text().partition("{ #differences-from-torch }")[2]
    table = section.partition("| name | torch |")[2].partition("\n\n")[0]
    lines = [line.strip("|").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return [Row(line[0].strip(" `"), line[1], line[2], line[3].strip()) for line in lines]


ROWS = [row for row in rows_of_the_page() if row.applies]


# --- the tests ---


@pytest.mark.spec("NAMES-13", "CTOR-01", "SHARD-01", "MP-01", "OFF-01", "SD-CFG-02", "SUMMON-01", "OSD-01")
@pytest.mark.spec("OSD-LOAD-01", "FS2-01", "FS2-20", "FS2-27", "MIG-21", "NEW-06", "NEW-17", "NEW-18")
@pytest.mark.pure
def test_every_difference_from_the_installed_torch_is_a_row_of_the_page() -> None:
    explained = {(row.name, row.difference) for row in ROWS}
    found = {(name, difference) for name, difference in differences().items()}
    assert sorted(found - explained) == [], "add a row to docs/api.md, or remove the difference"
    assert sorted(explained - found) == [], "there is no such difference, remove the row of docs/api.md"


@pytest.mark.spec("NAMES-13")
@pytest.mark.pure
def test_every_row_names_a_reason_and_a_requirement_or_a_part_of_the_page() -> None:
    assert len(ROWS) > 5
    for row in ROWS:
        assert re.search(r"\([A-Z0-9-]+-\d+\)|\]\(#[a-z-]+\)", row.reason), row
        assert len(row.reason.split()) > 3, row


@pytest.mark.pure
def test_the_compared_modules_contain_the_names_that_programs_import() -> None:
    names = {prefix + name for prefix, path, _ in MODULES for name in names_of(importlib.import_module(path))}
    assert {"FullyShardedDataParallel", "FlatParameter", "wrap.ModuleWrapPolicy", "wrap._or_policy"} <= names
    assert {"fully_sharded_data_parallel.TrainingState", "fully_sharded_data_parallel.FLAT_PARAM"} <= names
    assert {"fully_sharded_data_parallel.ProcessGroupType", "wrap._recursive_wrap"} <= names
    assert {"_fully_shard.Comm", "sharded_grad_scaler.ShardedGradScaler", "state_dict.get_state_dict"} <= names
    assert not {name for name in names if name.endswith((".Any", ".Enum", ".dataclass", ".deprecated", ".nn"))}


@dataclass
class Options:
    first: int = 1
    second: bool = False


@dataclass(frozen=True)
class Frozen:
    first: int = 1
    second: bool = False


@dataclass
class Swapped:
    second: bool = False
    first: int = 1


@dataclass
class Another:
    first: int = 2
    second: bool = False


class Longer(Options, dict):  # type: ignore[type-arg]
    pass


Swapped.__name__ = Frozen.__name__ = Another.__name__ = Longer.__name__ = "Options"

CASES: dict[str, tuple[Any, Any, dict[str, str]]] = {
    "equal": (lambda a, b=1: None, lambda a, b=1: None, {}),
    "a name": (lambda a: None, None, {"x": "missing"}),
    "a default": (lambda a, b=1: None, lambda a, b=2: None, {"x": "without `b = 1`, with `b = 2`"}),
    "the order": (lambda a, b: None, lambda b, a: None, {"x": "in another order"}),
    "the kind": (lambda a, b: None, lambda a, *, b: None, {"x": "without `b`, with `keyword b`"}),
    "the name of a parameter": (lambda a: None, lambda b: None, {"x": "without `a`, with `b`"}),
    "an additional parameter": (lambda a: None, lambda a, c=None: None, {"x": "with `c = None`"}),
    "a value": ("_flat_param", "flat", {"x": "without `'_flat_param'`, with `'flat'`"}),
    "frozen": (Options, Frozen, {"x": "with `frozen`"}),
    "the default of a field": (Options, Another, {"x.first": "without `first = 1`, with `first = 2`"}),
    "the order of fields": (
        Options,
        Swapped,
        {"x.first": "without `field 0`, with `field 1`", "x.second": "without `field 1`, with `field 0`"},
    ),
    "a base class": (Options, Longer, {"x": "with `base dict`"}),
}


@pytest.mark.pure
@pytest.mark.parametrize("case", CASES)
def test_the_comparison_finds_each_kind_of_difference(case: str) -> None:
    theirs, ours, expected = CASES[case]
    assert differences_of("x", theirs, ours) == expected


@pytest.mark.pure
@pytest.mark.spec("CTOR-01")
def test_the_constructor_takes_the_arguments_of_torch_and_then_an_old_keyword() -> None:
    names = [
        list(inspect.signature(cls).parameters)
        for cls in (FullyShardedDataParallel, torch_fsdp.FullyShardedDataParallel)
    ]
    assert names[0] == [*names[1], "fsdp_auto_wrap_policy"]


@pytest.mark.pure
@pytest.mark.spec("CTOR-01")
def test_a_wrong_argument_is_an_error_that_names_the_class() -> None:
    made: Any = FullyShardedDataParallel
    with pytest.raises(TypeError, match=r"FullyShardedDataParallel\.__init__\(\) got an unexpected keyword argument"):
        made(nn.Linear(1, 1), sharding="full")
    with pytest.raises(TypeError, match=r"FullyShardedDataParallel\.__init__\(\) missing .* 'module'"):
        made()


@pytest.mark.pure
def test_the_submodules_are_reachable_after_importing_the_package() -> None:
    for path in ("api", "fully_sharded_data_parallel", "sharded_grad_scaler", "wrap"):
        assert getattr(minifsdp, path) is importlib.import_module(f"minifsdp.{path}")
        assert hasattr(torch_fsdp, path), "torch's package has it as an attribute, too"


@pytest.mark.spec("ORIG-01", "ORIG-02")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("asked", [FlatParameter, torch_fsdp.FlatParameter], ids=["ours", "torch's"])
@ranks(2)
def test_flat_parameter_class_check_works_with_both_libraries(asked: Any, use_orig_params: bool) -> None:
    model = FullyShardedDataParallel(nn.Linear(3, 3, device=device()), use_orig_params=use_orig_params)
    answers = [isinstance(parameter, asked) for parameter in model.parameters()]
    assert answers == ([False, False] if use_orig_params else [True])
    assert isinstance(torch_fsdp.FlatParameter(torch.zeros(2)), FlatParameter)
    assert not isinstance(nn.Parameter(torch.zeros(2)), asked)
    assert isinstance(FlatParameter(torch.zeros(2)), nn.Parameter)


@pytest.mark.spec("ORIG-01")
@ranks(2)
def test_flat_parameters_have_the_attribute_that_frameworks_check() -> None:
    model = FullyShardedDataParallel(
        nn.Sequential(FullyShardedDataParallel(nn.Linear(3, 3, device=device())), nn.Linear(3, 2, device=device()))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(owned) == 2
    assert all(getattr(parameter, "_fsdp_flattened", False) for parameter in owned)


@pytest.mark.spec("CTOR-10")
@ranks(2)
def test_check_is_root_identifies_root_wrapper() -> None:
    model = FullyShardedDataParallel(nn.Sequential(FullyShardedDataParallel(nn.Linear(3, 3, device=device()))))
    assert [wrapper.check_is_root() for wrapper in FullyShardedDataParallel.fsdp_modules(model)] == [True, False]
    model(torch.ones(1, 3))
    assert [wrapper.check_is_root() for wrapper in FullyShardedDataParallel.fsdp_modules(model)] == [True, False]


@pytest.mark.spec("MP-01")
@ranks(2)
def test_fields_of_an_option_that_are_set_afterwards_are_used() -> None:
    # Scripts create an options object first and set its fields from their arguments.
    precision = MixedPrecision()
    precision.param_dtype = torch.bfloat16
    precision.cast_forward_inputs = True
    model = FullyShardedDataParallel(seeded(), mixed_precision=precision)
    assert model(torch.ones(2, 6, device=device())).dtype is torch.bfloat16
    assert dataclasses.replace(precision, param_dtype=None).cast_forward_inputs is True

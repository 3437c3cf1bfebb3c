"""Names, signatures, fields and base classes are those of torch, or a row of a table explains the difference.

A script can migrate by changing its import lines only if all names that it uses exist and have the same signatures.
``surface.py`` describes both packages as facts and compares them. The table is on the page *API*. A difference without
a row fails, and so does a row without a difference. The comparison uses the installed torch, so the tests detect a
renamed symbol as soon as a new version is installed.
"""

from __future__ import annotations

import importlib
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


def rows_of_the_page() -> set[tuple[str, str]]:
    """Name and difference of each row about the installed torch: of "all", "before 2.13", or "from 2.15"."""
    section = API_PAGE.read_text().partition("{ #differences-from-torch }")[2]
    table = section.partition("| name | torch |")[2].partition("\n\n")[0]
    found = set()
    for line in table.splitlines():
        if line.startswith("| `"):
            name, versions, difference, _ = line.strip("|").split(" | ")
            words, _, number = versions.rpartition(" ")
            limit = tuple(int(part) for part in number.split(".")) if words else ()
            if {"": True, "before": limit > VERSION, "from": limit <= VERSION}[words]:
                found.add((name.strip(" `"), difference))
    return found


@pytest.mark.spec("NAMES-13", "CTOR-01", "SHARD-01", "MP-01", "OFF-01", "SD-CFG-02", "SUMMON-01", "OSD-01")
@pytest.mark.spec("OSD-LOAD-01", "OSD-FULL-01", "OSD-SHARD-01", "OSD-SCAT-01", "OSD-SHD-01", "OSD-FLAT-01")
@pytest.mark.spec("OSD-REKEY-01", "SD-CFG-12", "SD-CFG-13", "SD-CFG-14", "SD-CFG-15", "SD-CFG-16", "SD-CFG-18")
@pytest.mark.spec("SD-CFG-19", "FS2-01", "FS2-20", "FS2-27", "MIG-21", "NEW-06", "NEW-17", "NEW-18", "PROG-63")
def test_every_difference_from_the_installed_torch_is_a_row_of_the_page() -> None:
    explained, found = rows_of_the_page(), set(differences().items())
    assert sorted(found - explained) == [], "add a row to docs/api.md, or remove the difference"
    assert sorted(explained - found) == [], "there is no such difference, remove the row of docs/api.md"


@pytest.mark.spec("NAMES-13")
def test_no_public_name_is_an_object_of_torch() -> None:
    """A program that replaces torch's names by these can see which ones are replaced."""
    for _, path, ours in MODULES:
        theirs = importlib.import_module(path)
        if path.startswith("torch.distributed.fsdp"):
            for name in getattr(theirs, "__all__", ()):
                found = getattr(importlib.import_module(ours), name)
                assert found is not getattr(theirs, name), f"{ours}.{name}"


def test_the_comparison_finds_missing_names_and_other_defaults() -> None:
    names = {prefix + name for prefix, path, _ in MODULES for name in names_of(importlib.import_module(path))}
    assert {"FullyShardedDataParallel", "wrap._or_policy", "_fully_shard.Comm", "state_dict.get_state_dict"} <= names
    assert differences_of("x", lambda a: None, None) == {"x": "missing"}
    assert differences_of("x", lambda a, b=1: None, lambda a, b=2: None) == {"x": "without `b = 1`, with `b = 2`"}
    assert differences_of("x", lambda a, b: None, lambda b, a: None) == {"x": "in another order"}


@pytest.mark.spec("CTOR-01")
def test_a_wrong_argument_is_an_error_that_names_the_class() -> None:
    made: Any = FullyShardedDataParallel
    with pytest.raises(TypeError, match=r"FullyShardedDataParallel\.__init__\(\) got an unexpected keyword argument"):
        made(nn.Linear(1, 1), sharding="full")
    with pytest.raises(TypeError, match=r"FullyShardedDataParallel\.__init__\(\) missing .* 'module'"):
        made()


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


@pytest.mark.spec("CTOR-10")
@ranks(2)
def test_check_is_root_identifies_root_wrapper() -> None:
    inner = FullyShardedDataParallel(nn.Linear(3, 3, device=device()))
    model = FullyShardedDataParallel(nn.Sequential(inner))
    assert (model.check_is_root(), inner.check_is_root()) == (True, False)
    model(torch.ones(1, 3))
    assert (model.check_is_root(), inner.check_is_root()) == (True, False)


@pytest.mark.spec("MP-01")
@ranks(2)
def test_fields_of_an_option_that_are_set_afterwards_are_used() -> None:
    # Scripts create an options object first and set its fields from their arguments.
    precision = MixedPrecision()
    precision.param_dtype = torch.bfloat16
    precision.cast_forward_inputs = True
    model = FullyShardedDataParallel(seeded(), mixed_precision=precision)
    assert model(torch.ones(2, 6, device=device())).dtype is torch.bfloat16

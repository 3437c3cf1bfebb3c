"""Names, parameters and defaults must equal those of ``torch.distributed.fsdp``, or differ on purpose.

A script can migrate by changing one import line only if all names that it uses exist and have the same signatures. One
function converts both libraries into plain facts::

    {"CPUOffload": "dataclass(offload_params: bool = False)", ...}

The tests compare these facts. `MEANT` lists each difference with its reason. A difference that is not listed fails, and
so does an entry without a difference. The comparison uses the installed torch, so the tests detect a renamed symbol as
soon as a new version is installed.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import minifsdp
from spec_tests import subject
from spec_tests.harness import device, ranks
from spec_tests.subject import FlatParameter, FullyShardedDataParallel

# Names that minifsdp does not have, with the reason. Calls that set `dp_mesh_dims` are refused (NEW-18).
MISSING = {"DataParallelMeshDims": "describes a mesh of several parallelisms at once, for dp_mesh_dims"}

# Features that PyTorch added after 2.11, the oldest supported version. minifsdp offers them with every version.
SINCE_2_11 = {
    "GradientReductionHandle",
    "dp_mesh_dims",
    "finalize_backward",
    "param_dtype_override_fn",
    "reset_iter_state",
    "set_keep_unsharded_storage",
    "set_manual_backward_finalization",
    "set_reduce_scatter_max_input_buffers",
    "set_reduce_scatter_unused_params",
    "set_separate_reduce_scatter_group",
    "set_symm_mem_for_comm",
}

# For each path below `torch.distributed.fsdp`: names that scripts import although they are not in `__all__`.
SUBMODULES = {
    "api": [],
    "fully_sharded_data_parallel": [
        "BackwardPrefetch",
        "CPUOffload",
        "FLAT_PARAM",
        "FSDP_PREFIX",
        "FSDP_WRAPPED_MODULE",
        "FlatParameter",
        "FullOptimStateDictConfig",
        "FullStateDictConfig",
        "LocalOptimStateDictConfig",
        "LocalStateDictConfig",
        "MixedPrecision",
        "OptimStateDictConfig",
        "ShardedOptimStateDictConfig",
        "ShardedStateDictConfig",
        "ShardingStrategy",
        "StateDictConfig",
        "StateDictSettings",
        "StateDictType",
    ],
    "sharded_grad_scaler": ["ShardedGradScaler"],
    "wrap": ["_Policy", "_module_wrap_policy", "_or_policy"],
}

BY_DOCUMENT = "the flag has this name, in every class, in the documents (SD-CFG-12 to 15); torch has made it private"
MEANT = {
    "FullyShardedDataParallel()": "a superset: takes a keyword of torch 1.11 at the end, with a warning (LEGACY-01)",
    "FullyShardedDataParallel.params": "torch sets the list on each instance instead (NAMES-11)",
    "FullyShardedDataParallel.params_with_grad": "a property of torch 1.13, kept with a warning (NAMES-09)",
    "FullyShardedDataParallel.state_dict": "passes on whatever nn.Module.state_dict takes, by position too",
    "StateDictSettings.state_dict_type": "a superset: what every unit begins with is the default (SD-CFG-01)",
    "StateDictSettings.state_dict_config": "a superset: what every unit begins with is the default (SD-CFG-01)",
    "StateDictSettings.optim_state_dict_config": "a superset: what every unit begins with is the default (SD-CFG-01)",
    "FullOptimStateDictConfig.use_dtensor": BY_DOCUMENT,
    "FullStateDictConfig.use_dtensor": BY_DOCUMENT,
    "LocalOptimStateDictConfig.use_dtensor": BY_DOCUMENT,
    "LocalStateDictConfig.use_dtensor": BY_DOCUMENT,
    "OptimStateDictConfig.use_dtensor": BY_DOCUMENT,
    "ShardedOptimStateDictConfig.use_dtensor": BY_DOCUMENT,
    "ShardedStateDictConfig.use_dtensor": BY_DOCUMENT,
    "StateDictConfig.use_dtensor": BY_DOCUMENT,
}


# --- extracting facts ---


def said_of_default(default: Any) -> str:
    """A text for a default value that does not depend on the library that defines its class."""
    if default is inspect.Parameter.empty:
        return ""
    if isinstance(default, enum.Enum):
        return f" = {type(default).__name__}.{default.name}"
    if dataclasses.is_dataclass(default) and not isinstance(default, type):
        fields = [field for field in dataclasses.fields(default) if field.name not in SINCE_2_11]
        values = ", ".join(f"{field.name}={getattr(default, field.name)!r}" for field in fields)
        return f" = {type(default).__name__}({values})"
    return f" = {default.__qualname__ if isinstance(default, type) else repr(default)}"


def said_of_call(function: Any, counterpart: Any = None) -> str:
    """Names, order, kinds and defaults of the parameters, without annotations, which may differ.

    Leaves out the parameters that an older torch does not have in the counterpart.
    """
    too_new = SINCE_2_11 - {*inspect.signature(counterpart or function).parameters}
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    marks[inspect.Parameter.KEYWORD_ONLY] = "by keyword "
    parameters = inspect.signature(function).parameters.values()
    said = [f"{marks.get(p.kind, '')}{p.name}{said_of_default(p.default)}" for p in parameters if p.name not in too_new]
    return ", ".join(said)


def said_of_field(field: dataclasses.Field[Any]) -> str:
    default = field.default
    if default is dataclasses.MISSING:
        made = field.default_factory
        default = inspect.Parameter.empty if made is dataclasses.MISSING else made()
    return f"{field.name}{said_of_default(default)}"


def facts_of_class(name: str, cls: type, attributes: set[str]) -> Iterator[tuple[str, str]]:
    if issubclass(cls, enum.Enum):
        yield name, "enum " + ", ".join(f"{member.name}={member.value}" for member in cls)
        return
    if dataclasses.is_dataclass(cls):
        bases = [base.__name__ for base in cls.__mro__[1:-1]]
        yield name, f"dataclass of {bases}" + (", frozen" if cls.__dataclass_params__.frozen else "")
        for field in dataclasses.fields(cls):
            yield f"{name}.{field.name}", said_of_field(field)
        return
    yield f"{name}()", said_of_call(cls)
    for attribute in sorted(attributes):
        found = inspect.getattr_static(cls, attribute, None)
        key = f"{name}.{attribute}"
        if isinstance(found, property):
            yield key, "property"
        elif callable(found) or isinstance(found, staticmethod):
            kind = "static " if isinstance(found, staticmethod) else ""
            yield key, f"{kind}({said_of_call(getattr(cls, attribute))})"


def public_attributes(cls: Any) -> set[str]:
    """Public attributes that the class, or a base class in its own library, adds or overrides."""
    own = [b for b in getattr(cls, "__mro__", ()) if b.__module__.startswith(("torch.distributed.fsdp", "minifsdp"))]
    found = {name for base in own for name in vars(base) if not name.startswith("_")}
    # `FSDPModule` may override methods that every module has (FUZZ-04).
    return found if getattr(cls, "__name__", "") != "FSDPModule" else {n for n in found if not hasattr(nn.Module, n)}


def facts_of(module: ModuleType, other: ModuleType, names: list[str]) -> dict[str, str]:
    """Facts about ``module``. A class has facts about every attribute that its version in either module defines."""
    facts: dict[str, str] = {}
    for name in names:
        found = getattr(module, name, None)
        if found is None:
            facts[name] = "missing"
        elif isinstance(found, type):
            attributes = public_attributes(found) | public_attributes(getattr(other, name, None))
            facts.update(facts_of_class(name, found, attributes))
        elif callable(found):
            facts[name] = f"function({said_of_call(found, getattr(other, name, None))})"
        else:
            facts[name] = repr(found)
    return facts


def modules_and_names() -> Iterator[tuple[str, ModuleType, ModuleType, list[str]]]:
    """Pairs of a torch module and a minifsdp module, with the names that both must have."""
    yield "", torch_fsdp, minifsdp, [*sorted(set(torch_fsdp.__all__) - set(MISSING)), "FlatParameter"]
    for path, names in SUBMODULES.items():
        theirs = importlib.import_module(f"torch.distributed.fsdp.{path}")
        ours = importlib.import_module(f"minifsdp.{path}")
        yield path, theirs, ours, sorted({*names, *getattr(theirs, "__all__", [])})


def differences() -> dict[str, tuple[str, str]]:
    found = {}
    for _, theirs, ours, names in modules_and_names():
        expected, present = facts_of(theirs, ours, names), facts_of(ours, theirs, names)
        for key in {**expected, **present}:
            pair = (expected.get(key, "missing"), present.get(key, "missing"))
            is_too_new = pair[0] == "missing" and key.rpartition(".")[2] in SINCE_2_11
            if pair[0] != pair[1] and not is_too_new:
                found[key] = pair
    return found


# --- the tests ---


@pytest.mark.spec("CTOR-01", "SHARD-01", "MP-01", "OFF-01", "SD-CFG-02", "SUMMON-01", "OSD-01", "OSD-LOAD-01")
@pytest.mark.spec("FS2-01", "FS2-20", "FS2-27", "MIG-21", "NEW-06", "NEW-17", "NEW-18")
@pytest.mark.pure
def test_every_difference_to_the_installed_torch_is_listed() -> None:
    found = {key: f"torch: {theirs}\n    here:  {ours}" for key, (theirs, ours) in differences().items()}
    not_meant = [f"{key}\n    {pair}" for key, pair in found.items() if key not in MEANT]
    assert not not_meant, "\n".join(not_meant)


@pytest.mark.pure
@pytest.mark.spec("CTOR-01")
def test_the_constructor_takes_the_arguments_of_torch_and_then_an_old_keyword() -> None:
    ours, theirs = said_of_call(FullyShardedDataParallel), said_of_call(torch_fsdp.FullyShardedDataParallel)
    assert ours == f"{theirs}, by keyword fsdp_auto_wrap_policy = None"


@pytest.mark.pure
def test_table_of_differences_has_no_stale_entry() -> None:
    assert sorted(set(MEANT) - set(differences())) == []
    assert all(len(reason.split()) > 3 for reason in MEANT.values()), "each reason is a sentence"


@pytest.mark.pure
def test_comparison_finds_a_different_default_a_different_order_and_a_missing_name() -> None:
    theirs, ours = ModuleType("theirs"), ModuleType("ours")
    theirs.call, ours.call = (lambda a, b=1: None), (lambda a, b=2: None)
    theirs.other, ours.other = (lambda a, b: None), (lambda b, a: None)
    theirs.gone = Iterator
    facts = [facts_of(*pair, ["call", "other", "gone"]) for pair in ((theirs, ours), (ours, theirs))]
    assert facts[0]["call"] != facts[1]["call"]
    assert facts[0]["other"] != facts[1]["other"]
    assert facts[1]["gone"] == "missing" and "missing" not in facts[0].values()


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
    for path in SUBMODULES:
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


@pytest.mark.pure
def test_the_fields_of_every_option_can_be_set_afterwards() -> None:
    # Scripts create an options object first and set its fields from their arguments.
    for cls in (subject.MixedPrecision, subject.CPUOffload, subject.FullStateDictConfig):
        option = cls()
        for field in dataclasses.fields(option):
            setattr(option, field.name, getattr(option, field.name))

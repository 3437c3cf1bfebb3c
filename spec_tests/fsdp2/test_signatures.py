"""Every public name takes the same arguments as torch's, in the same order and with the same defaults.

A program written for torch can pass any argument by position or by name, so this file compares all of these with the
installed version of torch. Intentional differences are listed here.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from spec_tests import subject

NAMES = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
METHODS = sorted(name for name in vars(torch_fsdp.FSDPModule) if not name.startswith("_"))

# Names that minifsdp does not have, with the reason. Calls that set `dp_mesh_dims` are refused (NEW-18).
MISSING = {"DataParallelMeshDims": "describes a mesh of several parallelisms at once, for dp_mesh_dims"}

# Methods with different arguments, with the reason.
MEANT: dict[str, str] = {}

# Features that PyTorch added after 2.11, the oldest supported version. minifsdp offers them with every version.
SINCE_2_11 = {
    "dp_mesh_dims",
    "reset_iter_state",
    "set_reduce_scatter_max_input_buffers",
    "set_reduce_scatter_unused_params",
    "set_separate_reduce_scatter_group",
    "set_symm_mem_for_comm",
}


def described(function: Any) -> list[tuple[str, Any, str]]:
    """Name, kind and default of each argument. Defaults are compared by `repr`, because minifsdp has its own types."""
    return [
        (parameter.name, parameter.kind, repr(parameter.default))
        for parameter in inspect.signature(function).parameters.values()
    ]


@pytest.mark.spec("FS2-01", "MIG-21", "NEW-17")
@pytest.mark.pure
@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_takes_the_same_arguments(name: str) -> None:
    ours, theirs = described(getattr(subject.engine, name)), described(getattr(torch_fsdp, name))
    too_new = SINCE_2_11 - {argument for argument, _, _ in theirs}
    assert [one for one in ours if one[0] not in too_new] == theirs


@pytest.mark.spec("FS2-27", "NEW-06", "NEW-18")
@pytest.mark.pure
@pytest.mark.parametrize("name", METHODS)
def test_a_method_takes_the_same_arguments(name: str) -> None:
    ours, theirs = (described(getattr(module.FSDPModule, name)) for module in (subject.engine, torch_fsdp))
    if name in MEANT:
        assert ours != theirs, "no longer different: take it out of the table"
    else:
        assert ours == theirs


@pytest.mark.spec("FS2-20")
@pytest.mark.pure
def test_unshard_handle_wait_has_signature_of_torch() -> None:
    assert described(subject.UnshardHandle.wait) == described(torch_fsdp.UnshardHandle.wait)


@pytest.mark.spec("NEW-17", "NEW-18")
@pytest.mark.pure
def test_only_listed_names_of_torch_are_missing() -> None:
    missing = {name for name in torch_fsdp.__all__ if not hasattr(subject.engine, name)}
    assert missing <= set(MISSING)


@pytest.mark.spec("FS2-27")
@pytest.mark.pure
def test_fsdp_module_has_only_public_methods_of_torch() -> None:
    # Methods that every module has may be overridden (FUZZ-04).
    ours = {name for name in vars(subject.FSDPModule) if not (name.startswith("_") or hasattr(nn.Module, name))}
    assert ours - (SINCE_2_11 - set(METHODS)) == set(METHODS)

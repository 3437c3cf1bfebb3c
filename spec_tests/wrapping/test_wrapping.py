"""Wrappers that a policy inserts: their order, classes without mixed precision, and manual wrapping.

``test_wrap.py`` tests the choice of modules. The reference is torch's ``_auto_wrap``.
"""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import MixedPrecision as TorchMixedPrecision
from torch.nn.modules.batchnorm import _BatchNorm

from minifsdp.fsdp1.options import MixedPrecision
from minifsdp.fsdp1.wrap import apply
from spec_tests import subject
from spec_tests.subject import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    size_based_auto_wrap_policy,
)
from spec_tests.wrapping.boxes import (
    Block,
    Box,
    WideBlock,
    at_least_40,
    blocks,
    boxes,
    chosen_paths,
    cut,
    cut_by_torch,
    linears,
)

wrap, module_wrap_policy = subject.wrap.wrap, subject.wrap._module_wrap_policy


# --- inserting wrappers ---


@pytest.mark.spec("WRAP-03", "WRAP-10")
def test_wrappers_are_created_from_inner_to_outer_with_inner_ones_in_place() -> None:
    root, made = linears(), []

    def make(module: nn.Module, **kwargs: Any) -> Box:
        made.append((module, boxes(module)))
        return Box(module, **kwargs)

    outer, inner = root[2], root[2][1]
    apply(root, {inner: {"a": 1}, outer: {}}, make, {"a": 0})
    assert made == [(inner, {}), (outer, {"1": {"a": 1}})]
    assert boxes(root) == {"2": {"a": 0}, "2.1": {"a": 1}}
    assert type(root) is nn.Sequential


@pytest.mark.spec("WRAP-13")
@pytest.mark.parametrize(("place", "path"), [((0,), "0"), ((2, 1), r"2\.1")])
@pytest.mark.parametrize("policy", [always_wrap_policy, ModuleWrapPolicy({nn.Linear})])
def test_nested_wrapper_is_refused_with_its_name(place: tuple[int, ...], path: str, policy: Any) -> None:
    root = linears()
    parent = functools.reduce(lambda module, index: module[index], place[:-1], root)
    parent[place[-1]] = Box(parent[place[-1]])
    root.append(Box(nn.Linear(1, 1)))
    before = boxes(root)
    with pytest.raises(ValueError, match=f"already have FSDP applied but found {path} in Sequential"):
        cut(root, policy)
    assert boxes(root) == before


# --- modules without mixed precision ---


@pytest.mark.spec("MP-19")
@pytest.mark.parametrize(
    "policy",
    [lambda **question: False, ModuleWrapPolicy({WideBlock}), CustomPolicy(lambda m: isinstance(m, WideBlock))],
)
def test_batch_norms_become_full_precision_units_for_any_policy(policy: Any) -> None:
    low = MixedPrecision(torch.bfloat16)
    with pytest.warns(
        UserWarning, match="contains BatchNorm1d. These modules will be wrapped as separate FSDP"
    ) as all_:
        found = cut(blocks(), policy, mixed_precision=low, prefetch=1)
    assert len(all_) == 1
    assert found.pop("parts.0.parts.1") == {"mixed_precision": None, "prefetch": 1}
    assert found == ({} if inspect.isfunction(policy) else {"parts.0": {"mixed_precision": low, "prefetch": 1}})


@pytest.mark.spec("MP-19", "NEW-02")
def test_batch_norm_keeps_custom_policy_options_except_precision() -> None:
    low = MixedPrecision(torch.bfloat16)
    policy = CustomPolicy(lambda m: {"a": 2, "mixed_precision": low} if isinstance(m, nn.BatchNorm1d) else False)
    with pytest.warns(UserWarning, match="BatchNorm1d"):
        assert cut(blocks(), policy, a=1, mixed_precision=low) == {"parts.0.parts.1": {"a": 2, "mixed_precision": None}}


@pytest.mark.spec("MP-19", "WRAP-03")
def test_ignored_classes_are_wrapped_before_their_parent() -> None:
    block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=80)
    assert chosen_paths(nn.Sequential(block), policy) == ["0"]
    assert chosen_paths(nn.Sequential(block), policy, (), (), (_BatchNorm,)) == ["0.1"]


@pytest.mark.spec("MP-19", "IGN-10")
def test_ignored_batch_norm_is_not_changed() -> None:
    root = blocks()
    norm = next(module for module in root.modules() if isinstance(module, nn.BatchNorm1d))
    found = cut(root, always_wrap_policy, mixed_precision=MixedPrecision(), ignored_modules=[norm])
    assert "parts.0" in found and "parts.0.parts.1" not in found
    assert not norm._forward_pre_hooks


@pytest.mark.spec("MP-19", "WRAP-07")
def test_mixed_precision_does_not_split_unwrapped_attention() -> None:
    tree = nn.ModuleList([nn.Sequential(nn.MultiheadAttention(20, 1), nn.BatchNorm1d(4))])
    exclude = functools.partial(at_least_40, exclude_wrap_modules={nn.ModuleList, nn.Sequential})
    with pytest.warns(UserWarning, match="BatchNorm1d"):
        assert set(cut(tree, exclude, mixed_precision=MixedPrecision())) == {"0.1"}


class Probe(nn.LayerNorm):
    """Records the dtypes of its inputs. It converts one of its outputs itself."""

    def forward(self, input: torch.Tensor, index: torch.Tensor, *, more: Any) -> Any:
        self.seen = [input.dtype, index.dtype, more[0].dtype]
        output = super().forward(input)
        return output, {"index": index, "half": output.half()}


@pytest.mark.spec("MP-19")
@pytest.mark.parametrize("own", [torch.float32, torch.float64])
def test_ignored_class_computes_in_own_dtype(own: torch.dtype) -> None:
    root = nn.Sequential(Probe(4, dtype=own))
    precision = MixedPrecision(_module_classes_to_ignore=(Probe,))
    with pytest.warns(UserWarning, match="Probe"):
        cut(root, lambda **question: False, mixed_precision=precision)
    for dtype in (torch.bfloat16, own):
        x = torch.randn(2, 4, dtype=dtype)
        output, rest = root[0](x, torch.tensor([1]), more=[x])
        assert root[0].module.seen == [own, torch.int64, own]
        assert (output.dtype, rest["index"].dtype) == (dtype, torch.int64)
        assert rest["half"].dtype is (torch.bfloat16 if dtype is torch.bfloat16 else torch.float16)


@pytest.mark.spec("MP-19")
def test_ignored_class_without_tensors_of_its_own_computes_in_float32() -> None:
    seen: list[torch.dtype] = []
    norm = nn.BatchNorm1d(4, affine=False, track_running_stats=False)
    norm.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    root = nn.Sequential(norm)
    with pytest.warns(UserWarning, match="BatchNorm1d"):
        cut(root, lambda **question: False, mixed_precision=MixedPrecision())
    assert root(torch.randn(2, 4, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert seen == [torch.float32]


# --- manual wrapping ---


@pytest.mark.spec("WRAP-12")
def test_wrap_creates_a_unit_with_the_arguments_of_the_innermost_context() -> None:
    layer = nn.Linear(2, 2)
    assert wrap(layer, a=1) is layer
    with enable_wrap(wrapper_cls=Box, a=1, b=2):
        with pytest.raises(KeyError), enable_wrap(wrapper_cls=Box, d=5):
            assert wrap(nn.Linear(1, 1)).kwargs == {"d": 5}
            raise KeyError
        wrapped = wrap(layer, b=3, c=4)
    assert isinstance(wrapped, Box) and wrapped.module is layer
    assert wrapped.kwargs == {"a": 1, "b": 3, "c": 4}
    assert wrap(layer) is layer


@pytest.mark.spec("WRAP-12")
def test_wrap_context_of_one_thread_does_not_affect_another_thread() -> None:
    seen: list[nn.Module] = []
    with enable_wrap(wrapper_cls=Box):
        thread = threading.Thread(target=lambda: seen.append(wrap(nn.Linear(1, 1))))
        thread.start()
        thread.join()
    assert type(seen[0]) is nn.Linear


# --- any tree ---

TREES = st.recursive(
    st.sampled_from(["linear", "batch norm", "attention"]),
    lambda children: st.tuples(st.sampled_from(["list", "block", "wide block"]), st.lists(children, max_size=3)),
    max_leaves=10,
)


def build(tree: Any) -> nn.Module:
    match tree:
        case "linear":
            return nn.Linear(5, 5)
        case "batch norm":
            return nn.BatchNorm1d(5)
        case "attention":
            return nn.MultiheadAttention(5, 1)
        case ("list", children):
            return nn.ModuleList(map(build, children))
        case (kind, children):
            return (Block if kind == "block" else WideBlock)(*map(build, children))


@pytest.mark.spec("WRAP-03", "WRAP-05", "WRAP-06", "WRAP-10", "IGN-10", "MP-19")
@settings(deadline=None)
@given(
    st.lists(TREES, min_size=1, max_size=3),
    st.sampled_from(
        [
            functools.partial(size_based_auto_wrap_policy, min_num_params=30, force_leaf_modules=set()),
            functools.partial(size_based_auto_wrap_policy, min_num_params=80, force_leaf_modules=set()),
            functools.partial(module_wrap_policy, module_classes={Block, nn.Linear}),
            functools.partial(module_wrap_policy, module_classes={WideBlock, nn.BatchNorm1d}),
        ]
    ),
    st.integers(0, 50),
    st.booleans(),
)
def test_policies_wrap_any_tree_like_torch(children: Any, policy: Any, ignored: int, low: bool) -> None:
    found = []
    for cutting, precision in ((cut, MixedPrecision), (cut_by_torch, TorchMixedPrecision)):
        root = Block(*map(build, children))
        modules = list(root.modules())[1:]
        mixed = precision(param_dtype=torch.bfloat16) if low else None
        with warnings.catch_warnings(action="ignore"):
            units = cutting(root, policy, ignored_modules=[modules[ignored % len(modules)]], mixed_precision=mixed)
        found.append({path: arguments["mixed_precision"] is None for path, arguments in units.items()})
    assert found[0] == found[1]

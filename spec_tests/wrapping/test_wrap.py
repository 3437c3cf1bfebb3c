"""Which modules become units, and the wrappers that a policy inserts.

These tests need no process group: `Box` replaces the wrapper. The reference is torch's own ``_auto_wrap`` with the same
replacement. ``test_wrap_units.py`` and other files test the requirements that need the real wrapper (WRAP-01, WRAP-11,
WRAP-14, WRAP-15, WRAP-17).
"""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp.wrap as torch_wrap
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import MixedPrecision as TorchMixedPrecision
from torch.distributed.fsdp._wrap_utils import _auto_wrap
from torch.nn.modules.batchnorm import _BatchNorm

import minifsdp.wrap
from minifsdp.fsdp1.options import MixedPrecision
from minifsdp.fsdp1.wrap import apply, auto_wrap, choose, require_policy
from minifsdp.wrap import default_auto_wrap_policy
from spec_tests import subject
from spec_tests.subject import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

at_least_40 = functools.partial(size_based_auto_wrap_policy, min_num_params=40)


class Box(nn.Module):
    """Replaces the wrapper: stores its arguments and does nothing else."""

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module
        self.kwargs = kwargs

    @property
    def module(self) -> nn.Module:
        return self._fsdp_wrapped_module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class Block(nn.Module):
    """Has a parameter of its own in addition to its submodules."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(7))
        self.parts = nn.ModuleList(parts)


class WideBlock(Block):
    pass


def linears() -> nn.Sequential:
    """120 elements: two layers of 30, and a submodule with two more layers."""
    return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)))


def blocks() -> nn.Module:
    return Block(WideBlock(nn.Linear(3, 4), nn.BatchNorm1d(4)), Block(nn.Linear(6, 6), nn.LayerNorm(6)), nn.ReLU())


def boxes(root: nn.Module) -> dict[str, dict[str, Any]]:
    """The arguments of every `Box` in the tree, by the original path of the module inside."""
    found = {}
    for path, module in root.named_modules(remove_duplicate=False):
        if isinstance(module, Box):
            names = [name for name in path.split(".") if name != "_fsdp_wrapped_module"]
            found[".".join(names)] = module.kwargs
    return found


def cut(root: nn.Module, policy: Any, **kwargs: Any) -> dict[str, dict[str, Any]]:
    ignored = {name: kwargs.pop(name, ()) for name in ("ignored_modules", "ignored_params")}
    auto_wrap(root, policy, Box, kwargs, **ignored)
    return boxes(root)


def cut_by_torch(
    root: nn.Module,
    policy: Any,
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] = (),
    **kwargs: Any,
) -> dict[str, dict[str, Any]]:
    modules = {inner for module in ignored_modules for inner in module.modules()}
    parameters = {*ignored_params, *(p for module in modules for p in module.parameters())}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _auto_wrap(root, policy, modules, parameters, {"mixed_precision": None, **kwargs}, Box)
    return boxes(root)


def chosen_paths(root: nn.Module, policy: Any, *args: Any) -> list[str]:
    paths = {module: path for path, module in root.named_modules()}
    return [paths[module] for module in choose(root, policy, *args)]


Call = tuple[str, bool, int]


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), num_layers=2, enable_nested_tensor=False)


TREES = {"linears": linears, "encoder": encoder, "blocks": blocks}


def recording(root: nn.Module, policy: Callable[..., bool]) -> tuple[Callable[..., bool], list[Call]]:
    """Returns ``policy`` with recording, and the list that records its calls, with modules as paths."""
    paths = {module: path for path, module in root.named_modules()}
    calls: list[Call] = []

    def asked(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        calls.append((paths[module], recurse, nonwrapped_numel))
        return policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)

    return asked, calls


# --- the protocol of policies that are functions ---


POLICIES: dict[str, Callable[..., bool]] = {
    "always": always_wrap_policy,
    "size": at_least_40,
    "classes": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear, Block}),
    "stays outside of blocks": lambda module, recurse, nonwrapped_numel: (
        not (recurse and isinstance(module, WideBlock))
    ),
}


@pytest.mark.spec("WRAP-02", "WRAP-03", "WRAP-10", "IGN-10")
@pytest.mark.parametrize("ignores", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tree", TREES)
def test_policy_calls_and_their_order_equal_those_of_torch(tree: str, policy: str, ignores: bool) -> None:
    asked: list[list[Call]] = []
    paths: list[set[str]] = []
    for cutting in (cut_by_torch, cut):
        root = TREES[tree]()
        question, calls = recording(root, POLICIES[policy])
        modules, parameters = list(root.modules()), list(root.parameters())
        ignored = {"ignored_modules": [modules[3]], "ignored_params": [parameters[-1]]} if ignores else {}
        paths.append(set(cutting(root, question, **ignored)))
        asked.append(calls)
    assert asked[0] == asked[1]
    assert paths[0] == paths[1]


@pytest.mark.spec("IGN-10", "IGN-01")
def test_ignored_shared_module_is_ignored_in_both_places() -> None:
    shared = nn.Linear(5, 5)
    root = nn.Sequential(Block(shared), Block(shared))
    assert chosen_paths(root, always_wrap_policy, [root[0]]) == ["1.parts", "1"]


@pytest.mark.spec("WRAP-03", "ORIG-16")
def test_weight_that_a_unit_contains_does_not_count_for_a_tied_module() -> None:
    root = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    root[1].weight = root[0].weight
    policy, calls = recording(root, functools.partial(size_based_auto_wrap_policy, min_num_params=20))
    assert chosen_paths(root, policy) == ["0"]
    assert ("1", True, 8) in calls


@pytest.mark.spec("WRAP-03")
def test_module_with_two_parents_is_wrapped_once() -> None:
    shared = nn.Linear(5, 5)
    root = nn.Sequential(Block(shared), Block(shared, nn.ReLU()))
    root.add_module("again", shared)
    root.add_module("and_again", shared)
    policy, calls = recording(root, lambda module, recurse, nonwrapped_numel: recurse or module is shared)
    cut(root, policy)
    wrapper = root.again
    assert isinstance(wrapper, Box) and wrapper.module is shared
    assert wrapper is root.and_again is root[0].parts[0] is root[1].parts[0]
    assert [call for call in calls if call[0] == "0.parts.0"] == [("0.parts.0", True, 30), ("0.parts.0", False, 30)]
    assert ("1", False, 7) in calls


@pytest.mark.spec("WRAP-03")
def test_module_shared_with_a_unit_does_not_become_a_unit_at_its_other_path() -> None:
    shared = nn.Linear(5, 5)
    root = nn.Sequential(WideBlock(nn.BatchNorm1d(3), shared), Block(shared))

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return not isinstance(module, WideBlock) if recurse else isinstance(module, nn.Linear)

    assert chosen_paths(root, policy, (), (), (WideBlock,)) == ["0"]
    assert chosen_paths(root, policy, (), (), (_BatchNorm,)) == ["0.parts.0", "0.parts.1"]


@pytest.mark.spec("WRAP-04", "WRAP-02")
def test_further_parameters_of_a_policy_are_bound_with_partial() -> None:
    def custom(module: nn.Module, recurse: bool, nonwrapped_numel: int, min_num_params: int = int(1e8)) -> bool:
        return nonwrapped_numel >= min_num_params

    assert chosen_paths(linears(), custom) == []
    assert chosen_paths(linears(), functools.partial(custom, min_num_params=31)) == ["2"]


# --- the policies ---


@pytest.mark.spec("WRAP-05", "WRAP-10")
def test_module_wrap_policy_takes_instances_of_subclasses_too_but_not_the_outermost_module() -> None:
    assert chosen_paths(blocks(), ModuleWrapPolicy({Block})) == ["parts.0", "parts.1"]
    assert chosen_paths(blocks(), ModuleWrapPolicy([WideBlock])) == ["parts.0"]


@pytest.mark.spec("WRAP-05", "NEW-03")
def test_module_wrap_policy_is_also_a_function_that_others_can_be_combined_with() -> None:
    policy = ModuleWrapPolicy({WideBlock})
    assert policy(nn.Linear(1, 1), recurse=True, nonwrapped_numel=1)
    assert not policy(nn.Linear(1, 1), False, 1)
    norms = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.LayerNorm))
    both = functools.partial(subject.wrap._or_policy, policies=[policy, norms])
    assert chosen_paths(blocks(), both) == ["parts.0", "parts.1.parts.1"]
    assert repr(policy) == "ModuleWrapPolicy({WideBlock})"


@pytest.mark.spec("WRAP-06", "MYTH-26")
def test_the_size_policy_wraps_at_exactly_the_threshold_which_is_100_million_by_default() -> None:
    for min_num_params, units in ((59, ["2"]), (60, ["2"]), (61, [])):
        policy = functools.partial(size_based_auto_wrap_policy, min_num_params=min_num_params)
        assert chosen_paths(linears(), policy) == units
    with torch.device("meta"):
        root = nn.Sequential(nn.Linear(10_000, 10_000, bias=False), nn.Linear(10_000, 9_999, bias=False))
    assert chosen_paths(root, size_based_auto_wrap_policy) == ["0"]


@pytest.mark.spec("WRAP-07")
def test_size_policy_skips_containers_and_keeps_attention_together_unless_the_sets_are_replaced() -> None:
    layers = [nn.Linear(5, 5) for _ in range(4)]
    containers = nn.ModuleList(layers[:2]), nn.ModuleDict({"a": layers[2], "b": layers[3]})
    tree = nn.Sequential(*containers, nn.MultiheadAttention(20, 1))
    assert chosen_paths(tree, at_least_40) == []
    assert chosen_paths(tree, functools.partial(at_least_40, exclude_wrap_modules=set())) == ["0", "1"]
    attention = functools.partial(at_least_40, force_leaf_modules=set())
    assert chosen_paths(tree, attention) == ["2.out_proj", "2"]
    leaves = functools.partial(at_least_40, force_leaf_modules={nn.Sequential})
    assert chosen_paths(nn.Sequential(linears()), leaves) == []
    sets = vars(size_based_auto_wrap_policy)
    assert sets["FORCE_LEAF_MODULES"] == {nn.MultiheadAttention}
    assert sets["EXCLUDE_WRAP_MODULES"] == {nn.ModuleList, nn.ModuleDict}


@pytest.mark.spec("WRAP-08")
def test_the_transformer_policy_wraps_exactly_the_layers() -> None:
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer})
    assert chosen_paths(encoder(), policy) == ["layers.0", "layers.1"]


@pytest.mark.spec("WRAP-09", "MYTH-03")
def test_unbound_transformer_policy_error_shows_how_to_bind_its_classes() -> None:
    remedy = r"functools\.partial\(transformer_auto_wrap_policy, transformer_layer_cls="
    with pytest.raises(TypeError, match=remedy):
        transformer_auto_wrap_policy(transformer_layer_cls={Block})  # type: ignore[call-arg]
    root = blocks()
    with pytest.raises(TypeError, match=remedy):
        cut(root, transformer_auto_wrap_policy)
    assert boxes(root) == {}


@pytest.mark.spec("WRAP-02", "WRAP-09")
def test_policy_with_unbound_params_is_refused_before_call() -> None:
    def needs_depth(module: nn.Module, recurse: bool, nonwrapped_numel: int, depth: int) -> bool:
        raise AssertionError("was asked")

    with pytest.raises(TypeError, match=r"depth.*functools\.partial\(needs_depth, depth="):
        require_policy(needs_depth)
    with pytest.raises(TypeError, match=r"functools\.partial\(lambda_auto_wrap_policy, lambda_fn="):
        require_policy(lambda_auto_wrap_policy)
    require_policy(functools.partial(needs_depth, depth=1))


@pytest.mark.spec("WRAP-16", "WRAP-05", "WRAP-08")
def test_invalid_policy_and_invalid_classes_of_a_policy_raise_type_errors() -> None:
    for policy in ({Block}, "Block", 5, Block, ModuleWrapPolicy):
        with pytest.raises(TypeError, match="ModuleWrapPolicy"):
            cut(blocks(), policy)
    with pytest.raises(TypeError, match="module_classes must be a set"):
        ModuleWrapPolicy(Block)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="transformer_layer_cls must be a set"):
        chosen_paths(blocks(), functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=Block))


@pytest.mark.spec("NEW-02")
def test_a_custom_policy_gives_units_other_arguments() -> None:
    root = blocks()

    def choice(module: nn.Module) -> bool | dict[str, Any]:
        if isinstance(module, WideBlock):
            return {"sharding_strategy": "other", "extra": 1}
        return {} if isinstance(module, nn.ReLU) else isinstance(module, nn.LayerNorm)

    assert cut(root, CustomPolicy(choice), sharding_strategy="outer", prefetch=2) == {
        "parts.0": {"sharding_strategy": "other", "extra": 1, "prefetch": 2},
        "parts.1.parts.1": {"sharding_strategy": "outer", "prefetch": 2},
    }


@pytest.mark.spec("NEW-02", "WRAP-10", "IGN-10")
def test_custom_policy_is_called_once_per_inner_module_that_is_not_ignored() -> None:
    for ignored, expected in (([], ["0", "1", "2", "2.0", "2.1"]), (["2"], ["0", "1"])):
        root, seen = linears(), []
        policy = CustomPolicy(lambda module, seen=seen: bool(seen.append(module)))
        choose(root, policy, [root.get_submodule(path) for path in ignored])
        paths = {module: path for path, module in root.named_modules()}
        assert sorted(paths[module] for module in seen) == expected


@pytest.mark.spec("NEW-02")
def test_custom_policy_that_returns_another_type_raises_value_error() -> None:
    with pytest.raises(ValueError, match=r"Linear it returned 1\b"):
        choose(linears(), CustomPolicy(lambda module: 1))  # type: ignore[arg-type, return-value]


@pytest.mark.spec("WRAP-05", "NEW-02")
def test_policy_objects_of_torch_work_here_too() -> None:
    assert chosen_paths(blocks(), torch_wrap.ModuleWrapPolicy({Block})) == ["parts.0", "parts.1"]
    custom = torch_wrap.CustomPolicy(lambda m: {"a": 1} if isinstance(m, WideBlock) else False)
    assert list(choose(blocks(), custom).values()) == [{"a": 1}]


@pytest.mark.spec("WRAP-18", "NEW-02", "WRAP-05")
@pytest.mark.parametrize("answer", [True, False, {}, {"sharding_strategy": "other"}], ids=str)
def test_policy_object_called_directly_equals_torch(answer: Any) -> None:
    root, kwargs = blocks(), {"sharding_strategy": "outer", "prefetch": 2}

    def choice(module: nn.Module) -> bool | dict[str, Any]:
        return answer if module is root else isinstance(module, Block)

    for name, argument in (("CustomPolicy", choice), ("ModuleWrapPolicy", {type(root), Block})):
        ours, theirs = (getattr(package, name)(argument) for package in (minifsdp.wrap, torch_wrap))
        for ignored in (set(), {root}, {root.parts[0]}):
            found = ours._run_policy(root, ignored, kwargs)
            assert found == theirs._run_policy(root, ignored, kwargs)
            assert (root in found) is (root not in ignored and (name == "ModuleWrapPolicy" or bool(answer)))
    assert kwargs == {"sharding_strategy": "outer", "prefetch": 2}


@pytest.mark.spec("WRAP-18", "NEW-02", "WRAP-05")
@pytest.mark.parametrize(
    ("name", "argument"),
    [("CustomPolicy", lambda module: isinstance(module, Block)), ("ModuleWrapPolicy", {Block})],
    ids=["CustomPolicy", "ModuleWrapPolicy"],
)
def test_policy_object_chooses_modules_for_activation_checkpointing(name: str, argument: Any) -> None:
    def wrapped_paths(package: Any) -> list[str]:
        model = blocks()
        apply_activation_checkpointing(model, auto_wrap_policy=getattr(package, name)(argument))
        return [path for path, module in model.named_modules() if isinstance(module, CheckpointWrapper)]

    assert wrapped_paths(minifsdp.wrap) == wrapped_paths(torch_wrap) == ["parts.0", "parts.1"]


# --- older names ---


@pytest.mark.spec("LEGACY-02", "MYTH-25")
@pytest.mark.parametrize("bound", [False, True])
def test_the_default_policy_warns_once_and_is_the_size_policy(bound: bool) -> None:
    policy = functools.partial(default_auto_wrap_policy, min_num_params=40) if bound else default_auto_wrap_policy
    with pytest.warns(FutureWarning, match="default_auto_wrap_policy.*size_based_auto_wrap_policy") as caught:
        assert chosen_paths(linears(), policy) == (["2"] if bound else [])
    assert len(caught) == 1
    # A program can also call it.
    limit = 40 if bound else 100_000_000
    with pytest.warns(FutureWarning, match="size_based_auto_wrap_policy"):
        assert policy(nn.Linear(1, 1), False, limit)
    with pytest.warns(FutureWarning):
        assert not policy(module=nn.Linear(1, 1), recurse=False, nonwrapped_numel=limit - 1)


@pytest.mark.spec("LEGACY-03")
def test_a_policy_in_the_old_form_works_and_warns_once() -> None:
    numels = []

    def old(module: nn.Module, recurse: bool, unwrapped_params: int, min_num_params: int) -> bool:
        numels.append(unwrapped_params)
        return unwrapped_params >= min_num_params

    with pytest.warns(FutureWarning, match="unwrapped_params.*nonwrapped_numel") as caught:
        assert chosen_paths(linears(), functools.partial(old, min_num_params=40)) == ["2"]
    assert len(caught) == 1
    assert numels == [120, 30, 30, 60, 30, 30, 60]


@pytest.mark.spec("LEGACY-02", "LEGACY-03", "MP-19")
def test_warnings_point_to_the_calling_line_of_the_program() -> None:
    def old(module: nn.Module, recurse: bool, unwrapped_params: int) -> bool:
        return False

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        auto_wrap(linears(), default_auto_wrap_policy, Box, {})
        auto_wrap(linears(), old, Box, {})
        auto_wrap(blocks(), always_wrap_policy, Box, {"mixed_precision": MixedPrecision()})
    assert [w.filename for w in caught] == [__file__] * 3
    assert [w.lineno - caught[0].lineno for w in caught] == [0, 1, 2]


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

ANY_TREES = st.recursive(
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
    st.lists(ANY_TREES, min_size=1, max_size=3),
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

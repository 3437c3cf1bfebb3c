"""minifsdp's functions with the names of ``torch.distributed.checkpoint.state_dict``: options, names and submodules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as functions_of_torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

import minifsdp
from spec_tests import subject
from spec_tests.checkpoint import checkpoints
from spec_tests.checkpoint.checkpoints import make, wrapped
from spec_tests.checkpoint.refusals import caught_warnings
from spec_tests.harness import ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
FULL = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
FORMS = {
    "sharded": StateDictOptions(),
    "full": FULL,
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
}


@pytest.mark.parametrize("name", functions_of_torch.__all__)
@pytest.mark.spec("PROG-108")
def test_the_names_of_torchs_module_are_also_names_of_the_package(name: str) -> None:
    """Only the functions are minifsdp's own."""
    assert name in minifsdp.__all__
    is_ours = getattr(minifsdp, name) is not getattr(functions_of_torch, name)
    assert is_ours is name.startswith(("get_", "set_"))


@pytest.mark.spec("PROG-97")
@pytest.mark.parametrize("full", [False, True])
@checkpoints.flat_or_original
@ranks(2)
def test_frozen_parameters_are_left_out_of_the_state(keep: bool, full: bool) -> None:
    plain = make()
    plain.first.requires_grad_(False)
    model = wrapped(plain, use_orig_params=keep)
    expected = [name for name in make().state_dict() if not name.startswith("first.")]
    options = StateDictOptions(full_state_dict=full, ignore_frozen_params=True)
    assert list(subject.get_model_state_dict(model, options=options)) == expected
    assert list(subject.get_state_dict(model, [], options=options)[0]) == expected


def compiled(seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    """A wrapped model with a compiled module in the unit of the root, and a compiled, frozen unit."""
    model: Any = make(seed)
    model.first.requires_grad_(False)
    model.head = torch.compile(model.head, backend="eager")
    model = wrapped(model, use_orig_params=True)
    model.module.first = torch.compile(model.first, backend="eager")
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def full_values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    weights, states = subject.get_state_dict(model, optimizer, options=options)
    return {key: v.tolist() if isinstance(v, torch.Tensor) else v for key, v in (weights | states).items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", [*FORMS, "from rank 0"])
@pytest.mark.parametrize("loads_compiled", [False, True])
@pytest.mark.spec("PROG-63", "PROG-92", "PROG-97")
@ranks(2)
def test_names_of_a_compiled_model_are_those_of_the_plain_model(loads_compiled: bool, form: str) -> None:
    model, optimizer = compiled()
    checkpoints.train(model, optimizer, [0])
    options = FORMS.get(form, FROM_RANK_0)
    weights, states = subject.get_state_dict(model, optimizer, options=options)
    assert weights.keys() == make().state_dict().keys()
    trained = subject.get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert list(trained) == [name for name in weights if not name.startswith("first.")]
    if form == "from rank 0" and dist.get_rank():
        weights, states = {}, {}
    other, fresh = compiled(seed=1)
    if not loads_compiled:
        other = wrapped(make(1), use_orig_params=True)
        fresh = torch.optim.Adam(other.parameters())
    subject.set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=states, options=options)
    assert full_values_of(other, fresh) == full_values_of(model, optimizer)


@pytest.mark.parametrize("function", ["get_model_state_dict", "get_state_dict"])
@pytest.mark.parametrize("keeps_prefix", [False, True])
@pytest.mark.parametrize("names", [["first"], ["head"], ["first", "second", "head"]], ids=",".join)
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.spec("PROG-63")
@ranks(2)
def test_the_state_of_submodules_has_the_names_of_the_model_or_of_the_submodule(
    is_compiled: bool, names: list[str], keeps_prefix: bool, function: str
) -> None:
    model: Any = compiled()[0] if is_compiled else wrapped(make(), use_orig_params=True)
    modules = {getattr(model, name) for name in names}
    options = StateDictOptions(full_state_dict=True, keep_submodule_prefixes=keeps_prefix)
    with checkpoints.quiet():
        if function == "get_model_state_dict":
            state = subject.get_model_state_dict(model, submodules=modules, options=options)
        else:
            optimizer = torch.optim.Adam(model.parameters())
            state, _ = subject.get_state_dict(model, optimizer, submodules=modules, options=options)
    expected: dict[str, Any] = {}
    for name in names:
        make().get_submodule(name).state_dict(destination=expected, prefix=f"{name}." if keeps_prefix else "")
    assert state.keys() == expected.keys()
    assert (keeps_prefix is False and len(names) > 1) or all(torch.equal(state[n], expected[n]) for n in state)


@checkpoints.flat_or_original
@pytest.mark.spec("PROG-63", "PROG-92")
@ranks(2)
def test_weights_of_rank_0_are_loaded_on_all_ranks_or_refused(keep: bool) -> None:
    model, weights = wrapped(make(1), use_orig_params=keep), make().state_dict()
    mine = dict(weights) if dist.get_rank() == 0 else {}
    assert subject.set_model_state_dict(model, mine, options=FROM_RANK_0) == ([], [])
    checkpoints.assert_same_state(model.state_dict(), make().state_dict())
    if dist.get_rank() == 0:
        del mine["scale"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "scale"'):
        subject.set_model_state_dict(model, mine, options=FROM_RANK_0)
    with pytest.raises(ValueError, match="full_state_dict must be True"):
        subject.set_model_state_dict(model, weights, options=StateDictOptions(broadcast_from_rank0=True))
    subject.set_model_state_dict(model, weights, options=FULL)
    assert list(weights) == list(make().state_dict()), "loading a dict does not change it"


@pytest.mark.spec("PROG-63")
@ranks(2)
def test_without_an_optimizer_there_is_no_optimizer_state() -> None:
    model = wrapped(make())
    weights, states = subject.get_state_dict(model, ())
    assert states == {}
    subject.set_state_dict(model, (), model_state_dict=weights, optim_state_dict=states)


@pytest.mark.parametrize("form", ["full", "sharded", "from rank 0"])
@pytest.mark.parametrize("names", [["first", "second", "head"], ["first.0", "second"], [""], ["second"]], ids=",".join)
@pytest.mark.parametrize("api", ["flat", "original", "fully_shard", "plain"])
@pytest.mark.spec("PROG-107")
@ranks(2)
def test_keys_of_a_model_state_may_be_submodules(api: str, names: list[str], form: str) -> None:
    model, source = (make(seed) if api == "plain" else checkpoints.sharded(api, seed) for seed in (1, 0))
    options = StateDictOptions(full_state_dict=form != "sharded", strict=False)
    with checkpoints.quiet():
        saved = subject.get_model_state_dict(source, options=options)
    modules = {name.replace("_fsdp_wrapped_module.", ""): module for name, module in model.named_modules()}
    given, loaded = {}, set()
    for name in names:
        prefix = f"{name}." if name else ""
        keys = [key for key in saved if key.startswith(prefix)]
        # The key is the wrapper, or the module inside it.
        module = modules[name] if name else model
        module = getattr(module, "module", module) if api == "flat" else module
        given[module] = {key.removeprefix(prefix): saved[key] for key in keys}
        loaded |= {*keys}
    if form == "from rank 0":
        options.broadcast_from_rank0 = True
        given = given if dist.get_rank() == 0 else {}
    with caught_warnings() as caught:
        result = subject.set_model_state_dict(model, given, options=options)
    ours = [w for w in caught if "the states of submodules" in str(w.message)]
    assert [(w.category, w.filename) for w in ours] == [(FutureWarning, __file__)] * bool(given)
    assert result.unexpected_keys == []
    with checkpoints.quiet():
        found = subject.get_model_state_dict(model, options=FULL)
    expected = {name: make(name not in loaded).state_dict()[name] for name in found}
    checkpoints.assert_same_state(found, expected)


def three_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    first, *others = model.parameters()
    adams = [torch.optim.Adam([first], lr=0.01), torch.optim.Adam(others[::2], lr=0.01)]
    return [*adams, torch.optim.SGD(others[1::2], lr=0.1, momentum=0.9)] if others[1::2] else adams


@pytest.mark.parametrize("form", FORMS)
@checkpoints.flat_or_original
@pytest.mark.spec("PROG-64")
@ranks(2)
def test_several_optimizers_share_one_dict(keep: bool, form: str) -> None:
    model, resumed = wrapped(make(), use_orig_params=keep), wrapped(make(1), use_orig_params=keep)
    optimizers, fresh = three_optimizers(model), three_optimizers(resumed)
    for optimizer in optimizers:
        checkpoints.train(model, optimizer, [0])
    options = FORMS[form]
    with checkpoints.quiet():
        weights, states = subject.get_state_dict(model, optimizers, options=options)
        subject.set_state_dict(resumed, fresh, model_state_dict=weights, optim_state_dict=states, options=options)
    for optimizer, other in zip(optimizers, fresh, strict=True):
        assert checkpoints.train(resumed, other, [1, 2]) == checkpoints.train(model, optimizer, [1, 2])
    checkpoints.assert_same_state(resumed.state_dict(), model.state_dict())


@pytest.mark.spec("PROG-64")
@pytest.mark.parametrize("api", ["plain", "fully_shard"])
@ranks(2)
def test_a_model_without_a_wrapper_gets_the_results_of_torchs_functions(api: str) -> None:
    model = make() if api == "plain" else checkpoints.sharded(api)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    checkpoints.train(model, optimizer, [0])
    ours, theirs = (module.get_state_dict(model, optimizer) for module in (minifsdp, functions_of_torch))
    assert str(ours) == str(theirs)
    fresh = torch.optim.Adam(model.parameters(), lr=0.01)
    subject.set_state_dict(model, fresh, model_state_dict=ours[0], optim_state_dict=ours[1])
    assert str(fresh.state_dict()) == str(optimizer.state_dict())

"""Functions of ``torch.distributed.checkpoint.state_dict`` with a wrapper, and minifsdp's of the same names."""

from __future__ import annotations

import copy
import inspect
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as helpers
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.stateful import Stateful

import minifsdp
from spec_tests import subject
from spec_tests.checkpoint.checkpoints import flat_or_original, fully_sharded, in_torch, make, quiet, step, wrapped
from spec_tests.checkpoint.refusals import caught_warnings
from spec_tests.harness import ranks
from spec_tests.models.sharding import FLAT_STRATEGIES
from spec_tests.models.values import assert_same, full_values
from spec_tests.subject import ShardingStrategy

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
FUNCTIONS = [name for name in helpers.__all__ if name.startswith(("get_", "set_"))]
FORMS = {
    "sharded": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
}


def frozen_in_part() -> nn.Module:
    model = make()
    model.first.requires_grad_(False)
    return model


@pytest.mark.spec("PROG-97")
@pytest.mark.parametrize("full", [False, True])
@flat_or_original
@ranks(2)
def test_frozen_parameters_are_left_out_of_the_state(keep: bool, full: bool) -> None:
    model = wrapped(frozen_in_part(), use_orig_params=keep)
    expected = [name for name in make().state_dict() if not name.startswith("first.")]
    options = StateDictOptions(full_state_dict=full, ignore_frozen_params=True)
    assert list(subject.get_model_state_dict(model, options=options)) == expected
    assert list(subject.get_state_dict(model, [], options=options)[0]) == expected


@pytest.mark.spec("PROG-98")
@flat_or_original
@ranks(2)
def test_torchs_function_loads_a_wrapper(keep: bool) -> None:
    model, whole = wrapped(make(1), use_orig_params=keep), make().state_dict()
    given = dict(whole) if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    helpers.set_model_state_dict(model, given, options=options)
    assert_same(full_values(model), dict(make().named_parameters()), bitwise=True)
    other, mine = wrapped(make(1), use_orig_params=keep), dict(whole)
    helpers.set_model_state_dict(other, mine, options=StateDictOptions(full_state_dict=True))
    assert_same(full_values(other), dict(make().named_parameters()), bitwise=True)
    assert [name for name in mine if "_fsdp_wrapped_module" in name] == []


@pytest.mark.spec("PROG-98")
@flat_or_original
@ranks(2)
def test_torchs_functions_for_optimizers_are_refused(keep: bool) -> None:
    model = wrapped(make(), use_orig_params=keep)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with quiet():
        saved = subject.get_state_dict(model, optimizer)
    for number in range(2):
        with pytest.raises((AttributeError, RuntimeError), match=rf"rank {dist.get_rank()}: .*from minifsdp"):
            helpers.get_state_dict(model, optimizer)
        with pytest.raises((AttributeError, RuntimeError), match=rf"rank {dist.get_rank()}: .*from minifsdp"):
            helpers.set_state_dict(model, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
        step(model, optimizer, number)


class App(Stateful):
    """The model and the optimizer of torch's recipe for distributed checkpoints."""

    def __init__(self, model: nn.Module, optimizer: Any, options: StateDictOptions) -> None:
        self.model, self.optimizer, self.options = model, optimizer, options

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = subject.get_state_dict(self.model, self.optimizer, options=self.options)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        subject.set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
            options=self.options,
        )


def directory() -> str:
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    return str(box[0])


@ranks(2)
def check_recipe(keep: bool, strategy: ShardingStrategy, form: str) -> None:
    plain, options = make(), {"use_orig_params": keep, "sharding_strategy": strategy}
    model, resumed = wrapped(make(), **options), wrapped(make(1), **options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, model)]
    fresh, path = torch.optim.AdamW(resumed.parameters(), lr=1.0), directory()
    for number in range(2):
        step(plain, optimizers[0], number, all_ranks=True)
        step(model, optimizers[1], number)
    with quiet():
        dcp.save({"app": App(model, optimizers[1], FORMS[form])}, checkpoint_id=path)
        dcp.load({"app": App(resumed, fresh, FORMS[form])}, checkpoint_id=path)
    for number in range(2, 4):
        step(plain, optimizers[0], number, all_ranks=True)
        step(model, optimizers[1], number)
        step(resumed, fresh, number)
    assert_same(full_values(resumed), full_values(model), bitwise=True)
    assert_same(full_values(resumed), dict(plain.named_parameters()))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@flat_or_original
@pytest.mark.spec("PROG-63")
def test_the_recipe_for_distributed_checkpoints_resumes_a_training(
    keep: bool, strategy: ShardingStrategy, form: str
) -> None:
    check_recipe(keep=keep, strategy=strategy, form=form)


@ranks(2)
def check_from_the_first_rank(keep: bool) -> None:
    model, fresh_model, plain = (make() for _ in range(3))
    model, fresh_model = (wrapped(m, use_orig_params=keep) for m in (model, fresh_model))
    optimizer, fresh, oracle = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, fresh_model, plain))
    step(model, optimizer, 0)
    step(plain, oracle, 0, all_ranks=True)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = subject.get_optimizer_state_dict(model, optimizer, options=options)
    expected = helpers.get_optimizer_state_dict(plain, oracle)
    if dist.get_rank():
        assert state == {}
    else:
        assert state["state"].keys() == expected["state"].keys()
        for name, entries in expected["state"].items():
            for key, value in entries.items():
                torch.testing.assert_close(state["state"][name][key], value.cpu())
    given = copy.deepcopy(state)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    subject.set_optimizer_state_dict(fresh_model, fresh, given, options=options)
    again = subject.get_optimizer_state_dict(fresh_model, fresh, options=StateDictOptions(full_state_dict=True))
    for name, entries in state.get("state", {}).items():
        assert all(torch.equal(again["state"][name][key].cpu(), value) for key, value in entries.items())


@flat_or_original
@pytest.mark.spec("PROG-63")
def test_rank_0_gets_the_full_state_of_the_optimizer_and_gives_it_to_all(keep: bool) -> None:
    check_from_the_first_rank(keep=keep)


def compiled(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A wrapped model with a compiled module in the unit of the root, and a compiled, frozen unit."""
    model: Any = make(seed)
    model.first.requires_grad_(False)
    model.head = torch.compile(model.head, backend="eager")
    model = wrapped(model, use_orig_params=True)
    model.module.first = torch.compile(model.first, backend="eager")
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    model_state, optimizer_state = subject.get_state_dict(model, optimizer, options=options)
    found = (model_state | optimizer_state).items()
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in found}


@pytest.mark.parametrize("form", [*FORMS, "from rank 0"])
@pytest.mark.spec("PROG-63", "PROG-92", "PROG-97")
@ranks(2)
def test_names_of_a_compiled_model_are_those_of_the_plain_model(form: str) -> None:
    model, optimizer = compiled()
    step(model, optimizer, 0)
    plain: nn.Module = wrapped(make(1), use_orig_params=True)
    sends = form == "from rank 0"
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True) if sends else FORMS[form]
    with quiet():
        weights, states = subject.get_state_dict(model, optimizer, options=options)
        trained = subject.get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
        assert weights.keys() == make().state_dict().keys()
        assert list(trained) == [name for name in weights if not name.startswith("first.")]
        if sends and dist.get_rank():
            weights, states = {}, {}
        expected = values_of(model, optimizer)
        for other, fresh in ((plain, torch.optim.Adam(plain.parameters())), compiled(seed=1)):
            subject.set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=states, options=options)
            assert values_of(other, fresh) == expected


@pytest.mark.parametrize("keeps_prefix", [False, True])
@pytest.mark.spec("PROG-63")
@ranks(2)
def test_the_state_of_submodules_has_the_names_of_the_model_or_of_the_submodule(keeps_prefix: bool) -> None:
    model: Any = compiled()[0]
    options = StateDictOptions(full_state_dict=True, keep_submodule_prefixes=keeps_prefix)
    for name, part in (("first", model.first), ("head", model.head)):
        with quiet():
            state = subject.get_model_state_dict(model, submodules={part}, options=options)
        expected = make().get_submodule(name).state_dict(prefix=f"{name}." if keeps_prefix else "")
        assert_same(state, expected, bitwise=True)


@flat_or_original
@pytest.mark.spec("PROG-63")
@ranks(2)
def test_a_dict_is_not_changed_when_it_is_loaded(keep: bool) -> None:
    model, state = wrapped(make(), use_orig_params=keep), make(1).state_dict()
    subject.set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
    assert list(state) == list(make().state_dict())
    assert_same(full_values(model), dict(make(1).named_parameters()), bitwise=True)


@pytest.mark.spec("PROG-63")
@ranks(2)
def test_without_an_optimizer_there_is_no_optimizer_state() -> None:
    model = wrapped(make())
    weights, states = subject.get_state_dict(model, ())
    assert states == {}
    subject.set_state_dict(model, (), model_state_dict=weights, optim_state_dict=states)


@pytest.mark.parametrize("name", helpers.__all__)
@pytest.mark.spec("PROG-63", "PROG-108")
def test_signatures_are_those_of_torch(name: str) -> None:
    assert name in minifsdp.__all__
    if name not in FUNCTIONS:
        assert getattr(minifsdp, name) is getattr(helpers, name)
        return
    ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (minifsdp, helpers))
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


# By name of the case, the modules of `make()` whose dicts are given.
SUBMODULES = {"all": ["first", "second", "head"], "nested": ["first.0", "second"], "root": [""], "one": ["second"]}


@pytest.mark.parametrize("parts", SUBMODULES)
@pytest.mark.parametrize("form", ["full", "sharded", "from rank 0"])
@pytest.mark.parametrize("kind", ["flat", "original", "inner", "fully_shard", "plain"])
@pytest.mark.spec("PROG-107")
@ranks(2)
def test_keys_of_a_model_state_may_be_submodules(kind: str, form: str, parts: str) -> None:
    """``inner``: the keys are the wrappers instead of the wrapped modules."""
    model, source = of_kind(kind, 1), of_kind(kind, 0)
    sends = form == "from rank 0"
    options = StateDictOptions(full_state_dict=form != "sharded", strict=False)
    with quiet():
        saved = subject.get_model_state_dict(source, options=options)
    dotted = {name: f"{name}." if name else "" for name in SUBMODULES[parts]}
    given = {
        module_at(model, name, kind): {key.removeprefix(start): v for key, v in saved.items() if key.startswith(start)}
        for name, start in dotted.items()
    }
    if sends:
        options.broadcast_from_rank0 = True
        given = given if dist.get_rank() == 0 else {}
    with caught_warnings() as caught:
        result = subject.set_model_state_dict(model, given, options=options)
    loaded = {name for name in make().state_dict() if name.startswith(tuple(dotted.values()))}
    with quiet():
        found = subject.get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    expected = {name: make(name not in loaded).state_dict()[name] for name in found}
    assert_same(found, expected, bitwise=True)
    assert result.unexpected_keys == []
    ours = [w for w in caught if "the states of submodules" in str(w.message)]
    assert [(w.category, w.filename) for w in ours] == [(FutureWarning, __file__)] * bool(given)


def of_kind(kind: str, seed: int) -> nn.Module:
    if kind == "plain":
        return make(seed)
    return (
        fully_sharded(make(seed)) if kind == "fully_shard" else wrapped(make(seed), use_orig_params=kind == "original")
    )


def module_at(model: Any, name: str, kind: str) -> nn.Module:
    if kind == "inner" and name == "":
        return model
    plain = model if kind in ("plain", "fully_shard") else model.module
    for part in name.split(".") if name else ():
        plain = getattr(getattr(plain, "module", plain) if kind != "inner" else plain, part)
    return plain if kind in ("inner", "plain", "fully_shard") else getattr(plain, "module", plain)


@pytest.mark.spec("PROG-107")
@ranks(2)
def test_the_states_of_modules_are_loaded_as_in_torchs_own_wrapper() -> None:
    """With flat parameters, torch refuses full dicts."""
    for module, make_wrapper in ((minifsdp, wrapped), (helpers, in_torch)):
        model: Any = make_wrapper(make(1), use_orig_params=True)
        given = {inner: make(0).get_submodule(name).state_dict() for name, inner in model.module.named_children()}
        options = StateDictOptions(full_state_dict=True, strict=False)
        with quiet():
            result = module.set_model_state_dict(model, given, options=options)
            found = module.get_model_state_dict(model, options=options)
        expected = {name: make(name == "scale").state_dict()[name] for name in found}
        assert_same(found, expected, bitwise=True)
        assert result.unexpected_keys == []


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = list(model.parameters())
    return [torch.optim.Adam(parameters[:1], lr=0.01), torch.optim.SGD(parameters[1:], lr=0.1, momentum=0.9)]


@ranks(2)
def check_several(keep: bool, form: str) -> None:
    model, resumed = wrapped(make(), use_orig_params=keep), wrapped(make(1), use_orig_params=keep)
    optimizers, fresh = two_optimizers(model), two_optimizers(resumed)
    for one in optimizers:
        step(model, one, 0)
    with quiet():
        saved = subject.get_state_dict(model, optimizers, options=FORMS[form])
        subject.set_state_dict(
            resumed, fresh, model_state_dict=saved[0], optim_state_dict=saved[1], options=FORMS[form]
        )
    for number in (1, 2):
        for one, other in zip(optimizers, fresh, strict=True):
            step(model, one, number)
            step(resumed, other, number)
    assert_same(full_values(resumed), full_values(model), bitwise=True)


@pytest.mark.parametrize("form", FORMS)
@flat_or_original
@pytest.mark.spec("PROG-64")
def test_several_optimizers_share_one_dict(keep: bool, form: str) -> None:
    check_several(keep=keep, form=form)


@pytest.mark.spec("PROG-64")
@ranks(2)
def test_a_model_without_a_wrapper_gets_the_results_of_torchs_functions() -> None:
    for model in (make(), subject.fully_shard(make())):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        step(model, optimizer, 0)
        ours, theirs = (module.get_state_dict(model, optimizer) for module in (minifsdp, helpers))
        assert str(ours) == str(theirs)
        fresh = torch.optim.Adam(model.parameters(), lr=0.01)
        subject.set_state_dict(model, fresh, model_state_dict=ours[0], optim_state_dict=ours[1])
        assert str(fresh.state_dict()) == str(optimizer.state_dict())

"""Several modules in one unit: ``fully_shard([first, second])``."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from spec_tests.harness import ranks
from spec_tests.models import apis, gradients, running, values
from spec_tests.models.modules import seeded
from spec_tests.subject import FSDPModule, MixedPrecisionPolicy, fully_shard, trace


@pytest.mark.spec("NEW-04")
@ranks(2)
def test_fully_shard_of_a_list_returns_fsdp_modules_that_are_unsharded_together() -> None:
    model = seeded()
    modules = [model.enter, model.leave]
    assert fully_shard(modules) == modules
    assert [type(module).__name__ for module in modules] == ["FSDPLinear", "FSDPLinear"]
    assert all(isinstance(module, FSDPModule) for module in modules)

    def are_sharded() -> set[bool]:
        return {isinstance(parameter.data, DTensor) for module in modules for parameter in module.parameters()}

    assert are_sharded() == {True}
    model.enter.unshard()
    assert are_sharded() == {False}
    model.leave.reshard()
    assert are_sharded() == {True}


def with_ends_together(reshard_after_forward: bool | None) -> Any:
    """Each block is a unit, and the first and last layer together form another; the root has no other parameters."""
    model = seeded()
    for modules in (*model.blocks, [model.enter, model.leave], model):
        fully_shard(modules, reshard_after_forward=reshard_after_forward)
    return model


@pytest.mark.spec("NEW-04")
@ranks(2)
def test_group_is_unsharded_from_first_to_last_module() -> None:
    model = with_ends_together(reshard_after_forward=True)
    for step in range(2):
        events = running.recorded_iteration(model, step).replace("enter, leave", "E")
        forward, backward = (part.split() for part in events.split(" | "))
        assert (forward[:2], forward[-1]) == (["AGE", "FE"], "FREEE")
        assert forward.count("AGE") == forward.count("FREEE") == 1
        assert backward[:2] == ["BE", "AGE"]
        assert backward.count("AGE") == backward.count("FREEE") == backward.count("RSE") == 1


@pytest.mark.spec("NEW-04")
@pytest.mark.parametrize("reshards", [True, False])
@ranks(2)
def test_a_group_over_several_modules_trains_like_each_on_its_own(reshards: bool) -> None:
    gradients.assert_mean_gradients(with_ends_together(reshard_after_forward=reshards), seeded())


class KeepsItsResult(nn.Module):
    """Only an attribute has the result that the loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.inner(x).square()
        return x


@pytest.mark.spec("NEW-04", "PROG-27")
@ranks(2)
def test_a_loss_may_read_only_an_attribute_of_the_second_module_of_a_list() -> None:
    def loss(net: Any, x: Tensor) -> Tensor:
        net(x)
        return net[1].kept.mean()

    plain, model = (seeded(lambda: nn.Sequential(nn.Linear(6, 6), KeepsItsResult())) for _ in range(2))
    fully_shard([model[0], model[1]])
    fully_shard(model)
    gradients.assert_mean_gradients(model, plain, loss=loss)


@pytest.mark.spec("NEW-04", "FS2-24")
@ranks(2)
def test_a_parameter_may_be_tied_across_the_modules_of_a_list() -> None:
    plain, model = seeded(), seeded()
    for each in (plain, model):
        each.blocks[3].linear.weight = each.enter.weight
    for modules in (*model.blocks[:3], [model.enter, model.blocks[3]], model):
        fully_shard(modules)
    gradients.assert_mean_gradients(model, plain)
    assert model.enter.weight is model.blocks[3].linear.weight


@pytest.mark.spec("NEW-04", "FS2-MP-05", "FS2-MP-06")
@ranks(2)
def test_each_module_of_the_list_casts_its_own_inputs_and_outputs() -> None:
    model, seen = seeded(), {}
    for name in ("enter", "blocks.0", "leave"):
        model.get_submodule(name).register_forward_hook(
            lambda module, inputs, output, name=name: seen.update({name: inputs[0].dtype})
        )
    fully_shard(
        [model.enter, model.leave], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    )
    fully_shard(model)
    assert model(running.batch()).dtype == torch.float32
    assert seen == {"enter": torch.bfloat16, "blocks.0": torch.float32, "leave": torch.bfloat16}


@pytest.mark.spec("NEW-04")
@ranks(2)
def test_an_empty_list_and_a_list_of_nested_modules_are_refused() -> None:
    model = seeded()
    for error in (ValueError, IndexError):  # torch raises `IndexError`
        with pytest.raises(error, match="empty"):
            fully_shard([])
    with pytest.raises(ValueError, match="submodule of another module"):
        fully_shard([model, model.enter])


# --- modules of one unit that the program calls or converts on their own ---


class Head(nn.Module):
    """A body, and a head that the caller applies to one sample at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.body(x)))


def with_head_together(shard: Any = fully_shard, model: nn.Module | None = None) -> Any:
    model = seeded(Head) if model is None else model
    shard(model.body)
    shard([model.norm, model.head])
    return shard(model)


def headed_loss(model: Any, x: Tensor) -> Tensor:
    """A loss of all parameters, with each module in its own dtype."""
    return model.head(model(x.to(model.body.weight.dtype)).to(model.head.weight.dtype)).square().mean()


@pytest.mark.spec("FS2-28", "FS2-META-02", "NEW-04")
@ranks(2)
def test_a_group_from_the_meta_device_is_given_memory_module_by_module() -> None:
    with torch.device("meta"):
        plain = Head()
    model = with_head_together(model=plain)
    model.to_empty(device=running.batch().device)
    initial = values.named(seeded(Head))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(distribute_tensor(initial[name], parameter.device_mesh, parameter.placements))
    gradients.assert_mean_gradients(model, seeded(Head), loss=headed_loss)


@pytest.mark.spec("FS2-28", "FS2-META-03")
@ranks(2)
def test_half_a_group_on_the_meta_device_is_refused_when_it_is_used() -> None:
    with torch.device("meta"):
        plain = Head()
    model = with_head_together(model=plain)
    model.body.to_empty(device=running.batch().device)
    model.norm.to_empty(device=running.batch().device)
    # The message uses the parameter's name in the root module.
    outer = fully_shard(nn.Sequential(model))
    with pytest.raises(RuntimeError, match=r"on different devices: .*0\.[\w.]*weight \(meta\)"):
        outer(running.batch())


@pytest.mark.spec("FS2-28", "NEW-04")
@pytest.mark.parametrize("has_run", [False, True])
@ranks(2)
def test_converted_group_trains_like_torch(has_run: bool) -> None:
    ours, theirs = with_head_together(), with_head_together(torch_fully_shard)
    if has_run:
        # After this forward, torch's all-gathers would fail.
        ours(running.batch())
    for model in (ours, theirs):
        model.to(torch.bfloat16)
    loss, expected = headed_loss(ours, running.batch()), headed_loss(theirs, running.batch())
    assert torch.equal(loss, expected)
    assert loss.dtype == torch.bfloat16
    loss.backward()
    expected.backward()
    values.assert_same(apis.FULLY_SHARD.gradients(ours), apis.FULLY_SHARD.gradients(theirs), bitwise=True)
    values.assert_same(apis.FULLY_SHARD.values(ours), apis.FULLY_SHARD.values(theirs), bitwise=True)


@pytest.mark.spec("FS2-28", "NEW-04")
@ranks(2)
def test_one_module_of_a_group_may_be_converted_alone() -> None:
    plain, model = seeded(Head), with_head_together()
    headed_loss(model, running.batch()).backward()
    model.zero_grad()
    for each in (plain, model):
        each.head.to(torch.bfloat16)
    optimizer, reference = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    for step in range(2):
        headed_loss(model, running.batch(step)).backward()
        found, expected = apis.FULLY_SHARD.gradients(model), gradients.mean_gradients_of(headed_loss, plain, step)
        assert (found["norm.weight"].dtype, found["head.weight"].dtype) == (torch.float32, torch.bfloat16)
        # The ranks are added in another dtype: two roundings of bfloat16, which has 8 bits.
        torch.testing.assert_close(found, expected, rtol=2 * 2**-8, atol=1e-4)
        optimizer.step()
        optimizer.zero_grad()
        gradients.step_with(found, plain, reference)
        values.assert_same(apis.FULLY_SHARD.values(model), values.named(plain), bitwise=True)


class TwoBranches(nn.Module):
    """Calls its branches by name. ``read`` uses the weight of the right one without a call."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.end = nn.Linear(8, 8), nn.Linear(8, 8)
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, branches: str) -> Tensor:
        x = self.start(x)
        for name in branches.split():
            x = x @ self.right.weight if name == "read" else torch.tanh(getattr(self, name)(x))
        return self.end(x)


def with_branches_together() -> tuple[TwoBranches, Any]:
    plain, model = seeded(TwoBranches), seeded(TwoBranches)
    fully_shard([model.left, model.right])
    return plain, fully_shard(model)


@pytest.mark.spec("NEW-04", "PROG-87")
@pytest.mark.parametrize("trains", [True, False])
@ranks(2)
def test_a_unit_is_resharded_if_only_some_of_its_modules_are_called(trains: bool) -> None:
    plain, model = with_branches_together()

    def loss(net: Any, branches: str) -> Tensor:
        output = net(running.batch(0, 0, width=8), branches)
        for module in (model.left, model.right):
            assert isinstance(module.weight, DTensor), f"unsharded after a forward through {branches}"
        return output.square().mean()

    for branches in ("left", "right", "left right", "left", "left read"):
        if trains:
            gradients.assert_learns_alike(plain, model, functools.partial(loss, branches=branches))
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        else:
            with torch.no_grad():
                torch.testing.assert_close(loss(model, branches), loss(plain, branches))


@pytest.mark.spec("PROG-87", "NEW-04")
@ranks(2)
def test_a_failed_call_of_one_module_does_not_affect_a_root_that_is_created_later() -> None:
    plain, model = seeded(TwoBranches), seeded(TwoBranches)
    fully_shard([model.left, model.right])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.left(running.batch(width=7))
    fully_shard(model)
    x = running.batch(0, 0, width=8)
    for _ in range(2):
        torch.testing.assert_close(model(x, "left right"), plain(x, "left right"))


@pytest.mark.spec("PROG-87", "NEW-15")
@pytest.mark.parametrize("evaluates", [False, True])
@ranks(2)
def test_a_forward_that_fails_between_modules_of_a_unit_does_not_affect_the_next_one(evaluates: bool) -> None:
    plain, model = with_branches_together()
    x = running.batch(0, 0, width=8)
    with pytest.raises(AttributeError, match="missing"):
        model(x, "left missing")
    with torch.set_grad_enabled(not evaluates):
        torch.testing.assert_close(model(x, "left right"), plain(x, "left right"))
    with trace.record() as recorder:
        model(x, "").square().mean().backward()
    # An evaluation of the unit does not await a backward.
    assert ("AG left, right" in recorder.order("AG")) is not evaluates


class Distilled(nn.Module):
    """The teacher, which runs last of its unit, computes without grad mode."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher, self.head = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.student(x)
        with torch.no_grad():
            target = self.teacher(x)
        return self.head(y - target)


@pytest.mark.spec("NEW-04", "FS2-PREF-02")
@ranks(2)
def test_a_unit_is_prefetched_in_backward_if_its_last_module_ran_without_grad_mode() -> None:
    model = seeded(Distilled)
    for modules in ([model.student, model.teacher], model.head, model):
        fully_shard(modules)
    output = model(running.batch(0, 0, width=8))
    with trace.record() as recorder:
        output.sum().backward()
    both = "student, teacher"
    assert recorder.order("AG", "RS") == ["AG head", f"AG {both}", "RS head", f"RS {both}"]

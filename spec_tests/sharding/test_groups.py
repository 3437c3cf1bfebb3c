"""Groups of parameters that are all-gathered together, and the number of ranks that they are resharded to."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from spec_tests.harness import device, plain_tensor, ranks
from spec_tests.models.gradients import assert_mean_gradients, mean_gradients_of, step_with
from spec_tests.models.modules import Stack, seeded, wide
from spec_tests.models.running import batch, iterate, loss_of, recorded_iteration, said
from spec_tests.models.sharding import column_mesh, sharded
from spec_tests.models.values import assert_same, full_gradients, full_values, named
from spec_tests.subject import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard, trace

# --- several modules, one group ---


def with_ends_together(**options: Any) -> Any:
    """Each block is a unit, and the first and last layer together form another; the root has no other parameters."""
    model = seeded()
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard([model.enter, model.leave], **options)
    return fully_shard(model, **options)


ENDS = "enter, leave"


@pytest.mark.spec("NEW-04")
@ranks(2)
def test_fully_shard_of_a_list_returns_fsdp_modules_that_are_unsharded_together() -> None:
    model = seeded()
    modules = [model.enter, model.leave]
    assert fully_shard(modules) == modules
    assert [type(module).__name__ for module in modules] == ["FSDPLinear", "FSDPLinear"]
    assert all(isinstance(module, FSDPModule) for module in modules)

    def types() -> set[type]:
        return {type(parameter.data) for module in modules for parameter in module.parameters()}

    assert types() == {DTensor}
    model.enter.unshard()
    assert types() == {plain_tensor()}
    model.leave.reshard()
    assert types() == {DTensor}


@pytest.mark.spec("NEW-04")
@ranks(2)
def test_group_is_unsharded_from_first_to_last_module() -> None:
    model = with_ends_together(reshard_after_forward=True)
    for step in range(2):
        with trace.record() as recorder:
            loss = loss_of(model(batch(step)))
        words = said(recorder.events).replace(ENDS, "E").split()
        assert words[:2] == ["AGE", "FE"]
        assert words[-1] == "FREEE"
        assert words.count("AGE") == words.count("FREEE") == 1
        with trace.record() as recorder:
            loss.backward()
        words = said(recorder.events).replace(ENDS, "E").split()
        assert words[:2] == ["BE", "AGE"]
        assert words.count("AGE") == words.count("FREEE") == words.count("RSE") == 1


@pytest.mark.spec("NEW-04")
@ranks(2)
def test_a_group_over_several_modules_trains_like_each_on_its_own() -> None:
    for choice in (None, True, False):
        assert_mean_gradients(with_ends_together(reshard_after_forward=choice), seeded())


class KeepsItsResult(nn.Module):
    """The second module of a list. Only an attribute has the result that the loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.inner(x).square()
        return x


@pytest.mark.spec("NEW-04", "PROG-27")
@ranks(2)
def test_a_loss_may_read_only_an_attribute_of_the_second_module_of_a_list() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), KeepsItsResult())
    model = copy.deepcopy(plain)
    fully_shard([model[0], model[1]])
    fully_shard(model)
    x = torch.ones(2, 4)
    for step in range(2):
        for one in (plain, model):
            one.zero_grad()
            one(x)
            one[1].kept.mean().backward()
        for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(parameter.grad.full_tensor(), expected.grad), f"step {step}"


@pytest.mark.spec("NEW-04", "FS2-24")
@ranks(2)
def test_a_parameter_may_be_tied_across_the_modules_of_a_list() -> None:
    def tied() -> nn.Module:
        model = seeded()
        model.blocks[3].linear.weight = model.enter.weight
        return model

    model = tied()
    for block in model.blocks[:3]:
        fully_shard(block)
    fully_shard([model.enter, model.blocks[3]])
    fully_shard(model)
    assert model.enter.weight is model.blocks[3].linear.weight
    for step in range(2):
        assert_mean_gradients(model, tied(), [step])
        assert model.enter.weight is model.blocks[3].linear.weight


@pytest.mark.spec("NEW-04", "FS2-MP-05", "FS2-MP-06")
@ranks(2)
def test_each_module_of_the_list_casts_its_own_inputs_and_outputs() -> None:
    model = seeded()
    seen = {}
    for name in ("enter", "leave"):
        model.get_submodule(name).register_forward_hook(
            lambda module, inputs, output, name=name: seen.update({name: (inputs[0].dtype, output.dtype)})
        )
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    fully_shard([model.enter, model.leave], mp_policy=policy)
    fully_shard(model)
    after = {}
    model.blocks[0].register_forward_pre_hook(lambda module, inputs: after.update(blocks=inputs[0].dtype))
    assert model(batch()).dtype == torch.float32
    assert seen["enter"][0] == seen["leave"][0] == torch.bfloat16
    assert after["blocks"] == torch.float32


class Head(nn.Module):
    """A body, and a head that the caller applies to one sample at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.body(x)))


@pytest.mark.spec("NEW-04")
@ranks(2)
def test_forward_runs_some_modules_before_the_others() -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        return sum(loss_of(model.head(sample)) for sample in model(x).split(1))

    assert_mean_gradients(with_head_together(), seeded(Head), loss=loss, bitwise=False)


@pytest.mark.spec("NEW-04")
@ranks(2)
def test_an_empty_list_and_a_list_of_nested_modules_are_refused() -> None:
    model = seeded()
    for error in (ValueError, IndexError):  # torch raises `IndexError`
        with pytest.raises(error, match="empty"):
            fully_shard([])
    with pytest.raises(ValueError, match=r"list|inside|nested|single"):
        fully_shard([model, model.enter])
        model(batch())


# --- several modules of one group, converted one after the other ---


def with_head_together(shard: Any = fully_shard, model: nn.Module | None = None) -> Any:
    model = seeded(Head) if model is None else model
    shard(model.body)
    shard([model.norm, model.head])
    return shard(model)


def headed_loss(model: Any, x: Tensor) -> Tensor:
    """A loss of all parameters, with each module in its own dtype."""
    return loss_of(model.head(model(x.to(model.body.weight.dtype)).to(model.head.weight.dtype)))


@pytest.mark.spec("FS2-28", "FS2-META-02", "NEW-04")
@ranks(2)
def test_a_group_from_the_meta_device_is_given_memory_module_by_module() -> None:
    with torch.device("meta"):
        plain = Head()
    model = with_head_together(model=plain)
    model.to_empty(device=device())
    values = dict(seeded(Head).named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(distribute_tensor(values[name], parameter.device_mesh, parameter.placements))
    assert_mean_gradients(model, seeded(Head), loss=headed_loss)


@pytest.mark.spec("FS2-28", "NEW-04")
@pytest.mark.parametrize("has_run", [False, True])
@ranks(2)
def test_converted_group_trains_like_torch(has_run: bool) -> None:
    found = []
    for shard in (torch_fully_shard, fully_shard):
        model = with_head_together(shard)
        if has_run and shard is fully_shard:
            # After this forward, torch's all-gathers would fail.
            model(batch())
        model.to(torch.bfloat16)
        loss = headed_loss(model, batch())
        loss.backward()
        found.append((loss, full_gradients(model), full_values(model)))
    (loss, gradients, values), (expected, *others) = found
    assert loss.dtype == torch.bfloat16
    assert torch.equal(loss, expected)
    for ours, theirs in zip((gradients, values), others, strict=True):
        assert {tensor.dtype for tensor in ours.values()} == {torch.bfloat16}
        assert_same(ours, theirs, bitwise=True)


@pytest.mark.spec("FS2-28", "NEW-04")
@pytest.mark.parametrize("has_run", [False, True])
@ranks(2)
def test_one_module_of_a_group_may_be_converted_alone(has_run: bool) -> None:
    plain, model = seeded(Head), with_head_together()
    if has_run:
        headed_loss(model, batch()).backward()
        model.zero_grad()
    for either in (plain, model):
        either.head.to(torch.bfloat16)
    if not has_run:
        model.norm.unshard()
        assert (model.norm.weight.dtype, model.head.weight.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(model.head.weight, plain.head.weight)
        model.norm.reshard()
    optimizer, reference = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    for step in range(2):
        headed_loss(model, batch(step)).backward()
        found, expected = full_gradients(model), mean_gradients_of(headed_loss, plain, step)
        assert found["norm.weight"].dtype == torch.float32
        assert found["head.weight"].dtype == torch.bfloat16
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=0.02, atol=1e-3)
        optimizer.step()
        optimizer.zero_grad()
        step_with(found, plain, reference)
        assert_same(full_values(model), named(plain), bitwise=True)


@pytest.mark.spec("FS2-28", "FS2-META-03")
@ranks(2)
def test_half_a_group_on_the_meta_device_is_refused_when_it_is_used() -> None:
    with torch.device("meta"):
        plain = Head()
    model = with_head_together(model=plain)
    model.body.to_empty(device=device())
    model.norm.to_empty(device=device())
    with pytest.raises(RuntimeError, match=r"on different devices: .*weight \(meta\)"):
        model(batch())
    # The message uses the parameter's name in the root module.
    outer = fully_shard(nn.Sequential(model))
    with pytest.raises(RuntimeError, match=r"on different devices: .*0\.[\w.]*weight \(meta\)"):
        outer(batch())


# --- an integer ---


@pytest.mark.spec("NEW-05")
@ranks(4)
def test_backward_all_gathers_among_local_peers() -> None:
    model = sharded(reshard_after_forward=2)
    shapes = [p.to_local().shape for p in model.parameters()]
    rank = dist.get_rank()
    all_ranks, neighbours = (0, 1, 2, 3), ((0, 1), (2, 3))[rank // 2]
    for step in range(3):
        with trace.record() as forward:
            loss = loss_of(model(batch(step)))
        with trace.record() as backward:
            loss.backward()
        assert {event.ranks for event in forward.events if event.kind == "AG"} == {all_ranks}
        assert {event.ranks for event in backward.events if event.kind == "AG"} == {neighbours}
        assert forward.count("AG") == backward.count("AG") == 5
        assert {event.ranks for event in backward.events if event.kind == "RS"} == {all_ranks}
        # After backward, each rank has its own shards again.
        assert [p.to_local().shape for p in model.parameters()] == shapes
        assert [p.grad.to_local().shape for p in model.parameters()] == shapes


@pytest.mark.spec("NEW-05")
@ranks(4)
def test_reshard_to_a_smaller_mesh_changes_no_result() -> None:
    for build in (seeded, wide):
        model, usual = sharded(build(), reshard_after_forward=2), sharded(build())
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, usual)]
        for step in range(3):
            assert iterate(model, step) == iterate(usual, step)
            assert_same(full_gradients(model), full_gradients(usual), bitwise=True)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_same(full_values(model), full_values(usual), bitwise=True)


@pytest.mark.spec("NEW-05", "WIRE-10")
@ranks(4)
def test_a_parameter_that_only_the_smaller_mesh_sends_on_its_own_is_all_gathered_by_both() -> None:
    """Between CPUs, the size of a shard decides how it is sent, and half of this parameter is more than a quarter."""
    plain = seeded(lambda: nn.Sequential(nn.Linear(512, 384, bias=False), nn.Linear(384, 2)))
    model: Any = copy.deepcopy(plain)
    for layer in model:
        fully_shard(layer, reshard_after_forward=2)
    fully_shard(model)
    for step in range(2):
        for net in (model, plain):
            net(batch(step, 0, width=512)).square().mean().backward()
    assert_same(full_gradients(model), {name: p.grad for name, p in plain.named_parameters()}, bitwise=False)


@pytest.mark.spec("NEW-05")
@ranks(4)
def test_manual_reshard_returns_to_full_group() -> None:
    model = sharded(reshard_after_forward=2)
    loss = loss_of(model(batch()))
    model.blocks[2].reshard()
    model.blocks[3].reshard()
    with trace.record() as recorder:
        loss.backward()
    members = {event.unit: event.ranks for event in recorder.events if event.kind == "AG"}
    assert members["blocks.2"] == members["blocks.3"] == (0, 1, 2, 3)
    assert members["blocks.1"] == ((0, 1), (2, 3))[dist.get_rank() // 2]


@pytest.mark.spec("NEW-05")
@pytest.mark.parametrize("rows", [8, 6, 5, 1])
@pytest.mark.parametrize("dim", [0, 1])
@ranks(4)
def test_modules_show_local_peer_shards_after_forward(rows: int, dim: int) -> None:
    def build() -> nn.Module:
        return nn.Linear(8, rows, bias=False)

    model, whole = seeded(build), seeded(build).weight.detach()
    fully_shard(model, reshard_after_forward=2, shard_placement_fn=lambda _: Shard(dim))
    owned, second = model.weight, dist.get_rank() % 2
    loss = loss_of(model(batch()[:, :1].expand(-1, 8)))
    shown = model.weight
    assert shown is not owned and isinstance(shown, nn.Parameter) and shown.shape == whole.shape
    assert shown.placements == (Replicate(), Shard(dim))
    assert shown.device_mesh.mesh.tolist() == [[0, 1], [2, 3]]
    local_shards = whole.chunk(2, dim)
    assert torch.equal(shown.to_local(), local_shards[second] if second < len(local_shards) else whole[:0])
    assert torch.equal(shown.full_tensor(), whole)
    assert torch.equal(model.state_dict()["weight"].to_local(), owned.to_local())
    assert model.weight is owned
    loss.backward()
    assert model.weight is owned and owned.grad.to_local().shape == owned.to_local().shape


@pytest.mark.spec("NEW-05")
@ranks(4)
def test_a_frozen_parameter_stays_frozen_on_the_smaller_mesh() -> None:
    model = seeded(lambda: nn.Linear(8, 8))
    model.bias.requires_grad_(False)
    fully_shard(model, reshard_after_forward=2)
    model(batch()[:, :1].expand(-1, 8))
    assert model.bias.placements == (Replicate(), Shard(0))
    assert [parameter.requires_grad for parameter in model.parameters()] == [True, False]


@pytest.mark.spec("NEW-05")
@pytest.mark.parametrize("records", [False, True])
@ranks(4)
def test_smaller_mesh_unit_computes_correctly_after_a_change_of_values(records: bool) -> None:
    model, plain = sharded(reshard_after_forward=2), seeded()
    owned = list(model.parameters())
    for factor in (1.0, 2.0):
        with torch.set_grad_enabled(records):
            model(batch())
        with torch.no_grad():
            for parameter in (*owned, *plain.parameters()):
                parameter.mul_(factor)
        with torch.set_grad_enabled(records):
            torch.testing.assert_close(model(batch()), plain(batch()))
        assert_mean_gradients(model, plain, [0])


@pytest.mark.spec("NEW-05", "NEW-06")
@pytest.mark.parametrize(("choice", "members"), [(True, {(0, 1, 2, 3)}), (False, set())])
@ranks(4)
def test_switched_reshard_after_forward_selects_all_gather_ranks_and_keeps_results(choice: bool, members: Any) -> None:
    model, usual = sharded(reshard_after_forward=2), sharded()
    for step in range(3):
        losses = [loss_of(each(batch(step))) for each in (model, usual)]
        if step == 0:
            # Between forward and backward, while units are resharded over fewer ranks.
            model.set_reshard_after_forward(choice)
        with trace.record() as backward:
            losses[0].backward()
        losses[1].backward()
        gathers = {event.ranks for event in backward.events if event.kind == "AG"}
        assert step == 0 or gathers == members
        for each in (model, usual):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()
    assert_same(full_values(model), full_values(usual), bitwise=True)


@pytest.mark.spec("NEW-05")
@ranks(4)
def test_reshard_by_hand_in_forward_reads_the_shards_of_all_ranks_again() -> None:
    model = sharded(reshard_after_forward=2)
    for block in model.blocks:
        block.register_forward_hook(lambda module, *_: module.reshard())
    loss = loss_of(model(batch()))
    with trace.record() as backward:
        loss.backward()
    gathers = {event.ranks for event in backward.events if event.kind == "AG" and event.unit.startswith("blocks")}
    assert gathers == {(0, 1, 2, 3)}


@pytest.mark.spec("NEW-05", "FS2-28")
@ranks(4)
def test_a_forward_after_parameters_were_replaced_on_a_smaller_mesh_reads_the_new_values() -> None:
    layer = fully_shard(nn.Linear(4, 4, bias=False, device=device()), reshard_after_forward=2)
    model: Any = fully_shard(nn.Sequential(layer))
    model(torch.ones(1, 4, device=device()))
    (optimized,) = fully_shard.state(layer).unit.layout.local_parameters
    optimized.to_local().data.fill_(1.0)
    layer.weight = nn.Parameter(optimized.data)
    assert model(torch.ones(1, 4, device=device())).tolist() == [[4.0] * 4]


@pytest.mark.spec("NEW-05", "NEW-06")
@pytest.mark.parametrize("in_between", ["reshard", "switch"])
@ranks(4)
def test_pending_unshard_on_smaller_mesh_is_correct_after_a_change_of_settings(in_between: str) -> None:
    model, usual = sharded(reshard_after_forward=2), sharded()
    losses = [loss_of(each(batch())) for each in (model, usual)]
    for block in model.blocks:
        handle = block.unshard(async_op=True)
        if in_between == "reshard":
            block.reshard()
        else:
            block.set_reshard_after_forward(True)
            handle.wait()
    for loss in losses:
        loss.backward()
    assert_same(full_gradients(model), full_gradients(usual), bitwise=True)


@pytest.mark.spec("NEW-05")
@pytest.mark.parametrize("number", [0, 3, -2, 8])
@ranks(4)
def test_a_number_that_does_not_divide_the_ranks_is_refused(number: int) -> None:
    model = seeded()
    with pytest.raises(ValueError, match=str(number)):
        fully_shard(model, reshard_after_forward=number)
    # Nothing has changed, so a right number works.
    iterate(fully_shard(model, reshard_after_forward=2))


@pytest.mark.spec("NEW-05")
@pytest.mark.parametrize("number", [0, 2, -1])
@ranks(2)
def test_unsharded_mesh_accepts_only_reshard_to_one(number: int) -> None:
    with pytest.raises(ValueError, match=rf"reshard_after_forward={number} is not a factor of 1\b"):
        fully_shard(seeded(), mesh=column_mesh(), reshard_after_forward=number)
    iterate(fully_shard(seeded(), mesh=column_mesh(), reshard_after_forward=1))


@pytest.mark.spec("NEW-05")
@pytest.mark.parametrize(("number", "choice"), [(1, False), (2, True)])
@ranks(2)
def test_reshard_to_one_keeps_and_to_all_reshards(number: int, choice: bool) -> None:
    ours, expected = (sharded(reshard_after_forward=value) for value in (number, choice))
    assert recorded_iteration(ours) == recorded_iteration(expected)


def eight_ranks() -> DeviceMesh:
    return init_device_mesh(device().type, (2, 4), mesh_dim_names=("replicate", "shard"))


@pytest.mark.spec("NEW-05", "FS2-18")
@pytest.mark.parametrize("option", ["none", "bfloat16", "on the CPU", "columns", "accumulation"])
@ranks(8)
def test_with_replicas_a_number_reshards_each_replica_among_neighbours(option: str) -> None:
    options: dict[str, dict[str, Any]] = {
        "bfloat16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        "on the CPU": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "columns": {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 and p.shape[1] % 4 == 0 else None},
    }
    chosen, mesh = options.get(option, {}), eight_ranks()
    model, usual = (sharded(seeded(lambda: Stack(8)), mesh=mesh, reshard_after_forward=n, **chosen) for n in (2, True))
    pair = dist.get_rank() // 2
    for step in range(2):
        for either in (model, usual):
            either.set_requires_gradient_sync(option != "accumulation" or step == 1)
        losses = [loss_of(each(batch(step, width=8))) for each in (model, usual)]
        with trace.record() as backward:
            losses[0].backward()
        losses[1].backward()
        assert {event.ranks for event in backward.events if event.kind == "AG"} == {(2 * pair, 2 * pair + 1)}
    assert_same(full_gradients(model), full_gradients(usual), bitwise=True)
    assert full_gradients(model).keys() == dict(seeded(lambda: Stack(8)).named_parameters()).keys()


@pytest.mark.spec("NEW-05", "FS2-18")
@ranks(8)
def test_with_replicas_the_smaller_mesh_has_one_row_for_each_pair_of_neighbours() -> None:
    layer = fully_shard(nn.Linear(8, 8, device=device()), mesh=eight_ranks(), reshard_after_forward=2)
    layer(batch(width=8))
    assert layer.weight.device_mesh.mesh.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layer.weight.placements == (Replicate(), Shard(0))

"""Programs whose ranks do different amounts of work, but issue the same collectives.

Spec: HEALTHY-02, HEALTHY-03.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms import Join
from torch.nn.parallel import DistributedDataParallel

from spec_tests.healthy.programs.support import (
    FSDP,
    WIDTH,
    Net,
    Strategy,
    Training,
    assert_same,
    batch,
    full_parameters,
    fully_shard,
    mesh_of,
    num_sent,
    package,
    rank,
    shard,
    wrap,
)


def alone() -> object:
    """A process group that contains only this rank."""
    return [dist.new_group([other]) for other in range(dist.get_world_size())][rank()]


def _accumulate(training: Training, counts: list[int], step: int) -> None:
    """Runs the backwards of a step in which each rank has its own number of micro-batches."""
    for micro in range(counts[rank()]):
        with training.syncs(micro, counts[rank()]):
            training.loss(10 * step + micro).backward()
    for of_rank, count in enumerate(counts):
        for micro in range(count):
            training.plain_loss(of_rank, 10 * step + micro).backward()


def micro_batches_while_unsharded(api: str) -> None:
    """Ranks accumulate 3 and 2 micro-batches; parameters are all-gathered once and gradients reduced once."""
    training = Training(api, keep=True)
    counts = [3, 2]
    for step in range(2):
        _accumulate(training, counts, step)
        training.update()
    training.check()


def one_micro_batch_and_many(api: str) -> None:
    """Rank 0 has one micro-batch in a step, rank 1 has five, and in the next step it is the other way around."""
    training = Training(api, keep=True)
    training.step(99)
    for step in range(2):
        counts = [1, 5] if step == 0 else [5, 1]
        _accumulate(training, counts, step)
        training.update()
    training.check()


def replicas_with_unequal_micro_batches(api: str) -> None:
    """Replicas reduce within each replica, and all-reduce only in their last of 3 and 2 micro-batches."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    training = Training(api, mesh=mesh)
    replica = mesh.get_local_rank("replicate")
    counts = [3, 2]
    for step in range(2):
        for micro in range(counts[replica]):
            training.model.set_requires_all_reduce(micro == counts[replica] - 1)
            training.loss(10 * step + micro).backward()
        for of_rank in range(4):
            for micro in range(counts[of_rank // 2]):
                training.plain_loss(of_rank, 10 * step + micro).backward()
        training.update()
    training.check()


def evaluation_while_unsharded(api: str) -> None:
    """Parameters stay unsharded after forward, so only the first of 5 and 3 evaluation batches communicates."""
    training = Training(api, keep=True)
    for step in range(2):
        training.step(step)
        with torch.no_grad():
            for number in range(5 if rank() == 0 else 3):
                training.model(batch(rank(), number))
    training.step(2)
    training.check()


def evaluation_before_training(api: str) -> None:
    """A rank evaluates more batches than the other before the first step, in evaluation mode."""
    training = Training(api, keep=True)
    training.model.eval()
    with torch.no_grad():
        for number in range(2 + 3 * rank()):
            training.model(batch(rank(), number))
    training.model.train()
    for step in range(2):
        training.step(step)
    training.check()


def evaluation_with_other_batch_sizes(api: str) -> None:
    """All ranks evaluate, with batches of different sizes, between two steps."""
    training = Training(api)
    for step in range(2):
        training.step(step, lambda of_rank: 2 + 5 * of_rank)
        with torch.no_grad():
            training.model(batch(rank(), 7, rows=1 + 30 * rank()))
    training.check()


class Generator(Net):
    """A network that extends its output by one row in each call."""

    def generate(self, x: Tensor, length: int) -> Tensor:
        while len(x) < length:
            x = torch.cat([x, self.forward(x)[-1:]])
        return x


def generate_of_different_lengths(api: str) -> None:
    """Ranks generate sequences of different lengths while all parameters are unsharded."""
    torch.manual_seed(0)
    net = Generator(0)
    training = Training(api, net)
    training.step(0)
    length = 6 + 5 * rank()
    expected = training.plain.generate(batch(rank(), 1), length)
    if api == "wrapper":
        with torch.no_grad(), FSDP.summon_full_params(training.model, writeback=False):
            generated = training.model.module.generate(batch(rank(), 1), length)
    else:
        package.register_fsdp_forward_method(training.model, "generate")
        with torch.no_grad():
            generated = training.model.generate(batch(rank(), 1), length)
    torch.testing.assert_close(generated, expected)
    training.step(1)
    training.check()


def local_evaluation_of_full_parameters(api: str) -> None:
    """All ranks unshard the model; rank 0 then evaluates a plain copy, alone, four times."""
    training = Training(api)
    for step in range(2):
        training.step(step)
        copied = Net()
        copied.load_state_dict(full_parameters(training.model))
        for number in range(4 if rank() == 0 else 0):
            copied(batch(0, number)).sum().backward()
    training.check()


class WithExperts(nn.Module):
    """A first layer, experts whose number depends on the rank, and a last layer."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_experts))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for expert in self.experts:
            x = x + expert(x)
        return self.last(x)


def local_experts(api: str) -> None:
    """Rank 0 has three local experts and rank 1 has two, each in a process group of one rank."""
    torch.manual_seed(rank())
    model, group = WithExperts(3 - rank()), alone()
    for part in (model.first, model.last):
        nn.init.eye_(part.weight)
        nn.init.zeros_(part.bias)
    if api == "wrapper":
        for index, expert in enumerate(model.experts):
            model.experts[index] = wrap(expert, process_group=group)
        model.first, model.last = wrap(model.first), wrap(model.last)
        trained = [wrap(model)]
    else:
        for expert in model.experts:
            fully_shard(expert, mesh=mesh_of(group))
        trained = [fully_shard(part) for part in (model.first, model.last, model)]
    optimizer = torch.optim.SGD(trained[-1].parameters(), lr=0.1)
    for step in range(3):
        trained[-1](batch(rank(), step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    shared = full_parameters(trained[-1])["last.weight"]
    assert not torch.equal(shared, torch.eye(WIDTH))
    of_both = [torch.empty_like(shared) for _ in range(2)]
    dist.all_gather(of_both, shared)
    assert torch.equal(*of_both)


def frozen_network_on_one_rank(api: str) -> None:
    """Ranks use a frozen network in different steps. It is not sharded, so it issues no collective."""
    torch.manual_seed(1)
    judge = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    plain_judge = copy.deepcopy(judge)
    if api == "wrapper":
        judge = wrap(judge, sharding_strategy=Strategy.NO_SHARD)
    else:
        judge = fully_shard(judge, mesh=mesh_of(alone()))
    training = Training(api)
    for step in range(4):
        out = training.model(batch(rank(), step))
        extra = judge(out).square().mean() if rank() == step % 2 else 0
        (out.square().mean() + extra).backward()
        for of_rank in range(2):
            out = training.plain(batch(of_rank, step))
            extra = plain_judge(out).square().mean() if of_rank == step % 2 else 0
            ((out.square().mean() + extra) / 2).backward()
        training.update()
    training.check()


def frozen_network_between_forward_and_backward(api: str) -> None:
    """Rank 1 runs a frozen local network, with a backward of its own, between forward and backward of the model."""
    judge = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    judge = wrap(judge, process_group=alone()) if api == "wrapper" else fully_shard(judge, mesh=mesh_of(alone()))
    training = Training(api)
    for step in range(3):
        loss = training.loss(step)
        for _ in range(2 * rank()):
            x = batch(rank(), step).requires_grad_()
            judge(x).sum().backward()
        loss.backward()
        training.plain_backward(step)
        training.update()
    training.check()


def step_of_another_optimizer_on_one_rank(api: str) -> None:
    """Rank 1 also trains a small plain model of its own, with an optimizer of its own, between any two calls."""
    training = Training(api, keep=True)
    probe = nn.Linear(WIDTH, 1)
    probe_optimizer = torch.optim.Adam(probe.parameters())

    def train_probe() -> None:
        for _ in range(rank()):
            with torch.enable_grad():
                probe(batch(1, 0)).sum().backward()
            probe_optimizer.step()
            probe_optimizer.zero_grad()

    for step in range(3):
        train_probe()
        loss = training.loss(step)
        train_probe()
        loss.backward()
        train_probe()
        training.plain_backward(step)
        training.update()
        with torch.no_grad():
            for _ in range(2):
                training.model(batch(rank(), 5))
                train_probe()
    training.check()


def local_sgd(api: str) -> None:
    """NO_SHARD and `no_sync`: each rank takes three local steps, then the program averages the parameters."""
    torch.manual_seed(0)
    net = Net()
    plains = [copy.deepcopy(net) for _ in range(2)]
    model = shard(api, net, sharding_strategy=Strategy.NO_SHARD, use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        with model.no_sync():
            model(batch(rank(), step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for of_rank, plain in enumerate(plains):
            gradients = torch.autograd.grad(plain(batch(of_rank, step)).square().mean(), list(plain.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(plain.parameters(), gradients, strict=True):
                    parameter -= 0.1 * gradient
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= 2
    with torch.no_grad():
        for first, second in zip(*(plain.parameters() for plain in plains), strict=True):
            first.copy_((first + second) / 2)
    assert_same(model, plains[0])


def unused_parameter_on_one_rank(api: str) -> None:
    """Rank 1 does not use some parameters of a flat unit; it contributes zeros for them."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, uses_b: bool = True) -> Tensor:
            return self.b(self.a(x)) if uses_b else self.a(x)

    training = Training(api, Two(), use_orig_params=True)
    for step in range(3):
        training.loss(step, uses_b=rank() == 0).backward()
        for of_rank in range(2):
            training.plain_loss(of_rank, step, uses_b=of_rank == 0).backward()
        training.update()
    training.check()


class Towers(nn.Module):
    """Two towers; a batch can have an image, a text, both, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, parts: str) -> Tensor:
        for part in parts.split():
            x = getattr(self, part)(x)
        return self.head(x)


def towers_over_different_groups(api: str) -> None:
    """Four ranks shard one tower over rows of the mesh and the other over columns; some rows have no images."""
    torch.manual_seed(0)
    model, own = Towers(), alone()
    plain = copy.deepcopy(model)
    rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank() // 2]
    columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank() % 2]
    if api == "wrapper":
        model.image, model.text = wrap(model.image, process_group=rows), wrap(model.text, process_group=columns)
        sharded = wrap(model, process_group=own)
    else:
        fully_shard(model.image, mesh=mesh_of(rows))
        fully_shard(model.text, mesh=mesh_of(columns))
        sharded = fully_shard(model, mesh=mesh_of(own))
    for step in range(3):
        parts = "image text" if step != 1 else "image" if rank() < 2 else ""
        sharded(batch(rank(), step), parts).square().mean().backward()
    assert_gradient(model.image, plain, "image", rank() // 2 * 2, rank() // 2 * 2 + 1)


def assert_gradient(module: nn.Module, plain: Towers, name: str, *ranks: int) -> None:
    """Checks that a tower of two ranks has the mean of their gradients, summed over the steps."""
    for step in range(3):
        for of_rank in ranks:
            parts = "image text" if step != 1 else "image" if of_rank < 2 else ""
            (plain(batch(of_rank, step), parts).square().mean() / 2).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in getattr(plain, name).parameters()])
    if isinstance(module, FSDP):
        mine = module._flat_param.grad if hasattr(module, "_flat_param") else next(module.parameters()).grad
        assert mine is not None
        group = module.process_group
        of_both = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(of_both, mine, group=group)
        found = torch.cat(of_both)[: len(expected)]
    else:
        found = torch.cat([parameter.grad.full_tensor().flatten() for parameter in module.parameters()])
    torch.testing.assert_close(found, expected)


def ddp_with_join_next_to_it(api: str) -> None:
    """A DDP model with uneven inputs, which `Join` handles, trains next to a sharded model with even inputs."""
    training = Training(api)
    torch.manual_seed(1)
    other = DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
    for step in range(2):
        training.step(step)
        with Join([other]):
            for number in range(3 + 2 * rank()):
                other(batch(rank(), number)).square().mean().backward()
        other.zero_grad()
    training.check()


def backward_that_sends_nothing(api: str) -> None:
    """A micro-batch that neither all-gathers nor reduces is not compared: its groups have no collective."""
    training = Training(api, keep=True)
    training.step(0)
    group = dist.group.WORLD
    with training.syncs(0, 3):
        training.loss(1).backward()
    before = num_sent(group)
    with training.syncs(1, 3):
        training.loss(2).backward()
    assert num_sent(group) == before
    with training.syncs(2, 3):
        training.loss(3).backward()
    for step in (1, 2, 3):
        training.plain_backward(step)
    training.update()
    training.check()


def evaluation_that_sends_nothing(api: str) -> None:
    """An evaluation of a model whose parameters are already unsharded issues no collective."""
    training = Training(api, keep=True)
    with torch.no_grad():
        training.model(batch(rank(), 0))
        before = num_sent(dist.group.WORLD)
        for number in range(3):
            training.model(batch(rank(), number))
    assert num_sent(dist.group.WORLD) == before
    training.step(0)
    training.check()


def replicas_that_do_not_meet(api: str) -> None:
    """In a micro-batch without an all-reduce, the groups of replicas have no collective."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    training = Training(api, mesh=mesh)
    training.step(0)
    group = mesh.get_group("replicate")
    training.model.set_requires_all_reduce(False)
    before = num_sent(group)
    training.loss(1).backward()
    assert num_sent(group) == before
    training.model.set_requires_all_reduce(True)
    training.loss(2).backward()
    training.plain_backward(1)
    training.plain_backward(2)
    training.update()
    training.check()


def no_sync_of_one_rank_under_no_shard(api: str) -> None:
    """Under NO_SHARD one rank accumulates one micro-batch more than the other before both reduce."""
    training = Training(api, sharding_strategy=Strategy.NO_SHARD)
    counts = [1, 3]
    for micro in range(counts[rank()]):
        with nullcontext() if micro == counts[rank()] - 1 else training.model.no_sync():
            training.loss(micro).backward()
    for of_rank, count in enumerate(counts):
        for micro in range(count):
            training.plain_loss(of_rank, micro).backward()
    training.update()
    training.check()


ON_TWO = {
    "wrapper": [
        micro_batches_while_unsharded,
        one_micro_batch_and_many,
        evaluation_while_unsharded,
        evaluation_before_training,
        evaluation_with_other_batch_sizes,
        generate_of_different_lengths,
        local_evaluation_of_full_parameters,
        local_experts,
        frozen_network_on_one_rank,
        frozen_network_between_forward_and_backward,
        step_of_another_optimizer_on_one_rank,
        local_sgd,
        no_sync_of_one_rank_under_no_shard,
        unused_parameter_on_one_rank,
        ddp_with_join_next_to_it,
        backward_that_sends_nothing,
        evaluation_that_sends_nothing,
    ],
}
ONLY_WRAPPER = (local_sgd, no_sync_of_one_rank_under_no_shard, unused_parameter_on_one_rank)
ON_TWO["fully_shard"] = [program for program in ON_TWO["wrapper"] if program not in ONLY_WRAPPER]
ON_FOUR = {
    "wrapper": [towers_over_different_groups],
    "fully_shard": [
        towers_over_different_groups,
        replicas_with_unequal_micro_batches,
        replicas_that_do_not_meet,
    ],
}

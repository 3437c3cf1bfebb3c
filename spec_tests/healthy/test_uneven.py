"""Programs whose ranks do different amounts of work, but issue the same collectives."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spec_tests.healthy.quiet import both_apis, healthy, only_fully_shard, only_wrapper
from spec_tests.healthy.support import (
    FSDP,
    WIDTH,
    Net,
    Training,
    assert_same,
    batch,
    full_parameters,
    mesh_of,
    num_sent,
    rank,
    shard,
    wrap,
)
from spec_tests.subject import ShardingStrategy, fully_shard, register_fsdp_forward_method

pytestmark = pytest.mark.cpu


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


@pytest.mark.spec("HEALTHY-02")
@both_apis
@healthy(2)
def test_ranks_may_accumulate_different_numbers_of_micro_batches(api: str) -> None:
    """While parameters stay unsharded, they are all-gathered once and gradients are reduced once."""
    training = Training(api, keep=True)
    training.step(99)
    for step, counts in enumerate(([1, 5], [5, 1], [3, 2])):
        _accumulate(training, counts, step)
        training.update()
    training.check()


@pytest.mark.spec("HEALTHY-03")
@only_fully_shard
@healthy(4)
def test_replicas_may_accumulate_different_numbers_of_micro_batches(api: str) -> None:
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


@pytest.mark.spec("HEALTHY-02")
@both_apis
@healthy(2)
def test_ranks_may_evaluate_different_numbers_of_batches(api: str) -> None:
    """Parameters stay unsharded after forward, so only the first of 5 and 3 evaluation batches communicates."""
    training = Training(api, keep=True)
    for step in range(2):
        training.step(step)
        with torch.no_grad():
            for number in range(5 if rank() == 0 else 3):
                training.model(batch(rank(), number))
    training.step(2)
    training.check()


class Generator(Net):
    """A network that extends its output by one row in each call."""

    def generate(self, x: Tensor, length: int) -> Tensor:
        while len(x) < length:
            x = torch.cat([x, self.forward(x)[-1:]])
        return x


@pytest.mark.spec("HEALTHY-02")
@both_apis
@healthy(2)
def test_ranks_may_generate_sequences_of_different_lengths(api: str) -> None:
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
        register_fsdp_forward_method(training.model, "generate")
        with torch.no_grad():
            generated = training.model.generate(batch(rank(), 1), length)
    torch.testing.assert_close(generated, expected)
    training.step(1)
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


@pytest.mark.spec("HEALTHY-02", "HEALTHY-03")
@both_apis
@healthy(2)
def test_ranks_may_have_different_numbers_of_local_experts(api: str) -> None:
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


@pytest.mark.spec("HEALTHY-02")
@both_apis
@healthy(2)
def test_one_rank_may_use_a_frozen_network(api: str) -> None:
    """Ranks use a frozen network in different steps. It is not sharded, so it issues no collective."""
    torch.manual_seed(1)
    judge = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    plain_judge = copy.deepcopy(judge)
    if api == "wrapper":
        judge = wrap(judge, sharding_strategy=ShardingStrategy.NO_SHARD)
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


@pytest.mark.spec("HEALTHY-02")
@both_apis
@healthy(2)
def test_one_rank_may_train_a_plain_model_in_between(api: str) -> None:
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


@pytest.mark.spec("HEALTHY-02")
@only_wrapper
@healthy(2)
def test_ranks_may_take_local_steps_without_sharding(api: str) -> None:
    """NO_SHARD and `no_sync`: each rank takes three local steps, then the program averages the parameters."""
    torch.manual_seed(0)
    net = Net()
    plains = [copy.deepcopy(net) for _ in range(2)]
    model = shard(api, net, sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True)
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


@pytest.mark.spec("HEALTHY-02")
@only_wrapper
@healthy(2)
def test_one_rank_may_leave_out_a_part_of_a_flat_unit(api: str) -> None:
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


@pytest.mark.spec("HEALTHY-03")
@both_apis
@healthy(4)
def test_two_towers_may_be_sharded_over_different_groups(api: str) -> None:
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

    def parts(of_rank: int, step: int) -> str:
        return "image text" if step != 1 else "image" if of_rank < 2 else ""

    row = (0, 1) if rank() < 2 else (2, 3)
    for step in range(3):
        sharded(batch(rank(), step), parts(rank(), step)).square().mean().backward()
        for of_rank in row:
            (plain(batch(of_rank, step), parts(of_rank, step)).square().mean() / 2).backward()
    for tower in (model.image, plain.image):
        torch.optim.SGD(tower.parameters(), lr=0.1).step()
    assert_same(model.image, plain.image)


@pytest.mark.spec("HEALTHY-03")
@both_apis
@healthy(2)
def test_a_backward_in_an_accumulation_sends_nothing(api: str) -> None:
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


@pytest.mark.spec("HEALTHY-02")
@both_apis
@healthy(2)
def test_an_evaluation_of_unsharded_parameters_sends_nothing(api: str) -> None:
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


@pytest.mark.spec("HEALTHY-03")
@only_fully_shard
@healthy(4)
def test_a_backward_without_an_all_reduce_sends_nothing_between_replicas(api: str) -> None:
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

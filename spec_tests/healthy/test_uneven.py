"""Programs whose ranks do different amounts of work, but issue the same collectives."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spec_tests.healthy.quiet import healthy
from spec_tests.healthy.support import WIDTH, Net, Training, batch, unit
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import register_fsdp_forward_method

pytestmark = pytest.mark.cpu


def alone() -> object:
    """A process group that contains only this rank."""
    return [dist.new_group([other]) for other in range(dist.get_world_size())][dist.get_rank()]


def _accumulate(training: Training, counts: list[int], step: int) -> None:
    """Runs the backwards of a step in which each rank has its own number of micro-batches."""
    for micro in range(counts[dist.get_rank()]):
        with training.syncs(micro, counts[dist.get_rank()]):
            training.loss(10 * step + micro).backward()
    for of_rank, count in enumerate(counts):
        for micro in range(count):
            training.plain_loss(of_rank, 10 * step + micro).backward()


@pytest.mark.spec("HEALTHY-02")
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
@healthy(4, apis=["fully_shard"])
def test_replicas_may_accumulate_different_numbers_of_micro_batches(api: str) -> None:
    """Replicas reduce within each replica, and all-reduce only in their last of 3 and 2 micro-batches."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    training = Training(api, mesh=mesh)
    training.step(99)
    replica, replicas = mesh.get_local_rank("replicate"), mesh.get_group("replicate")
    counts = [3, 2]
    for step in range(2):
        before = training.num_sent(replicas)
        for micro in range(counts[replica]):
            is_last = micro == counts[replica] - 1
            training.model.set_requires_all_reduce(is_last)
            training.loss(10 * step + micro).backward()
            assert is_last or training.num_sent(replicas) == before
        for of_rank in range(4):
            for micro in range(counts[of_rank // 2]):
                training.plain_loss(of_rank, 10 * step + micro).backward()
        training.update()
    training.check()


@pytest.mark.spec("HEALTHY-02")
@healthy(2)
def test_ranks_may_evaluate_different_numbers_of_batches(api: str) -> None:
    """Parameters stay unsharded after forward, so only the first of 6 and 4 evaluation batches communicates."""
    training = Training(api, keep=True)
    for step in range(2):
        training.step(step)
        with torch.no_grad():
            training.model(batch(dist.get_rank(), 0))
            before = training.num_sent()
            for number in range(5 if dist.get_rank() == 0 else 3):
                training.model(batch(dist.get_rank(), number))
        assert training.num_sent() == before
    training.step(2)
    training.check()


class Generator(Net):
    """A network that extends its output by one row in each call."""

    def generate(self, x: Tensor, length: int) -> Tensor:
        while len(x) < length:
            x = torch.cat([x, self.forward(x)[-1:]])
        return x


@pytest.mark.spec("HEALTHY-02")
@healthy(2)
def test_ranks_may_generate_sequences_of_different_lengths(api: str) -> None:
    """Ranks generate sequences of different lengths while all parameters are unsharded."""
    torch.manual_seed(0)
    net = Generator(0)
    training = Training(api, net)
    training.step(0)
    length = 6 + 5 * dist.get_rank()
    expected = training.plain.generate(batch(dist.get_rank(), 1), length)
    if api == "wrapper":
        with torch.no_grad(), FSDP.summon_full_params(training.model, writeback=False):
            generated = training.model.module.generate(batch(dist.get_rank(), 1), length)
    else:
        register_fsdp_forward_method(training.model, "generate")
        with torch.no_grad():
            generated = training.model.generate(batch(dist.get_rank(), 1), length)
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
@healthy(2)
def test_ranks_may_have_different_numbers_of_local_experts(api: str) -> None:
    """Rank 0 has three local experts and rank 1 has two, each in a process group of one rank."""
    torch.manual_seed(dist.get_rank())
    model, group = WithExperts(3 - dist.get_rank()), alone()
    for part in (model.first, model.last):
        nn.init.eye_(part.weight)
        nn.init.zeros_(part.bias)
    for index, expert in enumerate(model.experts):
        model.experts[index] = unit(api, expert, group)
    model.first, model.last = unit(api, model.first), unit(api, model.last)
    sharded = unit(api, model)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    for step in range(3):
        sharded(batch(dist.get_rank(), step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        found = model.last(torch.eye(WIDTH))
    assert not torch.equal(found, torch.eye(WIDTH))
    of_both = [torch.empty_like(found) for _ in range(2)]
    dist.all_gather(of_both, found)
    assert torch.equal(*of_both)


@pytest.mark.spec("HEALTHY-02")
@healthy(2)
def test_one_rank_may_use_a_frozen_network(api: str) -> None:
    """Ranks use a frozen network in different steps. It is not sharded, so it issues no collective."""
    torch.manual_seed(1)
    judge = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    plain_judge = copy.deepcopy(judge)
    judge = unit(api, judge, alone())
    training = Training(api)
    for step in range(4):
        out = training.model(batch(dist.get_rank(), step))
        extra = judge(out).square().mean() if dist.get_rank() == step % 2 else 0
        (out.square().mean() + extra).backward()
        for of_rank in range(2):
            out = training.plain(batch(of_rank, step))
            extra = plain_judge(out).square().mean() if of_rank == step % 2 else 0
            ((out.square().mean() + extra) / 2).backward()
        training.update()
    training.check()


@pytest.mark.spec("HEALTHY-02")
@healthy(2)
def test_one_rank_may_train_a_plain_model_in_between(api: str) -> None:
    """Rank 1 also trains a small plain model of its own, with an optimizer of its own, between any two calls."""
    training = Training(api, keep=True)
    probe = nn.Linear(WIDTH, 1)
    probe_optimizer = torch.optim.Adam(probe.parameters())

    def train_probe() -> None:
        for _ in range(dist.get_rank()):
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
                training.model(batch(dist.get_rank(), 5))
                train_probe()
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
@healthy(4)
def test_two_towers_may_be_sharded_over_different_groups(api: str) -> None:
    """Four ranks shard one tower over rows of the mesh and the other over columns; some rows have no images."""
    torch.manual_seed(0)
    model, own = Towers(), alone()
    plain = copy.deepcopy(model)
    rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][dist.get_rank() // 2]
    columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][dist.get_rank() % 2]
    model.image, model.text = unit(api, model.image, rows), unit(api, model.text, columns)
    sharded = unit(api, model, own)

    def parts(of_rank: int, step: int) -> str:
        return "image text" if step != 1 else "image" if of_rank < 2 else ""

    row = (0, 1) if dist.get_rank() < 2 else (2, 3)
    for step in range(3):
        sharded(batch(dist.get_rank(), step), parts(dist.get_rank(), step)).square().mean().backward()
        for of_rank in row:
            (plain(batch(of_rank, step), parts(of_rank, step)).square().mean() / 2).backward()
    for tower in (model.image, plain.image):
        torch.optim.SGD(tower.parameters(), lr=0.1).step()
    with torch.no_grad():
        x = torch.eye(WIDTH)
        torch.testing.assert_close(model.image(x), plain.image(x))


@pytest.mark.spec("HEALTHY-03")
@healthy(2)
def test_a_backward_in_an_accumulation_sends_nothing(api: str) -> None:
    """A micro-batch that neither all-gathers nor reduces is not compared: its groups have no collective."""
    training = Training(api, keep=True)
    training.step(0)
    with training.syncs(0, 3):
        training.loss(1).backward()
    before = training.num_sent()
    with training.syncs(1, 3):
        training.loss(2).backward()
    assert training.num_sent() == before
    with training.syncs(2, 3):
        training.loss(3).backward()
    for step in (1, 2, 3):
        training.plain_backward(step)
    training.update()
    training.check()

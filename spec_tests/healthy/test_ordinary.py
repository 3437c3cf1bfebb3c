"""Ordinary programs, in which no check may report an error. Each compares its parameters with plain training."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spec_tests.harness import ranks
from spec_tests.healthy.quiet import both_apis, healthy
from spec_tests.healthy.support import (
    WIDTH,
    Net,
    Training,
    assert_same,
    batch,
    full_parameters,
    late,
    mesh_of,
    num_sent,
    rank,
    shard,
    state_dict_of,
)
from spec_tests.subject import ShardingStrategy, fully_shard

pytestmark = pytest.mark.cpu
each_transport = pytest.mark.parametrize("transport", ["messages", "by size", "collectives"])


@pytest.mark.spec("HEALTHY-01")
@both_apis
@healthy(2)
def test_two_models_may_train_in_turn(api: str) -> None:
    """A generator and a discriminator train in turn, as in a GAN: each step uses both and updates one."""
    generator, judge = Training(api), Training(api, Net(1))
    for step in range(3):
        x = batch(rank(), step)
        judge.model(generator.model(x)).square().mean().backward()
        for of_rank in range(2):
            (judge.plain(generator.plain(batch(of_rank, step))).square().mean() / 2).backward()
        generator.update()
        judge.optimizer.zero_grad()
        judge.plain_optimizer.zero_grad()
        with torch.no_grad():
            made, plain_made = generator.model(x), [generator.plain(batch(r, step)) for r in range(2)]
        (1 - judge.model(made)).square().mean().backward()
        for of_rank in range(2):
            ((1 - judge.plain(plain_made[of_rank])).square().mean() / 2).backward()
        judge.update()
    generator.check()
    judge.check()


@pytest.mark.spec("HEALTHY-01")
@both_apis
@healthy(2)
def test_a_frozen_teacher_may_give_the_targets(api: str) -> None:
    """A frozen sharded teacher gives the targets of a student."""
    torch.manual_seed(1)
    teacher = Net().requires_grad_(False)
    plain_teacher = copy.deepcopy(teacher)
    teacher = shard(api, teacher).eval()
    student = Training(api, Net(1))
    for step in range(3):
        with torch.no_grad():
            target = teacher(batch(rank(), step))
        (student.model(batch(rank(), step)) - target).square().mean().backward()
        for of_rank in range(2):
            x = batch(of_rank, step)
            ((student.plain(x) - plain_teacher(x)).square().mean() / 2).backward()
        student.update()
    student.check()


@pytest.mark.spec("HEALTHY-01")
@both_apis
@healthy(2)
def test_all_ranks_may_skip_the_same_layers(api: str) -> None:
    """All ranks skip the same layers, and in the last step all layers."""
    training = Training(api, Net(3))
    for step, num_layers in enumerate((3, 1, 2, 0)):
        training.step(step, num_layers=num_layers)
    training.check()


@pytest.mark.spec("HEALTHY-01")
@both_apis
@healthy(2)
def test_parameters_may_be_frozen_by_epoch(api: str) -> None:
    """The first layer is frozen in the first epoch, and only that layer trains in the second, as adapters do."""
    options = {"use_orig_params": True} if api == "wrapper" else {}
    training = Training(api, **options)
    for epoch in range(2):
        for model in (training.model, training.plain):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(("layers.0" in name) == (epoch == 1))
        for step in range(2):
            training.step(10 * epoch + step)
    training.check()


@pytest.mark.spec("HEALTHY-01")
@both_apis
@healthy(2)
def test_a_program_may_average_its_weights(api: str) -> None:
    """The program keeps an exponential moving average of the local shards and evaluates with it."""
    training = Training(api)
    models = (training.model, training.plain)
    averages = [[parameter.detach().clone() for parameter in model.parameters()] for model in models]
    for step in range(3):
        training.step(step)
        for model, of_model in zip(models, averages, strict=True):
            for average, parameter in zip(of_model, model.parameters(), strict=True):
                average.lerp_(parameter.detach(), 0.1)
    with torch.no_grad():
        for model, of_model in zip(models, averages, strict=True):
            for average, parameter in zip(of_model, model.parameters(), strict=True):
                parameter.copy_(average)
    training.check()


@pytest.mark.spec("HEALTHY-01")
@both_apis
@healthy(2)
def test_a_program_may_clip_its_gradients_itself(api: str) -> None:
    """The program sums the squares of its local gradients with its own all-reduce, and scales them."""
    training = Training(api)
    for step in range(3):
        training.loss(step).backward()
        training.plain_backward(step)
        gradients = [local(parameter.grad) for parameter in training.model.parameters()]
        total = torch.stack([gradient.square().sum() for gradient in gradients if gradient is not None]).sum()
        dist.all_reduce(total)
        for gradient in gradients:
            gradient.mul_(0.01 / total.sqrt())
        plain = torch.cat([parameter.grad.flatten() for parameter in training.plain.parameters()]).norm()
        for parameter in training.plain.parameters():
            parameter.grad.mul_(0.01 / plain)
        training.update()
    training.check()


def local(tensor: Any) -> Any:
    """The shard of a tensor on this rank."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.spec("HEALTHY-01")
@both_apis
@healthy(2)
def test_a_program_may_issue_its_own_collectives(api: str) -> None:
    """The program issues its own collectives on the default group in forward, in backward and between the calls."""

    class Measured(Net):
        def forward(self, x: Tensor, num_layers: int | None = None) -> Tensor:
            metric = x.detach().mean()
            dist.all_reduce(metric)
            return super().forward(x)

    training = Training(api, Measured())
    training.plain.__class__ = Net
    for step in range(3):
        loss = training.loss(step)
        metrics: list[Any] = [None, None]
        dist.all_gather_object(metrics, {"loss": loss.item()})
        loss.register_hook(lambda gradient: dist.barrier())
        loss.backward()
        dist.broadcast(torch.ones(3), 0)
        training.plain_backward(step)
        training.update()
        dist.monitored_barrier(timeout=timedelta(seconds=15))
    training.check()


@pytest.mark.spec("HEALTHY-01")
@both_apis
@healthy(2)
def test_all_ranks_may_catch_an_exception(api: str) -> None:
    """An exception ends a forward, a backward, and a loss on all ranks; each rank catches it and continues."""

    class Failing(Net):
        fails = False

        def forward(self, x: Tensor, num_layers: int | None = None) -> Tensor:
            for layer in self.layers:
                x = layer(x).tanh()
                if self.fails:
                    raise LookupError("a bad batch")
            return self.head(x)

    training = Training(api, Failing())
    failing = next(module for module in training.model.modules() if isinstance(module, Failing))
    training.step(0)
    for step in range(1, 4):
        failing.fails = step == 1
        try:
            loss = training.loss(step)
            if step == 2:
                raise LookupError("a bad loss")
            if step == 3:
                loss.register_hook(lambda gradient: fail())
            loss.backward()
        except LookupError:
            failing.fails = False
            training.optimizer.zero_grad()
    for step in range(4, 6):
        training.step(step)
    training.check()


def fail() -> None:
    raise LookupError("a bad gradient")


def in_thread(function: Callable[[], Any]) -> Any:
    """Runs a function in another thread and returns its result."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.spec("HEALTHY-01")
@both_apis
@healthy(2)
def test_threads_may_evaluate(api: str) -> None:
    """All ranks evaluate the sharded model in another thread, while a second thread runs a plain model."""
    training, plain, is_over = Training(api), Net(), threading.Event()

    def serve() -> None:
        with torch.no_grad():
            while not is_over.wait(0.01):
                plain(batch(0, 0))

    server = threading.Thread(target=serve)
    server.start()
    try:
        for step in range(2):
            training.step(step)
            with torch.no_grad():
                expected = training.plain(batch(rank(), 7))
            found = in_thread(lambda: evaluated(training.model))
            torch.testing.assert_close(found, expected)
    finally:
        is_over.set()
        server.join()
    training.check()


def evaluated(model: nn.Module) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(batch(rank(), 7))
        return out


@pytest.mark.spec("HEALTHY-01")
@both_apis
@healthy(2)
def test_a_thread_may_save_while_training_continues(api: str) -> None:
    """A thread writes a state dict to a file while training continues."""
    training = Training(api)
    training.step(0)
    expected = {name: value.clone() for name, value in training.plain.state_dict().items()}
    state = {name: value.clone() for name, value in state_dict_of(training.model).items()}
    with tempfile.TemporaryFile() as file:

        def save() -> None:
            time.sleep(0.2)
            torch.save(state, file)

        saver = threading.Thread(target=save)
        saver.start()
        for step in range(1, 4):
            training.step(step)
        saver.join()
        file.seek(0)
        torch.testing.assert_close(torch.load(file), expected)
    training.check()


@pytest.mark.spec("HEALTHY-01")
@both_apis
@healthy(2)
def test_a_rank_may_start_processes(api: str) -> None:
    """Rank 1 starts a subprocess and forks, with SIGTERM for one of the children, while both ranks train."""
    training = Training(api)
    training.step(0)
    for step in range(1, 3):
        if rank() == 1:
            subprocess.run([sys.executable, "-c", "print()"], check=True, stdout=subprocess.DEVNULL)
            child = os.fork()
            if child == 0:
                if step == 1:
                    os._exit(0)
                time.sleep(30)
            if step == 2:
                os.kill(child, signal.SIGTERM)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status == (0 if step == 1 else -signal.SIGTERM)
        training.step(step)
    training.check()


@pytest.mark.spec("HEALTHY-01")
@both_apis
@healthy(2)
def test_a_rank_may_be_late_in_every_step_and_no_step_communicates_more(api: str) -> None:
    """60 steps, in which rank 1 is late by 3 ms at one of three places."""
    training = Training(api, Net(1))
    sent = []
    for step in range(60):
        before = num_sent(dist.group.WORLD)
        late(0.003 * (step % 3 == 0))
        loss = training.loss(step)
        late(0.003 * (step % 3 == 1))
        loss.backward()
        late(0.003 * (step % 3 == 2))
        training.plain_backward(step)
        training.update()
        sent.append(num_sent(dist.group.WORLD) - before)
    assert set(sent[10:]) == {sent[10]}, sent
    training.check()


def choose(transport: str) -> None:
    """Chooses the transport between CPUs for this test. By default, it depends on the size of a message."""
    if transport == "by size":
        os.environ.pop("MINIFSDP_TRANSPORT", None)
    else:
        os.environ["MINIFSDP_TRANSPORT"] = transport


@pytest.mark.spec("HEALTHY-05")
@each_transport
@healthy(2)
def test_a_rank_may_all_gather_before_it_sends(transport: str) -> None:
    """Rank 0 issues an all-gather before it sends a batch, and rank 1 issues it after it has received the batch."""
    choose(transport)
    # A new group has issued no collective of this size.
    group = dist.new_group([0, 1])
    training = Training("fully_shard", Net(0), group=group)
    for step in range(2):
        received = batch(1, step)
        if rank() == 0:
            handle = training.model.unshard(async_op=True)
            dist.send(received, 1)
        else:
            received.zero_()
            dist.recv(received, 0)
            assert torch.equal(received, batch(1, step))
            handle = training.model.unshard(async_op=True)
        handle.wait()
        training.step(step)
    training.check()


@pytest.mark.spec("HEALTHY-05")
@each_transport
@healthy(2)
def test_a_rank_may_all_gather_several_units_before_it_sends(transport: str) -> None:
    """Rank 0 issues all-gathers of three units of different sizes before rank 1, which waits for a message."""
    choose(transport)
    group, sizes = dist.new_group([0, 1]), (3, 5, 8)
    units = [fully_shard(nn.Linear(size, size), mesh=mesh_of(group)) for size in sizes]
    message = torch.zeros(2)
    if rank() == 1:
        dist.recv(message, 0)
    handles = [unit.unshard(async_op=True) for unit in units]
    if rank() == 0:
        dist.send(message, 1)
    for handle, unit, size in zip(handles, units, sizes, strict=True):
        handle.wait()
        unit(torch.ones(2, size)).sum().backward()


@pytest.mark.spec("HEALTHY-03")
@both_apis
@healthy(4)
def test_stages_of_a_pipeline_may_send_to_each_other(api: str) -> None:
    """Two stages of a pipeline, each sharded over a group of its own, send activations and gradients to each other."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    stage, other = rank() // 2, (rank() + 2) % 4
    torch.manual_seed(0)
    plains = [Net(1), Net(2)]
    model = shard(api, copy.deepcopy(plains[stage]), group=groups[stage])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        if stage == 0:
            out = model(batch(rank(), step))
            dist.send(out.detach(), other)
            gradient = torch.empty_like(out)
            dist.recv(gradient, other)
            out.backward(gradient)
        else:
            x = torch.empty(4, WIDTH)
            dist.recv(x, other)
            model(x.requires_grad_()).square().mean().backward()
            assert x.grad is not None
            dist.send(x.grad, other)
        optimizer.step()
        optimizer.zero_grad()
        both = nn.Sequential(*plains)
        for of_rank in range(2):
            (both(batch(of_rank, step)).square().mean() / 2).backward()
        with torch.no_grad():
            for parameter in both.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    assert_same(model, plains[stage])


@pytest.mark.spec("HEALTHY-03")
@both_apis
@healthy(4)
def test_one_replica_may_evaluate_more_batches(api: str) -> None:
    """One of two replicas evaluates three batches more than the other; only its shard group communicates."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if api == "wrapper":
        training = Training(api, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    else:
        training = Training(api, mesh=mesh)
    for step in range(2):
        training.step(step)
        with torch.no_grad():
            for number in range(3 if rank() < 2 else 0):
                training.model(batch(rank() % 2, number))
    training.check()


@pytest.mark.spec("SD-FULL-10")
@ranks(2)
def test_rank_0_may_load_a_checkpoint_into_the_plain_module_before_wrapping() -> None:
    torch.manual_seed(3)
    checkpoint = Net().state_dict()
    torch.manual_seed(4 + rank())
    net = Net()
    if rank() == 0:
        net.load_state_dict(checkpoint)
    model = shard("wrapper", net, sync_module_states=True)
    assert full_parameters(model).keys() == checkpoint.keys()
    for name, value in full_parameters(model).items():
        assert torch.equal(value, checkpoint[name]), name

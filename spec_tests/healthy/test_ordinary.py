"""Ordinary programs, in which no check may report an error. Each compares its parameters with plain training.

``spec_tests/random_programs/test_loops.py`` has more of them: layer drop, early exit, exceptions that all ranks catch.
"""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spec_tests.healthy.quiet import healthy
from spec_tests.healthy.support import WIDTH, Net, Training, batch, state_dict_of
from spec_tests.subject import ShardingStrategy, fully_shard

pytestmark = pytest.mark.cpu


@pytest.mark.spec("HEALTHY-01")
@healthy(2)
def test_two_models_may_train_in_turn(api: str) -> None:
    """A generator and a discriminator train in turn, as in a GAN: each step uses both and updates one."""
    generator, judge = Training(api), Training(api, Net(1))
    for step in range(3):
        x = batch(dist.get_rank(), step)
        judge.model(generator.model(x)).square().mean().backward()
        for of_rank in range(2):
            (judge.plain(generator.plain(batch(of_rank, step))).square().mean() / 2).backward()
        generator.update()
        judge.optimizer.zero_grad()
        judge.plain_optimizer.zero_grad()
        with torch.no_grad():
            made, plain_made = generator.model(x), [generator.plain(batch(rank, step)) for rank in range(2)]
        (1 - judge.model(made)).square().mean().backward()
        for of_rank in range(2):
            ((1 - judge.plain(plain_made[of_rank])).square().mean() / 2).backward()
        judge.update()
    generator.check()
    judge.check()


@pytest.mark.spec("HEALTHY-01")
@healthy(2)
def test_a_frozen_teacher_may_give_the_targets(api: str) -> None:
    """A frozen sharded teacher gives the targets of a student."""
    teacher, student = Training(api, Net().requires_grad_(False)), Training(api, Net(1))
    teacher.model.eval()
    for step in range(3):
        with torch.no_grad():
            target = teacher.model(batch(dist.get_rank(), step))
        (student.model(batch(dist.get_rank(), step)) - target).square().mean().backward()
        for of_rank in range(2):
            x = batch(of_rank, step)
            ((student.plain(x) - teacher.plain(x)).square().mean() / 2).backward()
        student.update()
    student.check()


@pytest.mark.spec("HEALTHY-01")
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
@healthy(2)
def test_a_program_may_clip_its_gradients_itself(api: str) -> None:
    """The program sums the squares of its local gradients with its own all-reduce, and scales them."""
    training = Training(api)
    for step in range(3):
        training.loss(step).backward()
        training.plain_backward(step)
        gradients: list[Any] = [parameter.grad for parameter in training.model.parameters()]
        if api == "fully_shard":
            gradients = [gradient.to_local() for gradient in gradients]
        total = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        dist.all_reduce(total)
        for gradient in gradients:
            gradient.mul_(0.01 / total.sqrt())
        plain = torch.cat([parameter.grad.flatten() for parameter in training.plain.parameters()]).norm()
        for parameter in training.plain.parameters():
            parameter.grad.mul_(0.01 / plain)
        training.update()
    training.check()


class Measured(Net):
    """All-reduces a measure of its input, if it is sharded."""

    is_sharded = True

    def forward(self, x: Tensor, num_layers: int | None = None) -> Tensor:
        if self.is_sharded:
            dist.all_reduce(x.detach().mean())
        return super().forward(x)


@pytest.mark.spec("HEALTHY-01")
@healthy(2)
def test_a_program_may_issue_its_own_collectives(api: str) -> None:
    """The program issues its own collectives on the default group in forward, in backward and between the calls."""
    training = Training(api, Measured())
    training.plain.is_sharded = False
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
@healthy(2)
def test_threads_may_evaluate(api: str) -> None:
    """All ranks evaluate the sharded model in another thread, while a second thread runs a plain model."""
    training, plain, is_over = Training(api), Net(), threading.Event()

    def serve() -> None:
        while not is_over.wait(0.01):
            evaluated(plain)

    with ThreadPoolExecutor() as threads:
        threads.submit(serve)
        try:
            for step in range(2):
                training.step(step)
                found = threads.submit(evaluated, training.model).result()
                torch.testing.assert_close(found, evaluated(training.plain))
        finally:
            is_over.set()
    training.check()


@torch.no_grad()
def evaluated(model: nn.Module) -> Tensor:
    out: Tensor = model(batch(dist.get_rank(), 7))
    return out


@pytest.mark.spec("HEALTHY-01")
@healthy(2)
def test_a_thread_may_save_while_training_continues(api: str) -> None:
    """A thread writes a state dict to a file while training continues."""
    training = Training(api)
    training.step(0)
    expected = copy.deepcopy(training.plain.state_dict())
    state = {name: value.clone() for name, value in state_dict_of(training.model).items()}
    with tempfile.TemporaryFile() as file:

        def save() -> None:
            time.sleep(0.2)
            torch.save(state, file)

        with ThreadPoolExecutor() as threads:
            saved = threads.submit(save)
            for step in range(1, 4):
                training.step(step)
            saved.result()
        file.seek(0)
        torch.testing.assert_close(torch.load(file), dict(expected))
    training.check()


@pytest.mark.spec("HEALTHY-01")
@healthy(2)
def test_a_rank_may_start_processes(api: str) -> None:
    """Rank 1 starts a subprocess and forks, with SIGTERM for one of the children, while both ranks train."""
    training = Training(api)
    training.step(0)
    for step in range(1, 3):
        if dist.get_rank() == 1:
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
@healthy(2)
def test_a_rank_may_be_late_in_every_step_and_no_step_communicates_more(api: str) -> None:
    """60 steps, in which rank 1 is late by 3 ms at one of three places."""
    training = Training(api, Net(1))
    late, sent = 0.003 * dist.get_rank(), []
    for step in range(60):
        before = training.num_sent()
        time.sleep(late * (step % 3 == 0))
        loss = training.loss(step)
        time.sleep(late * (step % 3 == 1))
        loss.backward()
        time.sleep(late * (step % 3 == 2))
        training.plain_backward(step)
        training.update()
        sent.append(training.num_sent() - before)
    assert set(sent[10:]) == {sent[10]}, sent
    training.check()


@pytest.mark.spec("HEALTHY-05")
@pytest.mark.parametrize("transport", ["messages", "by size", "collectives"])
@healthy(2, apis=None)
def test_a_rank_may_all_gather_several_units_before_it_sends(transport: str) -> None:
    """Rank 0 issues all-gathers of three units of different sizes before rank 1, which waits for a message."""
    if transport == "by size":
        # The default, which depends on the size of a message.
        os.environ.pop("MINIFSDP_TRANSPORT", None)
    else:
        os.environ["MINIFSDP_TRANSPORT"] = transport
    # A new group has issued no collective of these sizes.
    mesh, sizes = DeviceMesh.from_group(dist.new_group([0, 1]), "cpu"), (3, 5, 8)
    units = [fully_shard(nn.Linear(size, size), mesh=mesh) for size in sizes]
    for step in range(2):
        received = batch(1, step)
        if dist.get_rank() == 1:
            received.zero_()
            dist.recv(received, 0)
        handles = [unit.unshard(async_op=True) for unit in units]
        if dist.get_rank() == 0:
            dist.send(received, 1)
        assert torch.equal(received, batch(1, step))
        for handle, unit, size in zip(handles, units, sizes, strict=True):
            handle.wait()
            unit(torch.ones(2, size)).sum().backward()


@pytest.mark.spec("HEALTHY-03")
@healthy(4)
def test_stages_of_a_pipeline_may_send_to_each_other(api: str) -> None:
    """Two stages of a pipeline, each sharded over a group of its own, send activations and gradients to each other."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    rank = dist.get_rank()
    number, other = rank // 2, (rank + 2) % 4
    torch.manual_seed(0)
    plains = [Net(1), Net(2)]
    stage = Training(api, plains[number], group=groups[number])
    plains[number] = stage.plain
    optimizer = torch.optim.SGD(nn.Sequential(*plains).parameters(), lr=0.1)
    for step in range(3):
        if number == 0:
            out = stage.model(batch(rank, step))
            dist.send(out.detach(), other)
            gradient = torch.empty_like(out)
            dist.recv(gradient, other)
            out.backward(gradient)
        else:
            x = torch.empty(4, WIDTH)
            dist.recv(x, other)
            stage.model(x.requires_grad_()).square().mean().backward()
            assert x.grad is not None
            dist.send(x.grad, other)
        stage.optimizer.step()
        stage.optimizer.zero_grad()
        for of_rank in range(2):
            (nn.Sequential(*plains)(batch(of_rank, step)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    stage.check()


@pytest.mark.spec("HEALTHY-03")
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
            for number in range(3 if dist.get_rank() < 2 else 0):
                training.model(batch(dist.get_rank() % 2, number))
    training.check()


@pytest.mark.spec("SD-FULL-10")
@healthy(2, apis=None)
def test_rank_0_may_load_a_checkpoint_into_the_plain_module_before_wrapping() -> None:
    checkpoint = Net().state_dict()
    torch.manual_seed(4 + dist.get_rank())
    net = Net()
    if dist.get_rank() == 0:
        net.load_state_dict(checkpoint)
    training = Training("wrapper", net, sync_module_states=True)
    training.plain.load_state_dict(checkpoint)
    training.check()

"""Runs a random program on the simulated device, and checks it for races (``races`` of ``spec_tests/random_programs``).

`finding_of` trains as rank ``program.rank``, with fake ranks as the others, and logs all operators. Then it checks that
no accesses race, and that the results (parameters, gradients, losses, state dicts and all other tensors that the user
reads) are equal bit by bit in other orders that the streams allow. No reference is needed. So such a program can also
unshard and reshard manually, replace ``p.data``, set any switch of `FSDPModule`, or run the optimizer inside backward.
The user only stops the CPU if necessary. A stop orders all later operations after it, so it could hide a missing wait.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from minifsdp.cases import written_weights
from spec_tests import subject
from spec_tests.harness import device, simulated, worker
from spec_tests.random_programs.description import Call, Description, calls_of
from spec_tests.random_programs.front_ends import PRECISIONS
from spec_tests.random_programs.judge import Verdict
from spec_tests.random_programs.modules import Kept, Piece, batch_on_cpu, loss_of, optimizer_for
from spec_tests.random_programs.player import local
from spec_tests.random_programs.sides import MEANINGLESS, ByFunction, ByWrapper, Sharded, whole_of

WORLD = simulated.WORLD
OTHER_DEVICE = 1
NUM_SCHEDULES = 8
# By name in a description: a method of a unit, and its argument.
SWITCHES: dict[str, tuple[str, Any]] = {
    "keep_after_backward": ("set_reshard_after_backward", False),
    "keep_after_forward": ("set_reshard_after_forward", False),
    "free_after_forward": ("set_reshard_after_forward", True),
    "unused": ("set_reduce_scatter_unused_params", True),
    "divide": ("set_gradient_divide_factor", 3.0),
    "no_gather": ("set_unshard_in_backward", False),
}


def judged(programs: list[Description], num_schedules: int = NUM_SCHEDULES) -> Iterator[Verdict]:
    """Runs the programs on the simulated device of this process, and yields a verdict for each."""
    for program in programs:
        yield Verdict(program, finding_of(program, num_schedules))


def finding_of(program: Description, num_schedules: int) -> str | None:
    """The error that a program has in its own order, or in one of ``num_schedules`` others."""
    _become(program.num_ranks, program.rank)
    WORLD.begin()
    log = simulated.Log()
    finding = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = (_ByFunction if program.is_per_parameter else _ByWrapper)(program)
            WORLD.current_index = OTHER_DEVICE if program.elsewhere else 0
            # Fake ranks have no values to compare with those that a forward has written.
            with log, mock.patch.object(written_weights, "_check_equal"):
                _make_calls(run)
        # The user reads the results at the end, after a stop.
        verdict = log.judge([*map(local, run.model.parameters()), *run.seen], num_schedules)
        if verdict.different:
            finding = f"other bits in the schedules {verdict.different}"
    except Exception:
        finding = traceback.format_exc()
    if WORLD.races:
        finding = "\n".join([*map(str, WORLD.races.values()), finding or ""])
    run = None
    WORLD.current_index = 0
    return finding


def _become(num_ranks: int, rank: int) -> None:
    """Makes this process rank ``rank`` of ``num_ranks``; the others are fake ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()
    worker.forget_meshes()
    # Collect the objects of an earlier run that was interrupted. Freezing excludes imported modules from collections.
    gc.collect()
    gc.freeze()
    dist.init_process_group("simulated", rank=rank, world_size=num_ranks, store=simulated.STORE_OF_ONE_PROCESS)


def _make_calls(run: _Racing) -> None:
    """Makes all calls, or as many as are possible for the model."""
    try:
        for call in calls_of(run.d):
            getattr(run, call["do"])(call)
            if run.is_over:
                break
    except RuntimeError as error:
        if MEANINGLESS not in str(error):
            raise


class _Racing(Sharded):
    """The sharded model of a user who does other things at the same time.

    Attributes:
        seen: copies of the tensors that the user has read.
        batches: inputs and tokens on the device, by number.
    """

    def __init__(self, d: Description) -> None:
        super().__init__(d)
        self.seen: list[Tensor] = []
        self.stream = torch.get_device_module(device()).Stream(device())
        self.stream.name = "stream of the user"
        # Lists of tensors do not change the versions of simulated tensors.
        self.optimizer = optimizer_for(replace(d, seed=1), self.model)
        kind = torch.amp.GradScaler if d.is_per_parameter else subject.ShardedGradScaler
        self.scaler: Any = kind(device().type, init_scale=2.0**8, enabled=d.scales)
        if d.stepping == "in_backward":
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(_stepper(parameter))
        # Copied before training begins, because copies from memory that is not pinned stop the CPU.
        self.batches = {
            call["batch"]: tuple(tensor.to(device()) for tensor in batch_on_cpu(d, call["batch"], d.rank))
            for call in calls_of(d)
            if "batch" in call
        }

    def see(self, *tensors: Tensor) -> None:
        """The user copies tensors immediately, on their own device."""
        self.seen.extend(tensor.detach().clone() for tensor in tensors)

    def inputs(self, call: Call, kept: Kept | None = None) -> tuple[Tensor, Tensor]:
        is_trained = call["do"] in ("forward", "break_off")
        if self.d.batches == "device" or not is_trained:
            x, tokens = self.batches[call["batch"]]
        else:
            x, tokens = batch_on_cpu(self.d, call["batch"], self.d.rank)
            if self.d.batches == "pinned":
                x, tokens = x.pin_memory(), tokens.pin_memory()
        if self.d.tracks_input and is_trained:
            x = x.detach().requires_grad_()
        # Only the outermost unit casts its inputs.
        low = PRECISIONS[self.d.precision].get("param_dtype") if "part" in call else None
        self.given = (x if low is None else x.to(low)), tokens
        return self.given

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Runs the block on the stream of the user, if there is one, between the work before and after it."""
        if not self.d.aside:
            yield
            return
        module = torch.get_device_module(device())
        outer = module.current_stream(device())
        self.stream.wait_stream(outer)
        with module.stream(self.stream):
            yield
        outer.wait_stream(self.stream)

    def forward(self, call: Call) -> Tensor:
        with self.aside():
            output = self._output(call)
            self.pending.append(loss_of([output]))
        if self.d.batches != "device":
            # The next batch is read into the same memory.
            for tensor in self.given:
                tensor.data.zero_()
        return output

    def differentiate(self, loss: Tensor) -> None:
        if self.d.reads:
            loss.item()
        self.see(loss)
        self.scaler.scale(loss).backward()

    def read_gradients(self, call: Call) -> None:
        self.see(*(local(p.grad) for p in self.model.parameters() if p.grad is not None))

    def breaks_off_in_sync(self) -> bool:
        return self.d.micro_batches[0]

    def evaluate(self, call: Call) -> Tensor:
        output = super().evaluate(call)
        self.see(output)
        if call.get("is_recorded") and self.d.offload:
            # A backward could follow, so copies of the pinned shards can still be running. The user must read the
            # output before writing to the shards, as an optimizer does. The same holds in torch.
            output.sum().item()
        return output

    def _has_gradients(self) -> bool:
        """Whether there is anything to step on. The scaler raises an error if a step has no gradients."""
        return self.optimizer is not None and (
            not self.d.scales
            or any(p.grad is not None for group in self.optimizer.param_groups for p in group["params"])
        )

    def clip(self, call: Call) -> Tensor | None:
        if not self._has_gradients():
            return None
        self.scaler.unscale_(self.optimizer)
        self.see(norm := super().clip(call))
        return norm

    def step(self, call: Call) -> None:
        if self._has_gradients() and self.d.stepping != "in_backward":
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.changed()


def _stepper(parameter: Tensor) -> Any:
    optimizer = torch.optim.SGD([parameter], lr=1 / 32)

    def step(_: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


class _ByWrapper(_Racing, ByWrapper):
    def save(self, call: Call) -> None:
        values = self.state(call["form"]).values()
        shards = [value.local_shards() if hasattr(value, "local_shards") else [value] for value in values]
        self.see(*(shard.tensor if hasattr(shard, "tensor") else shard for row in shards for shard in row))


class _ByFunction(_Racing, ByFunction):
    def __init__(self, d: Description) -> None:
        super().__init__(d)
        for number, unit in enumerate(self.modules if d.ahead else []):
            unit.set_modules_to_forward_prefetch(self.modules[number + 1 :][: d.ahead])
            unit.set_modules_to_backward_prefetch(self.modules[:number][::-1][: d.ahead])

    def begin_step(self, call: Call) -> None:
        if self.d.stepping == "event" and call["step"] > 0:
            event = torch.get_device_module(device()).current_stream(device()).record_event()
            self.model.set_post_optim_event(event)
        super().begin_step(call)
        if call["step"] == int(self.d.late):
            self._set_switches()

    def _set_switches(self) -> None:
        for name in self.d.switches:
            method, value = SWITCHES[name]
            for unit in self.modules:
                # The backward of an embedding needs the indices of the rows, but not their values.
                if name != "no_gather" or (isinstance(unit, Piece) and unit.node.kind == "embedding"):
                    getattr(unit, method)(value)

    def unshard_by_hand(self, call: Call) -> None:
        chosen = self.modules[self.d.seed % len(self.modules)]
        if self.d.by_hand == "between":
            chosen.reshard()
            return
        units = self.modules if self.d.by_hand == "all" else [chosen]
        handles = [unit.unshard(async_op=self.d.by_hand != "unshard") for unit in units]
        if self.d.by_hand == "async_and_wait":
            handles[0].wait()
        if self.d.by_hand == "in_vain":
            chosen.reshard()

    def sync(self, call: Call) -> None:
        switch = self.model.set_requires_all_reduce if self.d.sums_late else self.model.set_requires_gradient_sync
        switch(call["value"])
        self.model.set_is_last_backward(call["value"] or not self.d.goes_on)

    def save(self, call: Call) -> None:
        values = self.model.state_dict().values()
        self.see(*(whole_of(value) if call["form"] == "full" else value.to_local() for value in values))

"""Runs a scenario on the simulated device, and checks the run.

`play` trains as rank ``scenario.rank``, with fake ranks as the others, and logs all operators. Then it makes two
checks: no accesses race, and the results (parameters, gradients, losses, state dicts and all other tensors that the
user reads) are equal bit by bit in other orders that the streams allow. The user in a scenario only stops the CPU if
necessary. A stop orders all later operations after it, so it could hide a missing wait.

The `Outcome` has the finding of a scenario. `simplest` removes everything from a failing scenario that can be removed.
"""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import minifsdp
from spec_tests.harness import device, simulated, worker
from spec_tests.properties.build import (
    PRECISIONS,
    Bang,
    Groups,
    Piece,
    is_per_parameter,
    output_of,
    plain_model,
    sharded,
)
from spec_tests.properties.build import batch_on_cpu as batch
from spec_tests.properties.oracle import loss_of
from spec_tests.properties.run import EVALUATION, MEANINGLESS
from spec_tests.streams.scenario import Scenario, simpler, to_json
from spec_tests.streams.user import HOOKS, edit, optimizer_for, set_switches, state_of

__all__ = ["Outcome", "play", "report", "simplest"]

WORLD = simulated.WORLD
OTHER_DEVICE = 1


@dataclass(frozen=True)
class Outcome:
    """The outcome of a scenario.

    Attributes:
        finding: the error that was found; ``None`` if there is none.
        num_operations: number of operations in the program.
        num_schedules: number of schedules in which it was executed again.
        seconds: total duration.
    """

    finding: str | None
    num_operations: int
    num_schedules: int
    seconds: float


def play(scenario: Scenario, num_schedules: int, seed: int = 0) -> Outcome:
    """Runs a scenario on the simulated device of this process, and checks it."""
    begin = time.monotonic()
    _become(scenario.run.num_ranks, scenario.rank)
    WORLD.begin()
    log = simulated.Log()
    finding, num_done = None, 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = _Run(scenario)
            WORLD.current_index = OTHER_DEVICE if scenario.elsewhere else 0
            with log:
                run.train()
        # The user reads the results at the end, after a stop.
        verdict = log.judge([*run.parameters(), *run.seen], num_schedules, seed)
        num_done = verdict.num_schedules
        if verdict.different:
            finding = f"other bits in the schedules {verdict.different}"
    except Exception:
        finding = traceback.format_exc()
    if WORLD.races:
        finding = "\n".join([*map(str, WORLD.races.values()), finding or ""])
    run = None
    WORLD.current_index = 0
    return Outcome(finding, len(log.operations), num_done, time.monotonic() - begin)


def _become(num_ranks: int, rank: int) -> None:
    """Makes this process rank ``rank`` of ``num_ranks``; the others are fake ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()
    worker.forget_meshes()
    # Collect the objects of an earlier run that was interrupted. Freezing excludes imported modules from collections.
    gc.collect()
    gc.freeze()
    dist.init_process_group("simulated", rank=rank, world_size=num_ranks, store=simulated.INVENTED_STORE)


class _Run:
    """One training run.

    Attributes:
        seen: copies of the tensors that the user has read.
        batches: inputs and tokens on the device, by step and number.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.s, self.d = scenario, scenario.run
        self.seen: list[Tensor] = []
        groups: Groups = {}
        plain = plain_model(self.d)
        self.clock = plain.clock
        self.model: Any = sharded(self.d, plain, groups, **self._options())
        self.units: list[Any] = [m for m in self.model.modules() if isinstance(m, minifsdp.FSDPModule)]
        self._name_neighbours()
        self._use_hook()
        self.optimizer = optimizer_for(scenario, self.model)
        kind = torch.amp.GradScaler if is_per_parameter(self.d) else minifsdp.ShardedGradScaler
        self.scaler: Any = kind(device().type, init_scale=2.0**8, enabled=scenario.scales)
        # Copied before training begins, because copies from memory that is not pinned stop the CPU.
        self.batches = {
            (step, index): tuple(tensor.to(device()) for tensor in batch(self.d, step, index, scenario.rank))
            for step in range(self.d.steps)
            for index in (*range(len(self.d.micro_batches) * self.d.forwards), EVALUATION)
        }

    def _options(self) -> dict[str, Any]:
        if not is_per_parameter(self.d):
            return {}
        options: dict[str, Any] = {}
        if self.d.offload:
            options["offload_policy"] = minifsdp.CPUOffloadPolicy(pin_memory=self.s.pins)
        if self.s.among:
            options["reshard_after_forward"] = self.s.among
        return options

    def _name_neighbours(self) -> None:
        for number, unit in enumerate(self.units if self.s.ahead else []):
            unit.set_modules_to_forward_prefetch(self.units[number + 1 :][: self.s.ahead])
            unit.set_modules_to_backward_prefetch(self.units[:number][::-1][: self.s.ahead])

    def _use_hook(self) -> None:
        if not self.s.hook:
            return
        if not is_per_parameter(self.d):
            self.model.register_comm_hook(None, HOOKS[self.s.hook])
            return
        stream = torch.get_device_module(device()).Stream(device())
        for unit in self.units:
            own = stream if self.s.hook == "async" and not self.d.is_hybrid else None
            unit.set_all_reduce_hook(lambda reduced: reduced.mul_(0.5), stream=own)

    def parameters(self) -> Iterable[Tensor]:
        """The local shards of the optimizer's parameters."""
        return (_local(parameter) for parameter in self.model.parameters())

    def see(self, *tensors: Tensor) -> None:
        """The user copies tensors immediately, on their own device."""
        self.seen.extend(tensor.detach().clone() for tensor in tensors)

    # --- training ---

    def train(self) -> None:
        """Runs all steps, or as many as are possible for the model."""
        try:
            for step in range(self.d.steps):
                self.clock.step = step
                if not self._step(step):
                    break
        except RuntimeError as error:
            if MEANINGLESS not in str(error):
                raise

    def _step(self, step: int) -> bool:
        s, d = self.s, self.d
        if step == int(s.late):
            set_switches(s, self.model, self.units)
        if d.apart >= 0:
            self._evaluate(step, d.apart)
        if d.bomb:
            self._break_off(step)
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=d.clears)
        for number in range(len(d.micro_batches)):
            self._by_hand()
            if not self._micro_batch(step, number):
                # No backward follows, so strategies that keep units unsharded for it still do so.
                return False
        self.see(*(_local(p.grad) for p in self.model.parameters() if p.grad is not None))
        if d.evaluates == "forgotten":
            self._evaluate(step, is_recorded=True)
        self._optimize()
        if d.evaluates == "after":
            self._evaluate(step)
        edit(s, self.model, self.units, self.see)
        if s.state:
            self.see(*state_of(s, self.model))
        if s.optimizer == "event" and self.units:
            self.model.set_post_optim_event(torch.get_device_module(device()).current_stream(device()).record_event())
        return True

    def _by_hand(self) -> None:
        if not self.s.by_hand or self.s.by_hand == "between":
            return
        chosen = self.units[self.d.seed % len(self.units)]
        handles = [
            unit.unshard(async_op=self.s.by_hand != "unshard")
            for unit in (self.units if self.s.by_hand == "all" else [chosen])
        ]
        if self.s.by_hand == "async_and_wait":
            handles[0].wait()
        if self.s.by_hand == "in_vain":
            chosen.reshard()

    def _micro_batch(self, step: int, number: int) -> bool:
        s, d = self.s, self.d
        with contextlib.nullcontext() if d.micro_batches[number] else self._without_sync():
            outputs = [self._forward(step, number * d.forwards + i) for i in range(d.forwards)]
            if s.by_hand == "between":
                self.units[d.seed % len(self.units)].reshard()
            if d.evaluates == "between":
                self._evaluate(step)
            losses = [loss_of([output]) for output in outputs] if s.apart else [loss_of(outputs)]
            for loss in losses:
                if not loss.requires_grad:
                    return False
                if s.reads:
                    loss.item()
                self.see(loss)
                self.scaler.scale(loss).backward()
        return True

    def _forward(self, step: int, index: int) -> Tensor:
        if self.s.batches == "device":
            x, tokens = self.batches[step, index]
        else:
            x, tokens = batch(self.d, step, index, self.s.rank)
            if self.s.batches == "pinned":
                x, tokens = x.pin_memory(), tokens.pin_memory()
        if self.d.tracks_input:
            x = x.detach().requires_grad_()
        output = output_of(self.d.model, self.model, (x, tokens))
        if self.s.batches != "device":
            # The next batch is read into the same memory.
            x.data.zero_()
            tokens.zero_()
        return output

    @contextlib.contextmanager
    def _without_sync(self) -> Any:
        if not is_per_parameter(self.d):
            with self.model.no_sync():
                yield
            return
        switch = self.model.set_requires_all_reduce if self.s.sums_late else self.model.set_requires_gradient_sync
        switch(False)
        self.model.set_is_last_backward(not self.s.goes_on)
        try:
            yield
        finally:
            switch(True)
            self.model.set_is_last_backward(True)

    def _break_off(self, step: int) -> None:
        self.clock.bomb = (self.d.bomb, self.d.bomb_at)
        with contextlib.suppress(Bang), contextlib.nullcontext() if self.d.micro_batches[0] else self._without_sync():
            loss = loss_of([self._forward(step, EVALUATION)])
            if loss.requires_grad:
                loss.backward()
        self.clock.bomb = None
        if self.s.resets:
            self.model.reset_iter_state()

    def _evaluate(self, step: int, part: int | None = None, *, is_recorded: bool = False) -> None:
        d, model, node = self.d, self.model, self.d.model
        x, tokens = self.batches[step, EVALUATION]
        if part is not None:
            root = next(m for m in model.modules() if isinstance(m, Piece))
            model, node = root.parts[part], node.children[part]
            # Only the outermost unit casts its inputs.
            x = x.to(PRECISIONS[d.precision].get("param_dtype", x.dtype))
        self.model.eval()
        with torch.set_grad_enabled(is_recorded):
            output = output_of(node, model, (x, tokens))
        self.see(output)
        if is_recorded and d.offload:
            # A backward could follow, so copies of the pinned shards can still be running. The user must read the
            # output before writing to the shards, as an optimizer does. The same holds in torch.
            output.sum().item()
        self.model.train()

    def _optimize(self) -> None:
        if self.optimizer is None:
            return
        if self.s.scales and all(p.grad is None for group in self.optimizer.param_groups for p in group["params"]):
            return  # The scaler raises an error if a step has no gradients.
        if self.d.clips:
            self.scaler.unscale_(self.optimizer)
            clip: Callable[..., Tensor] = self.model.clip_grad_norm_
            self.see(clip(0.1))
        if self.s.optimizer != "in_backward":
            self.scaler.step(self.optimizer)
            self.scaler.update()


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


# --- findings ---


def simplest(scenario: Scenario, num_schedules: int, seconds: float = 60.0) -> Scenario:
    """Simplifies a failing scenario until no simpler one fails, or until the time is over."""
    end = time.monotonic() + seconds
    while True:
        for candidate in simpler(scenario):
            if time.monotonic() > end:
                return scenario
            if play(candidate, num_schedules).finding is not None:
                scenario = candidate
                break
        else:
            return scenario


def report(scenario: Scenario, num_schedules: int) -> str:
    """The report of a failing scenario: the finding, and the command that reproduces it."""
    finding = play(scenario, num_schedules).finding
    return f"{finding}\nTo see it again:\npython -m spec_tests.streams.hunt --replay '{to_json(scenario)}'"

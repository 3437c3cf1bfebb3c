"""The program of a rank: trains each description, and compares with one process after every half step.

A difference is recorded and not raised, because the other ranks do not see it and continue, so this rank must continue
as well. After each description the ranks exchange whether any of them found a difference. If an exception on one rank
prevents this exchange, the others hang, and the pool terminates them.

Shards are compared locally, without an all-gather: each rank computes its expected shards from the oracle's full
tensors with its own code. This detects a library that splits tensors wrongly and concatenates them equally wrongly,
and a comparison needs no communication.

Tolerances: with at most two ranks, and no parameter used more than twice in a backward, every sum has one or two terms.
Such a sum does not depend on the order of its terms, so the comparison is bitwise. Reentrant checkpointing runs a
backward inside the backward, after which a unit may be reduced before its gradient is complete. Two uses are then two
sums over ranks, so the limit is one use, or none if there are unreduced gradients. All other runs use float64, where
the effect of the order is far below that of any defect, even in a deep model: `DOUBLE` of ``oracles/compare.py``. Mixed
precision uses float32 and `LOW_PRECISION`. The absolute tolerance is relative to the largest element, because the
rounding of a large term in a sum also affects small results.
"""

from __future__ import annotations

import contextlib
import gc
import json
import pathlib
import traceback
import warnings
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spec_tests.harness import device
from spec_tests.oracles.compare import BIT_EQUAL, DOUBLE, FLOAT, LOW_PRECISION, Tolerance
from spec_tests.properties.build import (
    PRECISIONS,
    Bang,
    Groups,
    Piece,
    batch,
    is_per_parameter,
    output_of,
    parameters_here,
    plain_model,
    sharded,
)
from spec_tests.properties.description import Description, Node, from_json, num_uses, walk
from spec_tests.properties.oracle import Oracle, loss_of, optimizer_for
from spec_tests.properties.saving import load, save

__all__ = ["tolerance_of", "train_all"]

# The number of the batch of an evaluation, which is larger than those of the micro-batches.
EVALUATION = 50
# PyTorch's error for a reentrant checkpoint around modules without gradients, in the plain model; the run ends there.
MEANINGLESS = "this checkpoint() is not necessary"
# A unit that runs in every other step only confuses a prefetch. The next three are also in ``pyproject.toml``.
EXPECTED_WARNINGS = (
    "rank .*: forward_prefetch expects the units to run in the order",
    "None of the inputs have requires_grad=True",
    "The .grad attribute of a Tensor that is not a leaf Tensor",
    "Please use DTensor instead",
    # From the first module, whose input is the batch.
    "Full backward hook is firing when gradients are computed with respect to module outputs",
    "clip_grad_norm_ was called on rank . with no gradients",
)


def train_all(texts: list[str], folder: str) -> None:
    """Trains and compares these descriptions, given as JSON. Every rank must call it with the same ones.

    Writes a file for each rank to ``folder``, named by its number. It has ``null`` or the failure for each description.
    """
    groups: Groups = {}
    found: list[str | None] = []
    for text in texts:
        finding = _try_out(text, groups)
        failed = torch.tensor([0.0 if finding is None else 1.0], device=device())
        dist.all_reduce(failed)
        if float(failed):
            # Objects of the failed run must not affect the next one.
            gc.collect()
        found.append(finding or ("" if float(failed) else None))
    pathlib.Path(folder, str(dist.get_rank())).write_text(json.dumps(found))


def _try_out(text: str, groups: Groups) -> str | None:
    description = from_json(text)
    try:
        with warnings.catch_warnings(), _default_dtype(tolerance_of(description)):
            warnings.simplefilter("error")
            for expected in EXPECTED_WARNINGS:
                warnings.filterwarnings("ignore", f".*{expected}")
            findings = _Run(description, groups).train()
    except Exception:
        # Also printed: if the other ranks continue and hang, this is the only output.
        traceback.print_exc()
        return traceback.format_exc()
    return findings[0] if findings else None


@contextlib.contextmanager
def _default_dtype(tolerance: Tolerance) -> Any:
    torch.set_default_dtype(torch.float64 if tolerance is DOUBLE else torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


# The pool finds the undecorated function of a test under this name.
train_all.body_on_a_rank = train_all  # type: ignore[attr-defined]


def tolerance_of(description: Description) -> Tolerance:
    """The tolerance for comparing both runs."""
    most = 2
    if any(node.checkpoint == "reentrant" for node, _ in walk(description.model)):
        most = 1 if all(description.micro_batches) else 0
    # Per-parameter gradients wait in the dtype of the reduction, those of the oracle in the compute dtype.
    waits = is_per_parameter(description) and not all(description.micro_batches)
    rounds = waits and "summed" in description.precision
    if waits:
        # They are reduced when the inputs of the last call are reached; the other calls add a second reduction. This is
        # the same in torch.
        most = min(most, 0 if description.forwards > 1 else 1)
    if description.num_ranks <= 2 and num_uses(description) <= most and not rounds:
        return BIT_EQUAL
    return DOUBLE if description.precision == "full" else LOW_PRECISION


class _Run:
    def __init__(self, description: Description, groups: Groups) -> None:
        self.d, self.rank, self.groups = description, dist.get_rank(), groups
        self.findings: list[str] = []
        self.is_trained = True
        self.inputs: dict[int, Tensor] = {}
        self.tolerance = tolerance_of(description)
        self.oracle = Oracle(description, self.rank)
        self._make(description)

    def _make(self, description: Description) -> None:
        """Creates a sharded model and its optimizer."""
        plain = plain_model(description)
        self.clock = plain.clock
        self.model: Any = sharded(description, plain, self.groups)
        self.optimizer = optimizer_for(description, self.model)
        # Between forward and backward, modules may have other parameters.
        self.owned = dict(parameters_here(self.model))

    def train(self) -> list[str]:
        """Trains. Returns the differences in the order in which they were found."""
        d = self.d
        self._compare_values("before the first step")
        for step in range(d.steps):
            if not self._step(step):
                break
        if d.saves and self.is_trained:
            self._compare_state_dicts()
        if d.resumes and self.is_trained and self.optimizer is not None:
            self._compare_with_resumed(d.steps, self.optimizer)
        return self.findings

    def _step(self, step: int) -> bool:
        """One step, sharded and in one process. Returns whether there was anything to train."""
        d = self.d
        self.clock.step = step
        if d.apart >= 0:
            self._evaluate(step, d.apart)
        if d.bomb:
            self._break_off(step)
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=d.clears)
        try:
            expected = self.oracle.backward(step)[self.rank]
        except RuntimeError as error:
            if MEANINGLESS not in str(error):
                raise
            return False
        losses = self._micro_batches(step)
        self._compare(f"losses of step {step}", torch.tensor(losses), torch.tensor(expected))
        if not self.is_trained:
            # No parameter gets a gradient here, and units that strategies keep for a backward stay unsharded.
            return False
        self._compare_gradients(f"in step {step}")
        self._compare_input_gradients(f"in step {step}")
        if d.clips:
            norm = self.model.clip_grad_norm_(1e9)
            norm_here = torch.tensor(self.oracle.gradient_norm())
            # Norms of shards are added in another order than norms of parameters.
            self._compare(f"norm in step {step}", norm.cpu().to(norm_here.dtype), norm_here, self._at_least(FLOAT))
        if d.evaluates == "forgotten":
            self._evaluate(step, is_recorded=True)
        if self.optimizer is not None:
            self.optimizer.step()
        self.oracle.optimize()
        self._compare_values(f"after step {step}")
        if d.evaluates == "after":
            self._evaluate(step)
        if d.edits:
            self._edit()
            self._compare_values(f"edited after step {step}")
        return True

    def _compare_with_resumed(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        """Compares a step of this model with the same step of a model loaded from a state saved before it.

        This order matters: if the saved state shared memory with the model, the step would change it.
        """
        missing = {p for p in self.model.parameters() if p.requires_grad} - optimizer.state.keys()
        if is_per_parameter(self.d) and (missing or not optimizer.state):
            # torch's functions require a state for each trained parameter, even for one that never had a gradient, and
            # they do not send the states of an optimizer without states.
            self.d = replace(self.d, resumes="own")
        saved = save(self.d, self.model, optimizer)
        if not self._step(step):
            return
        uninterrupted = {name: _local(parameter).detach().clone() for name, parameter in self.owned.items()}
        self._make(replace(self.d, seed=self.d.seed + 1))
        assert self.optimizer is not None
        load(self.d, self.model, self.optimizer, saved)
        self.clock.step = step
        self._micro_batches(step)
        self.optimizer.step()
        for name, parameter in self.owned.items():
            what = f"value of {name!r} after step {step}, resumed from a {self.d.resumes} state"
            self._compare(what, _local(parameter), uninterrupted[name], BIT_EQUAL)

    def _break_off(self, step: int) -> None:
        d = self.d
        self.clock.bomb = (d.bomb, d.bomb_at)
        # Per-parameter gradients that wait for reduction are hidden from `zero_grad()`; the same is true in torch.
        synchronises = d.micro_batches[0] or is_per_parameter(d)
        try:
            with contextlib.suppress(Bang), contextlib.nullcontext() if synchronises else self._no_sync():
                loss = loss_of([output_of(d.model, self.model, batch(d, step, EVALUATION, self.rank))])
                if loss.requires_grad:
                    loss.backward()
        except RuntimeError as error:
            # The following step detects this in the plain model.
            if MEANINGLESS not in str(error):
                raise
        self.clock.bomb = None

    @torch.no_grad()
    def _edit(self) -> None:
        self.oracle.edit()
        for module in self.model.modules():
            if is_per_parameter(self.d) and hasattr(module, "reshard"):
                # After a forward without a backward, the modules may still have unsharded parameters.
                module.reshard()
        with self.model.summon_full_params(self.model) if not is_per_parameter(self.d) else contextlib.nullcontext():
            for parameter in self.model.parameters():
                parameter.mul_(0.5)

    def _compare_state_dicts(self) -> None:
        ours, expected = self.model.state_dict(), self.oracle.model.state_dict()
        if list(ours) != list(expected):
            self.findings.append(f"state dict: {list(ours)} here, expected {list(expected)}")
            return
        for name, tensor in ours.items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            self._compare(f"{name!r} in the state dict", whole, expected[name])

    def _at_least(self, tolerance: Tolerance) -> Tolerance:
        return self.tolerance if self.tolerance is LOW_PRECISION else tolerance

    def _micro_batches(self, step: int) -> list[float]:
        """Forward and backward of each micro-batch. Returns their losses."""
        return [self._micro_batch(step, number) for number in range(len(self.d.micro_batches))]

    def _micro_batch(self, step: int, number: int) -> float:
        d = self.d
        with contextlib.nullcontext() if d.micro_batches[number] else self._no_sync():
            outputs = [self._forward(step, number * d.forwards + i) for i in range(d.forwards)]
            loss = loss_of(outputs)
            if d.evaluates == "between":
                self._evaluate(step)
            self.is_trained = loss.requires_grad
            if loss.requires_grad:
                loss.backward()
        return float(loss.detach())

    def _forward(self, step: int, index: int) -> Tensor:
        x, tokens = batch(self.d, step, index, self.rank)
        if self.d.tracks_input:
            x.requires_grad_()
            self.inputs[index] = x
        return output_of(self.d.model, self.model, (x, tokens))

    @contextlib.contextmanager
    def _no_sync(self) -> Any:
        if not is_per_parameter(self.d):
            with self.model.no_sync():
                yield
            return
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    def _evaluate(self, step: int, part: int | None = None, *, is_recorded: bool = False) -> None:
        d = self.d
        model = (
            self.model if part is None else next(m for m in self.model.modules() if isinstance(m, Piece)).parts[part]
        )
        node = d.model if part is None else d.model.children[part]
        x, tokens = batch(d, step, EVALUATION, self.rank)
        if part is not None:
            # Only the outermost unit casts its inputs.
            x = x.to(PRECISIONS[d.precision].get("param_dtype", x.dtype))
        self.model.eval()
        with torch.set_grad_enabled(is_recorded):
            ours = output_of(node, model, (x, tokens))
        self.model.train()
        # During a micro-batch, the values of the oracle are those after the previous step, as in the sharded model.
        before, self.oracle.model.clock.step = self.oracle.model.clock.step, step
        expected = self.oracle.evaluate(step, EVALUATION, self.rank, part)
        self.oracle.model.clock.step = before
        what = "the whole" if part is None else f"part {part}"
        self._compare(f"evaluation of {what} in step {step}", ours, expected)

    # --- comparing ---

    def _compare(self, what: str, ours: Tensor, expected: Tensor, tolerance: Tolerance | None = None) -> None:
        chosen = tolerance or self.tolerance
        # With CPU offload, ours is on the CPU.
        ours, expected = ours.detach().to(expected.device), expected.detach()
        if ours.dtype == expected.dtype and torch.equal(ours, expected):
            return  # the usual case; takes a tenth of the time of the lines below
        try:
            largest = float(expected.abs().max()) if expected.numel() else 0.0
            torch.testing.assert_close(ours, expected, rtol=chosen.rtol, atol=chosen.atol * max(1.0, largest))
        except AssertionError as difference:
            there = f"{difference}\nhere     {ours.tolist()}\nexpected {expected.tolist()}"
            self.findings.append(f"{what} ({chosen.name}): {there}")

    def _compare_values(self, when: str) -> None:
        expected = self._expected({name: p.detach() for name, p in self.oracle.model.named_parameters()})
        if self.owned.keys() != expected.keys():
            self.findings.append(f"parameters: {sorted(self.owned)} here, expected {sorted(expected)}")
            return
        for name, parameter in self.owned.items():
            self._compare(
                f"value of {name!r} {when}", _local(parameter), expected[name].reshape(_local(parameter).shape)
            )

    def _compare_gradients(self, when: str) -> None:
        parameters = dict(self.oracle.model.named_parameters())
        filled = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters.items()}
        expected = self._expected(filled)
        placeholder = self._without_gradient({name: p.grad is None for name, p in parameters.items()})
        for name, parameter in self.owned.items():
            what = f"gradient of {name!r} {when}"
            if parameter.grad is None:
                self._compare(f"{what}, which is not there", torch.zeros_like(expected[name]), expected[name])
            elif name in placeholder and self.d.clears:
                self.findings.append(f"{what} is there: {_local(parameter.grad)}, and nobody has computed any")
            else:
                mine = _local(parameter.grad)
                self._compare(what, mine, expected[name].reshape(_local(parameter).shape))

    def _compare_input_gradients(self, when: str) -> None:
        for index, x in self.inputs.items():
            expected = self.oracle.input_gradients.get((self.rank, index))
            zero = torch.zeros_like(x)
            ours, theirs = (zero if gradient is None else gradient for gradient in (x.grad, expected))
            self._compare(f"gradient of input {index} {when}", ours, theirs)

    def _without_gradient(self, is_absent: dict[str, bool]) -> set[str]:
        """Names that must not have a gradient.

        All parameters of a flat tensor have a gradient, possibly zeros, if one of them has. If some are frozen,
        autograd treats them as trained, so any of them may cause this.
        """
        if is_per_parameter(self.d):
            return {name for name, placeholder in is_absent.items() if placeholder}
        trained = {name: p.requires_grad for name, p in self.oracle.model.named_parameters()}
        units = {unit: names for unit, (_, names) in self.oracle.units.items() if all(is_absent[n] for n in names)}
        units = {unit: names for unit, names in units.items() if len({trained[name] for name in names}) == 1}
        return {name for names in units.values() for name in names} if self.d.originals else set(units)

    # --- expected values on this rank ---

    def _expected(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's shards of full tensors, by the names of the parameters; 1-D, or per parameter."""
        local_shards: dict[str, Tensor] = {}
        for unit, (node, names) in self.oracle.units.items():
            num, index = self._sharers(node)
            if is_per_parameter(self.d):
                local_shards.update({name: _chunk(whole[name], num, index) for name in names})
            elif names:
                rows = _cut([whole[name] for name in names], num, index)
                local_shards.update(zip(names, rows, strict=False) if self.d.originals else {unit: torch.cat(rows)})
        return local_shards

    def _sharers(self, node: Node) -> tuple[int, int]:
        """The number of shards of a unit, and the index of this rank's shard."""
        if (node.strategy or self.d.strategy) == "NO_SHARD" and not is_per_parameter(self.d):
            return 1, 0
        num = self.d.num_ranks // self.d.num_replicas
        return num, self.rank % num


def _local(tensor: nn.Parameter | Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _chunk(tensor: Tensor, num: int, index: int) -> Tensor:
    chunks = tensor.chunk(num)
    return chunks[index] if index < len(chunks) else tensor[:0]


def _cut(tensors: list[Tensor], num: int, index: int) -> list[Tensor]:
    """Concatenates and splits the tensors: the part of each tensor that shard ``index`` contains, and its padding."""
    lengths = [tensor.numel() for tensor in tensors]
    local_shard = -(-sum(lengths) // num)
    padding = tensors[0].new_zeros(local_shard * num - sum(lengths))
    parts, first = [], -index * local_shard
    for tensor in [*tensors, padding]:
        row = tensor.reshape(-1)
        parts.append(row[max(0, -first) : max(0, min(row.numel(), local_shard - first))])
        first += row.numel()
    return parts

"""Measures how far training with each optimizer on shards is from training in one process.

The page "Which optimizers may I use?" has the results, and a test trains again and compares them with the page.

All values are float64, so that a deviation by rounding is smaller than 1e-9, and any other deviation is larger. On two
ranks, shards have different sizes, and one rank has no element of some parameters: see `shapes`.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

import minifsdp
from docs_build.recording import written_optimizers as written
from docs_build.recording.records import of_all_ranks

FSDP = minifsdp.FullyShardedDataParallel
FORMS = ("flat", "original", "fully_shard")
STEPS = 4
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Case:
    """One optimizer.

    Attributes:
        name: as the page shows it.
        make: creates the optimizer for parameters.
        needs: the values from which the update of one element is computed.
        of_shards: creates the optimizer for shards, if that is a different one.
    """

    name: str
    make: Make
    needs: str
    of_shards: Make | None = None


CASES = [
    Case("SGD", lambda p: torch.optim.SGD(p, lr=0.1), "element"),
    Case("SGD with momentum", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "element"),
    Case("Adam", lambda p: torch.optim.Adam(p, lr=0.05), "element"),
    Case("AdamW", lambda p: torch.optim.AdamW(p, lr=0.05), "element"),
    Case("NAdam", lambda p: torch.optim.NAdam(p, lr=0.05), "element"),
    Case("Adagrad", lambda p: torch.optim.Adagrad(p, lr=0.05), "element"),
    Case("RMSprop", lambda p: torch.optim.RMSprop(p, lr=0.01), "element"),
    Case("Lion", lambda p: written.Lion(p, lr=0.01), "element"),
    Case("8-bit Adam", lambda p: written.EightBitAdam(p, lr=0.05), "block"),
    Case("Adafactor", lambda p: torch.optim.Adafactor(p, lr=0.1), "tensor"),
    Case("Muon", lambda p: torch.optim.Muon(p, lr=0.05), "matrix"),
    Case("Shampoo", lambda p: written.Shampoo(p, lr=0.05), "matrix"),
    # One evaluation in each step: with more, ranks could stop after different numbers of collectives.
    Case("LBFGS", lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=1), "all"),
    Case("SAM", lambda p: written.SAM(p, lr=0.1), "all"),
    Case("SAM with summed norm", lambda p: written.SAM(p, lr=0.1), "all", lambda p: written.ShardedSAM(p, lr=0.1)),
]


class Block(nn.Sequential):
    """One unit with two matrices. Half of its flat parameter is 22.5 elements, inside of the first matrix."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False))


class Model(nn.Sequential):
    """A unit, and a matrix of the root with one row."""

    def __init__(self) -> None:
        super().__init__(Block(), nn.Linear(3, 1, bias=False))


def make_model(form: str) -> Any:
    """The same model on all ranks; ``plain`` is not sharded."""
    torch.manual_seed(0)
    model: Any = Model().double()
    if form == "fully_shard":
        minifsdp.fully_shard(model[0])
        minifsdp.fully_shard(model)
    elif form in ("flat", "original"):
        use_orig_params = form == "original"
        model[0] = FSDP(model[0], use_orig_params=use_orig_params)
        model = FSDP(model, use_orig_params=use_orig_params)
    return model


def shapes(form: str) -> list[list[int]]:
    """The shape of each parameter on this rank."""
    return [list(written.local(parameter).shape) for parameter in make_model(form).parameters()]


class OnUnsharded:
    """Runs an optimizer on unsharded copies of all parameters. Each rank has all copies, and computes the same.

    Works with ``fully_shard``, and with wrappers that have ``use_orig_params=True``.
    """

    def __init__(self, model: Any, make: Make) -> None:
        self.model = model
        with self._parameters() as parameters:
            self.copies = {name: nn.Parameter(_unsharded(value.detach())) for name, value in parameters}
        self.optimizer = make(self.copies.values())

    def step(self, closure: written.Closure) -> Any:
        """Calls the optimizer, and writes its result into the model. All ranks must call it."""

        def of_copies() -> Any:
            self._write()
            loss = closure()
            with self._parameters() as parameters:
                for name, parameter in parameters:
                    self.copies[name].grad = _unsharded(parameter.grad)
            return loss

        loss = self.optimizer.step(of_copies)
        self._write()
        return loss

    @torch.no_grad()
    def _write(self) -> None:
        """Copies all values into the model."""
        with self._parameters() as parameters:
            for name, parameter in parameters:
                value = self.copies[name].detach()
                if isinstance(parameter, DTensor):
                    # Each rank takes its own rows, and nothing is sent.
                    value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
                parameter.copy_(value)

    @contextmanager
    def _parameters(self) -> Iterator[list[tuple[str, Any]]]:
        """All parameters of the model; those of a wrapper are unsharded."""
        if isinstance(self.model, FSDP):
            with FSDP.summon_full_params(self.model, with_grads=True):
                yield list(self.model.named_parameters())
        else:
            yield list(self.model.named_parameters())


def _unsharded(tensor: Tensor) -> Tensor:
    """A copy of the unsharded tensor."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def train(model: Any, optimizer: Any, rank: int, num_ranks: int) -> list[Tensor]:
    """Trains on this rank's part of each batch. Returns the unsharded parameters."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        inputs = torch.randn(8, 6, dtype=torch.float64, generator=generator)
        targets = torch.randn(8, 1, dtype=torch.float64, generator=generator)
        inputs, targets = inputs.chunk(num_ranks)[rank], targets.chunk(num_ranks)[rank]

        def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            model.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            # All ranks need the same loss, because an optimizer can decide by it.
            total = loss.detach().clone()
            if num_ranks > 1:
                dist.all_reduce(total)
            return total / num_ranks

        optimizer.step(closure)
    return [_unsharded(value) for value in model.state_dict().values()]


def compare(case: Case) -> dict[str, dict[str, Any]]:
    """Trains with one optimizer in one process, on each form of shards, and on unsharded copies.

    All ranks must call it.

    Returns:
        For each form: ``deviation``, the largest difference of a parameter, divided by the largest change that training
        made; ``error``, the exception instead; ``warned``, whether minifsdp issued a warning.
    """
    plain = make_model("plain")
    start = [value.clone() for value in plain.state_dict().values()]
    expected = train(plain, case.make(plain.parameters()), 0, 1)
    change = _largest_difference(start, expected)
    found = {}
    for key in (*FORMS, *(f"{form}, unsharded" for form in FORMS[1:])):
        form, is_unsharded = key.removesuffix(", unsharded"), key not in FORMS
        values, error, warned = _train_on_shards(case, form, is_unsharded)
        deviation = None if values is None else _largest_difference(values, expected) / change
        found[key] = {"deviation": deviation, "error": error, "warned": warned}
    return found


def verdict(run: dict[str, Any]) -> str:
    """``same``, ``close``, ``different`` or ``error``, from the measured deviation."""
    if run["error"]:
        return "error"
    # 1e-9 is rounding of float64. 5 % are small, compared with what training changes.
    deviation = run["deviation"]
    return "same" if deviation <= 1e-9 else "close" if deviation <= 0.05 else "different"


def _largest_difference(some: list[Tensor], others: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(some, others, strict=True))


def _train_on_shards(case: Case, form: str, is_unsharded: bool) -> tuple[list[Tensor] | None, str | None, bool]:
    """The unsharded parameters after training, or an error, and whether minifsdp issued a warning."""
    model, values, error = make_model(form), None, None
    make = case.of_shards or case.make
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            optimizer = OnUnsharded(model, case.make) if is_unsharded else make(model.parameters())
            values = train(model, optimizer, dist.get_rank(), dist.get_world_size())
        except (RuntimeError, ValueError) as raised:
            error = f"{type(raised).__name__}: {str(raised).splitlines()[0]}"
    return values, error, any("computes its steps from whole parameters" in str(one.message) for one in caught)


def all_shapes() -> dict[str, list[Any]]:
    """The shapes of the parameters of each form, for each rank. All ranks must call it."""
    return {form: of_all_ranks(shapes(form)) for form in FORMS}

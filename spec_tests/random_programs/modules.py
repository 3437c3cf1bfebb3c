"""Builds the unsharded model of a description, its batches, loss and optimizer.

The modules here are `Piece`s. Each maps a row of features and a row of token numbers to features of the same width, so
they can be combined freely. Each kind covers a difficulty:

=============  =================================================  ======================================================
kind           computes                                           difficulty
=============  =================================================  ======================================================
``linear``     ``x + tanh(linear(x))``                            with a bias or without: odd numbers of elements
``mlp``        ``x + down(tanh(up(x)))``                          two parameters of unequal size
``embedding``  ``x + rows[tokens]``                               its gradient needs no input gradient
``norm``       a layer norm                                       small, and different under low precision
``own``        ``x * (1 + sum(p) / 8)``                           a parameter of any shape, also 0-D or without elements
``idle``       ``tanh(x)``                                        has no parameters, so its unit is empty
``unused``     ``x``                                              its parameter gets no gradient; it returns its input
``one_sided``  ``x + a``, and ``+ b`` depending on the tokens     ``b`` has a gradient on some ranks only
``counter``    ``x``                                              a buffer, the number of its forwards
``add``        ``x + table``                                      one parameter, of the shape of the input
``view``       ``x + table.t()``                                  one parameter, used through a view
``expand``     ``x + table`` by broadcasting                      one row
``complex``    ``x + real(x * factor) + imag(x * factor) / 2``    one parameter, complex
``both``       the same, and ``+ shift``                          one real and one complex parameter
``dtypes``     ``x + (x @ low) * single + double``                bfloat16, float32 and float64 in one module
``chain``      its parts, one after the other
``sum``        half of ``x`` and of all its parts applied to x    several branches end in one autograd node
``detach``     ``x`` and its parts, which get no gradient         a recorded forward without a backward
``blind``      the same, its parts run without grad               an unrecorded forward inside a recorded one
=============  =================================================  ======================================================

From ``add`` on, autograd gives one gradient tensor to the parameter and to the input, or gives the parameter a
gradient of another layout or dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spec_tests.harness import device
from spec_tests.random_programs.description import LEAVES, OWN_SHAPES, Call, Description, Node, tied_leaves

# Powers of two: multiplication by them is exact, so it does not matter whether a kernel fuses it with an addition.
LEARNING_RATE, MOMENTUM = 1 / 32, 0.5
# Adam divides by the size of a gradient. A tiny gradient is mostly rounding error, which must not cause a full step.
EPSILON = 1 / 8


class Bang(Exception):
    """The error that a piece raises intentionally."""


class Kept:
    """The gradients of one forward that hooks of the user keep: of the input and of the outputs of the root's parts.

    A hook keeps the tensor itself, not a copy. So a later write into its memory is a difference.
    """

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}

    def watch(self, name: str, x: Tensor) -> None:
        """Registers the hook."""
        if x.requires_grad:
            x.register_hook(lambda gradient: self.gradients.__setitem__(name, gradient))


class Clock:
    """State that all pieces of a model read.

    Attributes:
        step: number of the current step.
        bomb: where to raise an error: ``("forward", 3)`` is the forward of the third leaf, ``("part", 3)`` the place
            before the third part of the root.
        skip: number of the root's part that is not called in this forward.
        kept: keeps the gradients of this forward.
    """

    def __init__(self) -> None:
        self.step = 0
        self.bomb: tuple[str, int] | None = None
        self.skip: int | None = None
        self.kept: Kept | None = None

    def __deepcopy__(self, memo: Any) -> Clock:
        """A copy of a model has the same clock."""
        return self

    @contextlib.contextmanager
    def of_call(self, call: Call, rank: int, kept: Kept | None = None) -> Iterator[None]:
        """Sets what a call passes to its forward, on this rank."""
        # A list contains the part that each rank leaves out.
        skip = call.get("skip")
        self.skip = skip[rank] if isinstance(skip, list) else skip
        self.bomb = ("part", call["bang"]) if "bang" in call else None
        self.kept = kept
        try:
            yield
        finally:
            self.skip = self.bomb = self.kept = None

    def tick(self, number: int, y: Tensor) -> None:
        """Each leaf calls this with its number and its result.

        Raises:
            Raises the error here, or in a backward hook, if ``bomb`` names this leaf.
        """
        if self.bomb == ("forward", number):
            raise Bang
        if self.bomb == ("backward", number) and y.requires_grad:
            y.register_hook(_bang)


def _bang(_: Tensor) -> None:
    raise Bang


def _halve_inputs(_: nn.Module, of_inputs: Any, of_outputs: Any) -> Any:
    x, tokens = of_inputs
    return None if x is None else x / 2, tokens


class Piece(nn.Module):
    """The module of a node; see the table above."""

    is_root = False

    def __init__(self, node: Node, d: Description, clock: Clock, leaves: list[Piece]) -> None:
        super().__init__()
        self.node, self.clock, self.number = node, clock, len(leaves)
        if node.kind in LEAVES:
            self._make_parameters(node, d.width, d.samples)
            leaves.append(self)
        self.parts = nn.ModuleList()
        for child in node.children:
            if child.same_as >= 0:
                leaves.append(leaves[child.same_as])
                self.parts.append(leaves[-1])
            else:
                self.parts.append((Unit if child.unit else Piece)(child, d, clock, leaves))

    def _make_parameters(self, node: Node, width: int, samples: int) -> None:
        size = node.size
        if node.kind == "linear":
            self.linear = nn.Linear(width, width, bias=size % 2 == 1)
        elif node.kind == "mlp":
            self.up, self.down = nn.Linear(width, max(size, 1)), nn.Linear(max(size, 1), width, bias=False)
        elif node.kind == "embedding":
            self.rows = nn.Embedding(max(size, 1), width)
        elif node.kind == "norm":
            self.norm = nn.LayerNorm(width)
        elif node.kind in ("own", "unused"):
            self.p = nn.Parameter(torch.randn(OWN_SHAPES[size % len(OWN_SHAPES)]) / 4)
        elif node.kind == "one_sided":
            self.a, self.b = nn.Parameter(torch.randn(width) / 4), nn.Parameter(torch.randn(width) / 4)
        elif node.kind == "counter":
            self.register_buffer("seen", torch.zeros(()))
        elif node.kind in ("complex", "both"):
            if node.kind == "both":
                self.shift = nn.Parameter(torch.randn(width) / 4)
            self.factor = nn.Parameter(torch.randn(width, dtype=torch.complex128) / 4)
        elif node.kind == "dtypes":
            self.low = nn.Parameter((torch.randn(width, width) / 4).bfloat16())
            self.single = nn.Parameter(torch.rand(width, dtype=torch.float32))
            self.double_ = nn.Parameter(torch.randn(width, dtype=torch.float64))
        elif node.kind in ("add", "view", "expand"):
            shape = {"add": (samples, width), "view": (width, samples), "expand": (1, width)}[node.kind]
            self.table = nn.Parameter(torch.randn(shape) / 4)
        for parameter in self.parameters():
            parameter.requires_grad_(not node.frozen)

    def forward(self, x: Tensor, tokens: Tensor) -> Any:
        y = self._compute(x, tokens)
        if self.node.kind in LEAVES:
            self.clock.tick(self.number, y)
        return _PACKED[self.node.returns](y)

    def _compute(self, x: Tensor, tokens: Tensor) -> Tensor:
        kind = self.node.kind
        if kind == "linear":
            return x + torch.tanh(self.linear(x))
        if kind == "mlp":
            return x + self.down(torch.tanh(self.up(x)))
        if kind == "embedding":
            return x + self.rows(tokens % self.rows.num_embeddings)
        if kind == "norm":
            return self.norm(x)
        if kind == "own":
            return x * (1 + self.p.sum() / 8)
        if kind == "idle":
            return torch.tanh(x)
        if kind == "one_sided":
            return x + self.a + self.b if int(tokens.sum()) % 2 else x + self.a
        if kind == "counter":
            self.seen += 1
        if kind in ("complex", "both"):
            product = x * self.factor
            # Mixed precision does not cast a complex parameter, so the product can have another dtype than the input.
            parts = (product.real + product.imag / 2).to(x.dtype)
            return x + parts + (self.shift if kind == "both" else 0)
        if kind == "dtypes":
            return x + (x.to(self.low.dtype) @ self.low).to(x.dtype) * self.single + self.double_
        if kind in ("add", "view", "expand"):
            return x + (self.table.t() if kind == "view" else self.table)
        return self._compute_parts(x, tokens)

    def _compute_parts(self, x: Tensor, tokens: Tensor) -> Tensor:
        kind = self.node.kind
        with torch.set_grad_enabled(torch.is_grad_enabled() and kind != "blind"):
            entered, added = x, x
            for number, (part, child) in enumerate(zip(self.parts, self.node.children, strict=True)):
                if self.is_root and self.clock.bomb == ("part", number):
                    raise Bang
                if self.clock.step % child.every or (self.is_root and self.clock.skip == number):
                    continue
                for use in range(child.times):
                    if self.is_root and self.clock.kept is not None:
                        self.clock.kept.watch(f"input {use} of part {number}", x)
                    y = _call(part, child, x if kind == "chain" else entered, tokens)
                    x, added = y, added + (y.detach() if kind == "detach" else y)
        return x if kind in ("chain", *LEAVES) else added / 2

    @torch.no_grad()
    def generate(self, x: Tensor, tokens: Tensor) -> Any:
        """Calls the model in a loop, like a language model does."""
        return self(x + _UNPACKED[self.node.returns](self(x, tokens)).sum() / 8, tokens)


class Unit(Piece):
    """A piece that is a unit; a policy can select this class."""


_PACKED: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda y: y,
    "tuple": lambda y: (y, 1),
    "dict": lambda y: {"y": y},
    "nested": lambda y: [{"y": (None, y)}],
}
_UNPACKED: dict[str, Callable[[Any], Tensor]] = {
    "tensor": lambda y: y,
    "tuple": lambda y: y[0],
    "dict": lambda y: y["y"],
    "nested": lambda y: y[0]["y"][1],
}


def _call(part: nn.Module, node: Node, x: Tensor, tokens: Tensor) -> Tensor:
    def run(x: Tensor, tokens: Tensor) -> Tensor:
        return unpacked(part(x=x, tokens=tokens) if node.keywords else part(x, tokens))

    unpacked = _UNPACKED[node.returns]
    if not node.checkpoint:
        return run(x, tokens)
    return checkpoint(run, x, tokens, use_reentrant=node.checkpoint == "reentrant", preserve_rng_state=False)


def plain_model(description: Description) -> Piece:
    """The unsharded model on this rank's device; equal descriptions give equal values."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(description.seed)
        leaves: list[Piece] = []
        model = Piece(description.model, description, Clock(), leaves)
        model.is_root = True
    if description.hook == "backward":
        for leaf in dict.fromkeys(leaves):
            leaf.register_full_backward_hook(_halve_inputs)
    for first, second in tied_leaves(description):
        (module, name), (other, other_name) = (_first_slot(leaves[number]) for number in (first, second))
        setattr(other, other_name, getattr(module, name))
    return model.to(device())


def _first_slot(leaf: Piece) -> tuple[nn.Module, str]:
    name = next(iter(dict(leaf.named_parameters())))
    owner, _, last = name.rpartition(".")
    return leaf.get_submodule(owner), last


def root_of(model: nn.Module) -> Piece:
    """The outermost piece of a model, sharded or not."""
    return next(module for module in model.modules() if isinstance(module, Piece))


def part_of(node: Node, model: Any, part: int | None) -> tuple[Node, Any]:
    """The node and the module that a call uses: the whole model, or a part of the root."""
    return (node, model) if part is None else (node.children[part], root_of(model).parts[part])


def prepared(inputs: tuple[Tensor, Tensor], dtype: torch.dtype | None, kept: Kept | None) -> tuple[Tensor, Tensor]:
    """The inputs of a forward in this dtype. `kept` keeps the gradient of the batch."""
    x, tokens = inputs
    if kept is not None:
        kept.watch("input", x.requires_grad_())
    return x if dtype is None else x.to(dtype), tokens


def output_of(node: Node, model: Callable[..., Any], inputs: tuple[Tensor, Tensor]) -> Tensor:
    """The output of the model, sharded or not, for a batch; cast to full precision for the loss."""
    return _UNPACKED[node.returns](model(*inputs)).to(torch.get_default_dtype())


def batch(description: Description, number: int, rank: int) -> tuple[Tensor, Tensor]:
    """The batch with this number of a rank."""
    x, tokens = batch_on_cpu(description, number, rank)
    return x.to(device()), tokens.to(device())


def batch_on_cpu(description: Description, number: int, rank: int) -> tuple[Tensor, Tensor]:
    """The same batch before it is moved to the device."""
    dice = torch.Generator().manual_seed(description.seed + 100 * number + rank + 1)
    x = torch.randn(description.samples, description.width, generator=dice)
    return x, torch.randint(0, 9, (description.samples,), generator=dice)


def loss_of(outputs: list[Tensor]) -> Tensor:
    """The loss of the outputs of all forwards before a backward."""
    return torch.stack([torch.tanh(output).square().mean() for output in outputs]).sum()


def optimizer_for(d: Description, model: nn.Module) -> torch.optim.Optimizer | None:
    """The optimizer of a model, sharded or not; ``None`` if the model has no parameters."""
    parameters = list(model.parameters())
    if not parameters:
        return None
    # List operators, which PyTorch uses by default on a GPU, do not increase the version counter of a DTensor.
    how: dict[str, Any] = {d.steps_by: True} if d.steps_by else {"foreach": d.seed % 2 == 0}
    if d.adam:
        return torch.optim.Adam(parameters, lr=LEARNING_RATE, eps=EPSILON, **how)
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM if d.momentum else 0.0, **how)


def units_of(model: Piece) -> dict[str, tuple[Node, list[str]]]:
    """Path, node and parameter names of each unit of a plain model; the names are in the order of the flat layout.

    The result includes units without parameters.
    """
    paths = {path: m.node for path, m in model.named_modules() if isinstance(m, Piece) and (m.node.unit or not path)}
    units: dict[str, tuple[Node, list[str]]] = {path: (node, []) for path, node in paths.items()}
    for name, _ in model.named_parameters():
        around = (path for path in paths if not path or name.startswith(path + "."))
        units[max(around, key=len)][1].append(name)
    return units

"""Transformers on the meta device, with a loss, for the simulator.

One module describes all models of ``shapes.py``: token embeddings, optional learned positions, blocks of attention and
a perceptron, a norm and an output matrix. An encoder-decoder model has a second stack whose blocks also attend to the
output of the first.

A `Model` is the input of a recording: the module, the modules that become units, and a function that computes the loss.
A function of the user, given as ``module:function``, returns a `Model` as well.

Worked example, two blocks in each unit: ``transformer(SHAPES["gpt2"], 1, 1024, "none", 2)`` has 6 units.

*In torch:* ``torch.distributed._tools`` estimates a given model; it has no models.

Spec: SIMULATE-04, SIMULATE-05.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from minifsdp_tools.simulate.shapes import Shape

aten = torch.ops.aten


@dataclass
class Model:
    """The input of a recording.

    Attributes:
        module: the model, on the meta device.
        units: the modules that become units, in the order of forward. The remaining parameters belong to the root.
        loss: runs a forward of the model, after it was sharded, and returns the loss.
        tokens: the number of tokens of a micro-batch, for tokens per second.
    """

    module: nn.Module
    units: Sequence[nn.Module]
    loss: Callable[[nn.Module], torch.Tensor]
    tokens: int


class Attention(nn.Module):
    """Attention with fewer heads of keys and values, if the shape specifies them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.head_width or shape.width // shape.heads
        queries = shape.heads * self.head_width
        keys = (shape.kv_heads or shape.heads) * self.head_width
        self.sizes = [queries, keys, keys]
        self.project_in = nn.Linear(shape.width, sum(self.sizes), bias=shape.biases)
        self.project_out = nn.Linear(queries, shape.width, bias=shape.biases)
        self.is_rotary = not shape.positions and not shape.relative

    def forward(
        self,
        x: torch.Tensor,
        memory: torch.Tensor | None,
        bias: torch.Tensor | None,
        causal: bool,
    ) -> Any:
        """Attends to ``memory``, or to the input itself."""
        if memory is None:
            query, key, value = self.project_in(x).split(self.sizes, dim=-1)
        else:
            weights = self.project_in.weight.split([self.sizes[0], sum(self.sizes[1:])])
            query = F.linear(x, weights[0])
            key, value = F.linear(memory, weights[1]).chunk(2, dim=-1)
        query, key, value = (
            t.unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for t in (query, key, value)
        )
        if self.is_rotary:
            query = _rotated(query)
            key = _rotated(key)
        mixed = F.scaled_dot_product_attention(
            query, key, value, bias, is_causal=causal, enable_gqa=True
        )
        return self.project_out(mixed.transpose(1, 2).flatten(-2))


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions: reads and writes what the real operator does."""
    angles = x.new_empty(x.shape[-2:], dtype=torch.float32)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first, second), dim=-1).mul(angles).to(x.dtype)


class Perceptron(nn.Module):
    """A perceptron with one hidden layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = shape.intermediate or 4 * shape.width
        self.up = nn.Linear(shape.width, hidden, bias=shape.biases)
        self.gate = (
            nn.Linear(shape.width, hidden, bias=shape.biases) if shape.gated else None
        )
        self.down = nn.Linear(hidden, shape.width, bias=shape.biases)
        self.activation = F.relu if shape.relative else F.gelu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the perceptron."""
        hidden = (
            self.activation(self.up(x))
            if self.gate is None
            else F.silu(self.gate(x)) * self.up(x)
        )
        return self.down(hidden)  # type: ignore[no-any-return]


def _norm(shape: Shape) -> nn.Module:
    return (
        nn.RMSNorm(shape.width)
        if shape.rms
        else nn.LayerNorm(shape.width, bias=shape.biases)
    )


class Block(nn.Module):
    """A block. ``checkpointing`` is ``none``, ``full`` or ``selective``."""

    def __init__(
        self,
        shape: Shape,
        checkpointing: str,
        *,
        causal: bool = True,
        crosses: bool = False,
    ) -> None:
        super().__init__()
        self.norm = _norm(shape)
        self.attention = Attention(shape)
        self.cross_norm = _norm(shape) if crosses else None
        self.cross = Attention(shape) if crosses else None
        self.mlp_norm = _norm(shape)
        self.mlp = Perceptron(shape)
        self.causal = causal
        self.checkpointing = checkpointing

    def forward(
        self, x: torch.Tensor, memory: Any = None, bias: Any = None
    ) -> torch.Tensor:
        """Applies the block, and keeps only its input if it is checkpointed."""
        if self.checkpointing == "none" or not torch.is_grad_enabled():
            return self.compute(x, memory, bias)
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if self.checkpointing == "selective":
            options["context_fn"] = partial(
                create_selective_checkpoint_contexts, _EverySecond()
            )
        return checkpoint(self.compute, x, memory, bias, **options)  # type: ignore[no-any-return]

    def compute(self, x: torch.Tensor, memory: Any, bias: Any) -> torch.Tensor:
        """Applies the block."""
        x = x + self.attention(self.norm(x), None, bias, self.causal and bias is None)
        if self.cross is not None and self.cross_norm is not None:
            x = x + self.cross(self.cross_norm(x), memory, None, False)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class _EverySecond:
    """Selective checkpointing as in torchtitan: attention and every second matrix product are not recomputed."""

    def __init__(self) -> None:
        self._num_products = {False: 0, True: 0}

    def __call__(
        self, context: Any, func: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        is_product = func in (aten.mm.default, aten.addmm.default)
        self._num_products[context.is_recompute] += is_product
        is_kept = "scaled_dot_product" in func.name() or (
            is_product and self._num_products[context.is_recompute] % 2
        )
        return (
            CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
        )


class Stack(nn.Module):
    """The blocks of an encoder or a decoder, in groups; each group becomes a unit."""

    def __init__(
        self,
        shape: Shape,
        checkpointing: str,
        unit: int,
        *,
        causal: bool,
        crosses: bool = False,
    ) -> None:
        super().__init__()
        blocks = [
            Block(shape, checkpointing, causal=causal, crosses=crosses)
            for _ in range(shape.layers)
        ]
        self.groups = nn.ModuleList(
            Group(blocks[start : start + unit]) for start in range(0, len(blocks), unit)
        )
        self.relative = (
            nn.Embedding(shape.relative, shape.heads) if shape.relative else None
        )
        self.norm = _norm(shape)

    def forward(
        self, x: torch.Tensor, memory: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Applies all blocks and the last norm."""
        bias = None
        if self.relative is not None:
            tokens = torch.zeros(
                x.shape[1], x.shape[1], dtype=torch.long, device=x.device
            )
            bias = self.relative(tokens).permute(2, 0, 1).to(x.dtype).unsqueeze(0)
        for group in self.groups:
            x = group(x, memory, bias)
        return self.norm(x)  # type: ignore[no-any-return]


class Group(nn.ModuleList):
    """Some consecutive blocks."""

    def forward(self, x: torch.Tensor, memory: Any, bias: Any) -> torch.Tensor:
        """Applies the blocks."""
        for block in self:
            x = block(x, memory, bias)
        return x


class Transformer(nn.Module):
    """A transformer of the given shape."""

    def __init__(
        self, shape: Shape, checkpointing: str = "none", unit: int = 1
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = (
            nn.Embedding(shape.positions, shape.width) if shape.positions else None
        )
        self.encoder = (
            Stack(shape, checkpointing, unit, causal=False) if shape.encoder else None
        )
        self.decoder = Stack(
            shape, checkpointing, unit, causal=True, crosses=shape.encoder
        )
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss of the next token; the values of the tokens have no meaning."""
        x = self.embed(tokens)
        if self.positions is not None:
            x = x + self.positions(tokens[0])
        memory = None if self.encoder is None else self.encoder(x)
        scores = self.head(self.decoder(x, memory))
        return F.cross_entropy(scores.flatten(0, 1).float(), tokens.flatten())


def transformer(
    shape: Shape, micro_batch: int, sequence: int | None, checkpointing: str, unit: int
) -> Model:
    """A transformer on the meta device.

    Args:
        shape: its sizes.
        micro_batch, sequence: the number of sequences in a micro-batch, and of tokens in a sequence.
        checkpointing: ``none``, ``full`` or ``selective``, for each block.
        unit: the number of blocks in a unit.
    """
    length = sequence or shape.sequence
    with torch.device("meta"):
        module = Transformer(shape, checkpointing, unit)

    def loss(sharded: nn.Module) -> torch.Tensor:
        tokens = torch.zeros(micro_batch, length, dtype=torch.long, device="meta")
        return sharded(tokens)  # type: ignore[no-any-return]

    return Model(
        module,
        [group for group in module.modules() if isinstance(group, Group)],
        loss,
        micro_batch * length,
    )

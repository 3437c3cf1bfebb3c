"""Records the state of the parameters of a sharded model at each moment of a training step.

    torchrun --standalone --nproc-per-node 2 -m docs_build.recording.parameter_states

It writes ``docs/data/parameter-states.json``. The page "In which state is this parameter now?" shows it, and a test
observes all moments again and compares them with the record.

The model has a unit with a ``Linear(4, 3)``, and the root unit with a ``Linear(3, 2)``. On two ranks, the shards have
different sizes: the flat parameter of the unit has 15 elements, and its weight has three rows.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import minifsdp
from docs_build.recording.records import of_all_ranks, save_on_ranks
from docs_build.recording.written_optimizers import local
from minifsdp.engine.placeholder import PlaceholderParameter

NAME = "parameter-states"
FSDP = minifsdp.FullyShardedDataParallel
FORMS = ("flat", "original", "fully_shard")
IN_FORWARD, IN_BACKWARD = "inside the unit's forward", "inside the unit's backward"


class Block(nn.Module):
    """One unit. Calls `observe` in the middle of its forward, and of its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.observe: Callable[[str], None] | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        """Forward of the unit."""
        hidden = self.linear(inputs)
        if self.observe and hidden.requires_grad:
            observe = self.observe
            observe(IN_FORWARD)
            hidden.register_hook(lambda gradient: observe(IN_BACKWARD))
        return torch.tanh(hidden)


class Model(nn.Module):
    """A unit and a layer of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        """Forward of the model."""
        output: Tensor = self.head(self.block(inputs))
        return output


@dataclass(frozen=True)
class Setting:
    """A way to shard the model. ``form`` is one of `FORMS`."""

    form: str
    reshard_after_forward: bool

    @property
    def key(self) -> str:
        """The name of this setting in the record."""
        return f"{self.form}, {'resharded' if self.reshard_after_forward else 'unsharded'} after forward"

    def shard(self, model: Any) -> Any:
        """Shards the block and the model. All ranks must call it."""
        if self.form == "fully_shard":
            policy = minifsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            for module in (model.block, model):
                minifsdp.fully_shard(module, mp_policy=policy, reshard_after_forward=self.reshard_after_forward)
            return model
        strategies = minifsdp.ShardingStrategy
        options: dict[str, Any] = {
            "use_orig_params": self.form == "original",
            "sharding_strategy": strategies.FULL_SHARD if self.reshard_after_forward else strategies.SHARD_GRAD_OP,
            "mixed_precision": minifsdp.MixedPrecision(param_dtype=torch.bfloat16),
        }
        model.block = FSDP(model.block, **options)
        return FSDP(model, **options)


SETTINGS = [Setting(form, reshard) for form in FORMS for reshard in (True, False)]


class Observer:
    """Describes the parameters of a model at named moments.

    Attributes:
        model: the model, which is replaced by its wrapper.
        moments: the descriptions of all moments, in their order.
    """

    def __init__(self, plain: Model) -> None:
        self.model: Any = plain
        self.moments: dict[str, dict[str, Any]] = {}
        # The modules stay the same objects when the model is sharded.
        self._modules: dict[str, Any] = {"block": plain.block.linear, "root": plain.head}
        self._num_elements = {part: module.weight.numel() for part, module in self._modules.items()}
        self._held: list[Tensor] = []
        # The memory of each weight in the last forward.
        self._storages: dict[str, torch.UntypedStorage] = {}

    def hold(self, optimizer: torch.optim.Optimizer) -> None:
        """From now on, the observer records whether ``optimizer`` holds the parameter."""
        self._held = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def note(self, moment: str) -> None:
        """Describes the first parameter of the block, and whether unsharded memory is allocated."""
        if moment == IN_FORWARD:
            # The root computes after the block, but it is all-gathered before.
            self._storages = {part: module.weight.untyped_storage() for part, module in self._modules.items()}
        parameters = dict(self.model.named_parameters())
        name = next(name for name in parameters if "block" in name)
        self.moments[moment] = {
            "name": name,
            "num_parameters": len(parameters),
            "parameter": described(parameters[name]),
            "grad": described(parameters[name].grad),
            "module": described(self._modules["block"].weight),
            "is_held": any(parameters[name] is one for one in self._held),
            "allocated": [part for part in self._modules if self._is_allocated(part)],
        }

    def _is_allocated(self, part: str) -> bool:
        storage = self._storages.get(part)
        is_kept = storage is not None and storage.nbytes() > 0
        return is_kept or _num_stored(self._modules[part].weight) >= self._num_elements[part]


def described(tensor: Tensor | None) -> str | None:
    """Class, shape, shape on this rank and dtype of a tensor, as in ``DTensor; (3, 4); (2, 4); float32``."""
    if tensor is None:
        return None
    facts = [_class_of(tensor), tuple(tensor.shape), tuple(local(tensor).shape), tensor.dtype]
    return "; ".join(map(str, facts)).replace("torch.", "")


def _class_of(tensor: Tensor) -> str:
    if isinstance(tensor, DTensor):
        return "DTensor"
    if isinstance(tensor, PlaceholderParameter):
        return "placeholder"
    return "Parameter" if isinstance(tensor, nn.Parameter) else "Tensor"


def _num_stored(tensor: Tensor) -> int:
    """The number of elements that fit into the memory of a tensor. A placeholder has no memory."""
    if isinstance(tensor, PlaceholderParameter):
        return 0
    part = local(tensor)
    return part.untyped_storage().nbytes() // part.element_size()


def observe(setting: Setting) -> dict[str, Any]:
    """Trains the model for one step, and describes its parameters at each moment. All ranks must call it."""
    torch.manual_seed(0)
    plain = Model()
    observer = Observer(plain)
    observer.note("before sharding")
    block, inputs = plain.block, torch.randn(2, 4)
    model = observer.model = setting.shard(plain)
    optimizer = torch.optim.Adam(model.parameters())
    observer.hold(optimizer)
    block.observe = observer.note
    observer.note("after sharding")
    model(inputs).sum().backward()
    # The first forward and backward allocate memory, and the moments of the second ones replace those of the first.
    optimizer.zero_grad()
    for moment in (IN_FORWARD, IN_BACKWARD):
        del observer.moments[moment]
    with torch.no_grad():
        model.eval()(inputs)
    observer.note("after a forward in `torch.no_grad()`")
    loss = model.train()(inputs).sum()
    observer.note("after forward")
    loss.backward()
    observer.note("after backward")
    optimizer.step()
    observer.note("after `optimizer.step()`")
    if setting.form == "fully_shard":
        for module in (model, model.block):
            module.unshard()
        observer.note("after `unshard()`")
        for module in (model, model.block):
            module.reshard()
        observer.note("after `reshard()`")
    else:
        with FSDP.summon_full_params(model, with_grads=setting.form == "original"):
            observer.note("inside `summon_full_params()`")
        observer.note("after `summon_full_params()`")
    saved = described(model.state_dict()["block.linear.weight"])
    observer.note("after `state_dict()`")
    optimizer.zero_grad()
    observer.note("after `optimizer.zero_grad()`")
    return {"moments": observer.moments, "state_dict": saved}


def observe_all() -> dict[str, Any]:
    """The observations of every setting: a list with one entry for each rank. All ranks must call it."""
    found = {}
    for setting in SETTINGS:
        with warnings.catch_warnings():
            # `.grad` of a view of an unsharded parameter.
            warnings.filterwarnings("ignore", message="The .grad attribute", category=UserWarning)
            mine = observe(setting)
        found[setting.key] = of_all_ranks(mine)
    return found


if __name__ == "__main__":
    save_on_ranks(NAME, lambda: {"settings": observe_all()})

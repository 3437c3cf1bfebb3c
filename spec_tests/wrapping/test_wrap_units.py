"""Units that a policy or the user creates: their parameters, the options they inherit, and their effect.

``test_wrap.py`` tests where a policy creates units. It needs no ranks.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.fsdp.wrap as torch_policies
from torch import Tensor, nn
from torch.nn import functional as F

from spec_tests import subject
from spec_tests.checkpoint.refusals import caught_warnings
from spec_tests.harness import device, ranks
from spec_tests.models.modules import WIDTH, Block, Stack, seeded
from spec_tests.models.running import batch, iterate, loss_of
from spec_tests.models.sharding import HYBRID_SHARD, grid, wrapped
from spec_tests.models.values import assert_same, flat_parameters, full_values, mean_gradients, named
from spec_tests.models.whole import assert_a_step_uses_the_mean_gradient_alone
from spec_tests.subject import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ModuleWrapPolicy,
    always_wrap_policy,
    trace,
    transformer_auto_wrap_policy,
)

FSDP = FullyShardedDataParallel
flat_or_original = pytest.mark.parametrize("keep", [False, True], ids=["flat", "original"])

# --- number of units, and the parameters of the outermost one ---


@pytest.mark.spec("WRAP-01")
@ranks(2)
def test_no_policy_makes_one_unit_and_keeps_manually_wrapped_children() -> None:
    for model in (FSDP(seeded()), FSDP(seeded(), auto_wrap_policy=None)):
        assert FSDP.fsdp_modules(model) == [model]
        (flat,) = model.parameters()
        assert flat.numel() * 2 == sum(parameter.numel() for parameter in seeded().parameters())
    plain = seeded()
    for index in (1, 3):
        plain.blocks[index] = FSDP(plain.blocks[index])
    model = FSDP(plain)
    assert FSDP.fsdp_modules(model) == [model, plain.blocks[1], plain.blocks[3]]
    assert not isinstance(model.blocks[0], FSDP)


def wrap_nothing(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse


@pytest.mark.spec("WRAP-10")
# Wrapping every module also wraps the list of blocks, and wrapping a list warns, as in torch (WRAP-19).
@pytest.mark.filterwarnings("ignore:.*containers that do not implement forward:UserWarning")
@pytest.mark.parametrize(
    ("policy", "num_units", "num_own"),
    [(wrap_nothing, 1, 56 + 4 * 42), (ModuleWrapPolicy({Block, Stack}), 5, 56), (always_wrap_policy, 12, 0)],
    ids=["nothing", "blocks", "everything"],
)
@ranks(2)
def test_passed_module_is_the_outermost_unit_and_keeps_the_remaining_parameters(
    policy: Any, num_units: int, num_own: int
) -> None:
    plain = seeded()
    model = FSDP(plain, auto_wrap_policy=policy)
    assert model.module is plain, "it is wrapped once"
    assert len(FSDP.fsdp_modules(model)) == num_units
    with FSDP.summon_full_params(model, recurse=False):
        own = [p for name, p in plain.named_parameters() if not name.endswith("_flat_param")]
        assert sum(parameter.numel() for parameter in own) == num_own
    assert_a_step_uses_the_mean_gradient_alone(model, seeded())


# --- one embedding for an encoder and a decoder ---

VOCABULARY = 11


class SmallT5(nn.Module):
    """One embedding for an encoder and a decoder, which is also the output matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = self.embed_source = self.embed_target = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, dim_feedforward=9, dropout=0.0, batch_first=True)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        hidden = self.transformer(self.embed_source(source), self.embed_target(target))
        return F.cross_entropy(self.lm_head(hidden).flatten(0, 1), target.flatten())


def sentences(step: int, rank: int) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(100 * step + rank)
    source, target = torch.randint(VOCABULARY, (2, 3, 4), generator=dice).to(device())
    return source, target


@pytest.mark.spec("WRAP-11")
@flat_or_original
@ranks(2)
def test_shared_embedding_belongs_to_the_outer_unit_and_both_halves_train_it(keep: bool) -> None:
    plain = seeded(SmallT5)
    layers = {nn.TransformerEncoderLayer, nn.TransformerDecoderLayer}
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=layers)
    model = FSDP(copy.deepcopy(plain), auto_wrap_policy=policy, use_orig_params=keep)
    kinds = [type(unit.module) for unit in FSDP.fsdp_modules(model)]
    assert kinds == [SmallT5, *[nn.TransformerEncoderLayer] * 2, *[nn.TransformerDecoderLayer] * 2]
    with FSDP.summon_full_params(model, recurse=False):
        own = [name for name, p in model.named_parameters() if p.shape == (VOCABULARY, WIDTH)]
        assert own == ["shared.weight"]
        assert model.embed_source.weight is model.embed_target.weight is model.lm_head.weight
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain)]
    for step in range(3):
        model(*sentences(step, dist.get_rank())).backward()
        for rank in range(2):
            (plain(*sentences(step, rank)) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    # The gradients of the three uses of a parameter are added in a different order.
    assert_same(full_values(model), named(plain), bitwise=False)


# --- options that inner units inherit ---


@pytest.mark.spec("WRAP-14")
@ranks(4)
def test_units_made_by_a_policy_inherit_the_arguments_of_the_outer_call() -> None:
    groups = grid()
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = wrapped(
        process_group=groups,
        sharding_strategy=HYBRID_SHARD,
        cpu_offload=CPUOffload(offload_params=True),
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
        mixed_precision=precision,
        device_id=device(),
        forward_prefetch=True,
        limit_all_gathers=False,
        use_orig_params=True,
    )
    for unit in FSDP.fsdp_modules(model):
        assert unit.process_group is groups[0]
        assert unit.sharding_strategy is HYBRID_SHARD
        assert unit.cpu_offload == CPUOffload(offload_params=True)
        assert unit.backward_prefetch is BackwardPrefetch.BACKWARD_POST
        assert unit.mixed_precision == precision
        assert unit.compute_device == device()
        assert (unit.forward_prefetch, unit.limit_all_gathers) == (True, False)
        assert "linear.weight" in dict(unit.module.named_parameters()) or unit is model, "original parameters"
    # Check that the units use these options, and do not only store them.
    with trace.record() as recorder:
        iterate(model)
    rank = dist.get_rank()
    row, column = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
    for unit in ("", *(f"blocks.{index}" for index in range(4))):
        events = [event for event in recorder.events if event.unit == unit]
        assert {(e.dtype, e.ranks) for e in events if e.kind == "AG"} == {(torch.bfloat16, row)}
        assert {(e.dtype, e.ranks) for e in events if e.kind == "RS"} == {(torch.float32, row)}
        assert {(e.dtype, e.ranks) for e in events if e.kind == "AR"} == {(torch.float32, column)}
        assert {"H2D", "D2H"} <= {event.kind for event in events}


# --- a submodule that is in no unit ---


@pytest.mark.spec("WRAP-15")
@ranks(2)
def test_unwrapped_part_is_neither_sharded_nor_synchronized() -> None:
    reference = seeded()
    model = copy.deepcopy(reference)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FSDP(block)
    iterate(model)
    mean = mean_gradients(reference)
    head = model.leave.weight
    assert head.shape == reference.leave.weight.shape
    all_ranks = [torch.empty_like(head) for _ in range(2)]
    dist.all_gather(all_ranks, head.grad)
    assert not torch.equal(*all_ranks), "each rank has the gradient of its own data"
    assert torch.allclose(sum(all_ranks) / 2, mean["leave.weight"])
    # The wrapped blocks have correct gradients.
    for index, block in enumerate(model.blocks):
        row = torch.cat([mean[f"blocks.{index}.linear.{name}"].reshape(-1) for name in ("weight", "bias")])
        assert torch.equal(block.module._flat_param.grad, row.chunk(2)[dist.get_rank()])


# --- the effect of units ---


# --- batch norms, which do not compute in low precision ---


class Normed(nn.Module):
    """A linear layer and two norms. Either norm can be excluded from mixed precision."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.batch_norm, self.layer_norm = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer_norm(x + torch.tanh(self.batch_norm(self.linear(x))))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), Normed(), Normed(), nn.Linear(6, 2))


class Dtypes:
    """Records the dtypes of each layer's weight and input in its last forward. Create it before wrapping."""

    def __init__(self, model: nn.Module) -> None:
        self.of_weights: dict[str, torch.dtype] = {}
        self.of_inputs: dict[str, torch.dtype] = {}
        for name, module in model.named_modules():
            if isinstance(module, (nn.Linear, nn.BatchNorm1d, nn.LayerNorm)):
                module.register_forward_hook(functools.partial(self._note, name))

    def _note(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self.of_weights[name] = module.weight.dtype
        self.of_inputs[name] = args[0].dtype

    def of(self, kind: str) -> set[torch.dtype]:
        return {dtype for name, dtype in self.of_weights.items() if name.endswith(kind)}


LOW = torch.bfloat16
FULL = torch.float32


def low(wrapper: type[nn.Module], **options: Any) -> Any:
    """The ``MixedPrecision`` of the wrapper's library, minifsdp or torch."""
    kind = MixedPrecision if wrapper is FSDP else torch_fsdp.MixedPrecision
    return kind(param_dtype=LOW, **options)


# A batch norm that stays in its unit computes in low precision. The CPU requires the same dtype for its buffers.
low_with_buffers = functools.partial(low, buffer_dtype=LOW)


def cut(wrapper: type[nn.Module], model: nn.Module, **options: Any) -> Any:
    """Wraps with one unit for each `Normed`, using the policy of the wrapper's library."""
    policies = ModuleWrapPolicy if wrapper is FSDP else torch_policies.ModuleWrapPolicy
    return wrapper(model, auto_wrap_policy=policies({Normed}), device_id=device(), **options)


def both_trained(wrap: Callable[[type[nn.Module], nn.Module], Any]) -> tuple[list[float], list[float]]:
    """The losses of three steps, with minifsdp's wrapper and with torch's."""
    return tuple(losses(wrap(kind, seeded(normed))) for kind in (FSDP, torch_fsdp.FullyShardedDataParallel))  # type: ignore[return-value]


def losses(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(4):
        found.append(iterate(model))
        optimizer.step()
        optimizer.zero_grad()
    assert found[-1] < found[0], f"the loss does not decrease: {found}"
    return found


@pytest.mark.spec("MP-19")
@ranks(2)
def test_batch_norms_become_units_of_their_own_with_mixed_precision_off() -> None:
    plain = seeded(normed)
    dtypes = Dtypes(plain)
    with caught_warnings() as caught:
        model = cut(FSDP, plain, mixed_precision=low(FSDP))
    (warning,) = caught
    assert "BatchNorm1d" in str(warning.message)
    kinds = [type(unit.module).__name__ for unit in FSDP.fsdp_modules(model)]
    assert kinds == ["Sequential", "Normed", "BatchNorm1d", "Normed", "BatchNorm1d"]
    for unit in FSDP.fsdp_modules(model):
        off = isinstance(unit.module, nn.BatchNorm1d)
        assert unit.mixed_precision == (MixedPrecision() if off else low(FSDP))
    with trace.record() as recorder:
        iterate(model)
    assert dtypes.of("batch_norm") == {FULL}
    assert dtypes.of("linear") == dtypes.of("layer_norm") == {LOW}
    assert {dtypes.of_inputs[f"{index}.batch_norm"] for index in (1, 2)} == {FULL}, "its inputs are cast"
    assert {dtypes.of_inputs[f"{index}.layer_norm"] for index in (1, 2)} == {LOW}, "its outputs are cast back"
    gathered = {event.unit: event.dtype for event in recorder.events if event.kind == "AG"}
    assert gathered == {"": LOW, "1": LOW, "2": LOW, "1.batch_norm": FULL, "2.batch_norm": FULL}


@pytest.mark.spec("WRAP-19")
@pytest.mark.parametrize("kind", ["list", "dict"])
@ranks(2)
def test_uncalled_container_warning_equals_torch(kind: str) -> None:
    def container() -> nn.Module:
        layer = nn.Linear(4, 4, device=device())
        return nn.ModuleList([layer]) if kind == "list" else nn.ModuleDict({"layer": layer})

    with pytest.warns(UserWarning) as by_torch:
        torch_fsdp.FullyShardedDataParallel(container(), device_id=device())
    for policy in (None, ModuleWrapPolicy({nn.Linear})):
        with pytest.warns(UserWarning) as by_us:
            FSDP(container(), auto_wrap_policy=policy)
        (said,), (ours,) = ([str(each.message) for each in caught] for caught in (by_torch, by_us))
        words = said.split(":")[0]
        assert ours.startswith(f"rank {dist.get_rank()}: {words}: ")
        assert type(container()).__name__ in ours
        assert by_us[0].filename == __file__, "the warning names the line that wrapped the module"


class Chosen(nn.ModuleList):
    """A list that runs one of its layers."""

    def forward(self, x: Tensor) -> Tensor:
        return self[1](x)


@pytest.mark.spec("WRAP-19")
@ranks(2)
def test_container_with_own_forward_gives_no_warning() -> None:
    with caught_warnings() as caught:
        model = FSDP(Chosen(nn.Linear(4, 4, device=device()) for _ in range(2)))
    assert caught == []
    assert loss_of(model(torch.ones(2, 4, device=device()))).requires_grad


@pytest.mark.spec("MP-19")
@ranks(2)
def test_one_warning_lists_all_separately_wrapped_classes() -> None:
    layers = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Flatten(), nn.BatchNorm1d(8), nn.BatchNorm1d(8))
    with caught_warnings() as caught:
        FSDP(layers.to(device()), auto_wrap_policy=always_wrap_policy, mixed_precision=low(FSDP))
    (warning,) = caught
    assert "BatchNorm1d, BatchNorm2d" in str(warning.message)


@pytest.mark.spec("MP-19")
@ranks(2)
def test_separately_wrapped_batch_norms_train_like_torch() -> None:
    with caught_warnings():
        ours, theirs = both_trained(lambda kind, model: cut(kind, model, mixed_precision=low(kind)))
    assert ours == theirs


@pytest.mark.spec("MP-20")
@pytest.mark.parametrize("ignored", [None, (), (nn.LayerNorm,)])
@ranks(2)
def test_without_a_policy_there_is_no_separate_norm(ignored: tuple[type[nn.Module], ...] | None) -> None:
    def one_unit(kind: type[nn.Module], model: nn.Module) -> nn.Module:
        options = {} if ignored is None else {"_module_classes_to_ignore": ignored}
        return kind(model, device_id=device(), mixed_precision=low_with_buffers(kind, **options))

    plain = seeded(normed)
    dtypes = Dtypes(plain)
    # A warning would be an error.
    model = one_unit(FSDP, plain)
    assert FSDP.fsdp_modules(model) == [model]
    iterate(model)
    assert dtypes.of("batch_norm") == dtypes.of("layer_norm") == dtypes.of("linear") == {LOW}
    assert (model.module[1].batch_norm.running_mean != 0).any(), "the batch norm has statistics of the batch"
    ours, theirs = both_trained(one_unit)
    assert ours == theirs


@pytest.mark.spec("MP-21")
@pytest.mark.parametrize("classes", ["norms of layers", "none"])
@ranks(2)
def test_separately_wrapped_classes_are_configurable(classes: str) -> None:
    ignored = {"norms of layers": (nn.LayerNorm,), "none": ()}[classes]
    plain = seeded(normed)
    dtypes = Dtypes(plain)
    with caught_warnings() as caught:
        model = cut(FSDP, plain, mixed_precision=low_with_buffers(FSDP, _module_classes_to_ignore=ignored))
    apart = [type(unit.module) for unit in FSDP.fsdp_modules(model) if not isinstance(unit.module, Normed)]
    assert apart == [nn.Sequential, *ignored * 2]
    assert ["LayerNorm" in str(warning.message) for warning in caught] == [True] * len(ignored)
    iterate(model)
    assert dtypes.of("batch_norm") == {LOW}, "it stays in its parent unit"
    assert dtypes.of("layer_norm") == ({FULL} if ignored else {LOW})
    with caught_warnings():
        ours, theirs = both_trained(functools.partial(cut_with, ignored))
    assert ours == theirs


def cut_with(ignored: tuple[type[nn.Module], ...], kind: type[nn.Module], model: nn.Module) -> Any:
    return cut(kind, model, mixed_precision=low_with_buffers(kind, _module_classes_to_ignore=ignored))


def by_hand(kind: type[nn.Module], model: nn.Module) -> nn.Module:
    for index in (1, 2):
        block = model[index]
        block.batch_norm = kind(block.batch_norm, mixed_precision=None, device_id=device())
        model[index] = kind(block, mixed_precision=low(kind), device_id=device())
    return kind(model, mixed_precision=low(kind), device_id=device())


@pytest.mark.spec("MP-22")
@ranks(2)
def test_manually_wrapped_batch_norm_without_mixed_precision_trains() -> None:
    plain = seeded(normed)
    dtypes = Dtypes(plain)
    with caught_warnings() as caught:
        model = by_hand(FSDP, plain)
    assert caught == []
    iterate(model)
    assert dtypes.of("batch_norm") == {FULL}
    assert dtypes.of("linear") == dtypes.of("layer_norm") == {LOW}
    assert {unit: p.dtype for unit, p in flat_parameters(model).items()} == dict.fromkeys(flat_parameters(model), FULL)
    ours, theirs = both_trained(by_hand)
    assert ours == theirs


@pytest.mark.spec("MP-22")
@ranks(2)
def test_manually_wrapped_batch_norm_keeps_input_dtype() -> None:
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    plain = seeded(normed)
    plain[1].batch_norm.register_forward_hook(lambda module, args, output: seen.append((args[0].dtype, output.dtype)))
    loss_of(by_hand(FSDP, plain)(batch())).backward()
    assert seen == [(LOW, LOW)], "no input is cast: the layer computes in low precision with its weights"


# --- the private function that programs import ---


@pytest.mark.spec("NAMES-13", "WRAP-05")
@pytest.mark.parametrize("only_children", [False, True])
@ranks(2)
def test_recursive_wrap_creates_the_units_that_a_policy_chooses(only_children: bool) -> None:
    chosen: set[type[nn.Module]] = {Block, Stack}
    policy = functools.partial(subject.wrap._module_wrap_policy, module_classes=chosen)
    plain = seeded()
    num_elements = sum(parameter.numel() for parameter in plain.parameters())
    num_in_blocks = sum(parameter.numel() for parameter in plain.blocks.parameters())
    result = subject.wrap._recursive_wrap(
        plain, policy, FSDP, ignored_modules=set(), ignored_params=set(), only_wrap_children=only_children
    )
    model, num_wrapped = result
    assert isinstance(model, FSDP) is not only_children
    assert len(FSDP.fsdp_modules(model)) == (4 if only_children else 5)
    assert num_wrapped == (num_in_blocks if only_children else num_elements)
    if only_children:
        iterate(model)
    else:
        assert_a_step_uses_the_mean_gradient_alone(model, seeded())

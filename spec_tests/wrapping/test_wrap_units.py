"""Units that a policy or the user creates: their parameters, the options they inherit, and their effect.

``test_wrap.py`` tests where a policy creates units. It needs no ranks.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.nn import functional as F

import minifsdp
from spec_tests import subject
from spec_tests.checkpoint.refusals import caught_warnings
from spec_tests.harness import device, ranks
from spec_tests.models import modules, running, sharding
from spec_tests.models.gradients import assert_trains_like
from spec_tests.models.values import mean_gradients
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import MixedPrecision, ModuleWrapPolicy, trace

flat_or_original = pytest.mark.parametrize("keep", [False, True], ids=["flat", "original"])

# --- the parameters of units ---


def wrap_nothing(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse


@pytest.mark.spec("WRAP-10")
# Wrapping every module also wraps the list of blocks, and wrapping a list warns, as in torch (WRAP-19).
@pytest.mark.filterwarnings("ignore:.*containers that do not implement forward:UserWarning")
@pytest.mark.parametrize(
    ("policy", "num_units", "num_own"),
    [
        (wrap_nothing, 1, 56 + 4 * 42),
        (ModuleWrapPolicy({modules.Block, modules.Stack}), 5, 56),
        (subject.always_wrap_policy, 12, 0),
    ],
    ids=["nothing", "blocks", "everything"],
)
@ranks(2)
def test_passed_module_is_the_outermost_unit_and_keeps_the_remaining_parameters(
    policy: Any, num_units: int, num_own: int
) -> None:
    plain = modules.seeded()
    model = FSDP(plain, auto_wrap_policy=policy)
    assert model.module is plain, "it is wrapped once"
    assert len(FSDP.fsdp_modules(model)) == num_units
    with FSDP.summon_full_params(model, recurse=False):
        assert sum(p.numel() for name, p in plain.named_parameters() if "_flat_param" not in name) == num_own
    assert_trains_like(model, modules.seeded())


class SharedEmbedding(nn.Module):
    """One embedding for an encoder and a decoder, which is also the output matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = self.embed_source = self.embed_target = nn.Embedding(11, modules.WIDTH)
        self.encoder, self.decoder = modules.Block(), modules.Block()
        self.lm_head = nn.Linear(modules.WIDTH, 11, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, x: Tensor) -> Tensor:
        source, target = (x.abs() * 10).long() % 11, (x > 0).long()
        hidden = self.decoder(self.encoder(self.embed_source(source)) + self.embed_target(target))
        return F.cross_entropy(self.lm_head(hidden).flatten(0, 1), target.flatten())


@pytest.mark.spec("WRAP-11")
@flat_or_original
@ranks(2)
def test_shared_embedding_belongs_to_the_outer_unit_and_both_halves_train_it(keep: bool) -> None:
    model = sharding.wrapped(modules.seeded(SharedEmbedding), use_orig_params=keep)
    assert [type(unit.module) for unit in FSDP.fsdp_modules(model)] == [SharedEmbedding, modules.Block, modules.Block]
    with FSDP.summon_full_params(model, recurse=False):
        assert [name for name, p in model.named_parameters() if p.shape == (11, modules.WIDTH)] == ["shared.weight"]
        assert model.embed_source.weight is model.embed_target.weight is model.lm_head.weight
    assert_trains_like(model, modules.seeded(SharedEmbedding))


@pytest.mark.spec("WRAP-15")
@ranks(2)
def test_unwrapped_part_is_neither_sharded_nor_synchronized() -> None:
    reference = modules.seeded()
    model = copy.deepcopy(reference)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FSDP(block)
    running.iterate(model)
    mean = mean_gradients(reference)
    head = model.leave.weight
    assert head.shape == reference.leave.weight.shape
    all_ranks = [torch.empty_like(head) for _ in range(2)]
    dist.all_gather(all_ranks, head.grad)
    assert not torch.equal(*all_ranks), "each rank has the gradient of its own data"
    assert torch.allclose(sum(all_ranks) / 2, mean["leave.weight"])
    for index, block in enumerate(model.blocks):
        row = torch.cat([mean[f"blocks.{index}.linear.{name}"].reshape(-1) for name in ("weight", "bias")])
        assert torch.equal(block.module._flat_param.grad, row.chunk(2)[dist.get_rank()])


# --- options that inner units inherit ---


@pytest.mark.spec("WRAP-14")
@ranks(4)
def test_units_made_by_a_policy_inherit_the_arguments_of_the_outer_call() -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {
        "sharding_strategy": sharding.HYBRID_SHARD,
        "cpu_offload": subject.CPUOffload(offload_params=True),
        "backward_prefetch": subject.BackwardPrefetch.BACKWARD_POST,
        "mixed_precision": precision,
        "forward_prefetch": True,
        "limit_all_gathers": False,
    }
    model = sharding.wrapped(process_group=sharding.grid(), device_id=device(), use_orig_params=True, **options)
    for unit in FSDP.fsdp_modules(model):
        assert {name: getattr(unit, name) for name in options} == options
        assert (unit.process_group, unit.compute_device) == (sharding.grid()[0], device())
        assert "linear.weight" in dict(unit.module.named_parameters()) or unit is model, "original parameters"
    # Check that the units use these options, and do not only store them.
    with trace.record() as recorder:
        running.iterate(model)
    row, column = ((0, 1), (2, 3))[dist.get_rank() // 2], ((0, 2), (1, 3))[dist.get_rank() % 2]
    for name in modules.UNITS:
        events = [event for event in recorder.events if event.unit == name]
        sent = {(event.kind, event.dtype, event.ranks) for event in events if event.ranks}
        assert sent == {("AG", torch.bfloat16, row), ("RS", torch.float32, row), ("AR", torch.float32, column)}
        assert {"H2D", "D2H"} <= {event.kind for event in events}


# --- containers ---


@pytest.mark.spec("WRAP-19")
@pytest.mark.parametrize("policy", [None, ModuleWrapPolicy({nn.Linear})], ids=["one unit", "units"])
@pytest.mark.parametrize("kind", ["list", "dict"])
@ranks(2)
def test_uncalled_container_warning_equals_torch(kind: str, policy: Any) -> None:
    def container() -> nn.Module:
        layer = nn.Linear(4, 4, device=device())
        return nn.ModuleList([layer]) if kind == "list" else nn.ModuleDict({"layer": layer})

    with pytest.warns(UserWarning) as by_torch:
        torch_fsdp.FullyShardedDataParallel(container(), device_id=device())
    with pytest.warns(UserWarning) as by_us:
        FSDP(container(), auto_wrap_policy=policy)
    (said,), (ours,) = ([str(each.message) for each in caught] for caught in (by_torch, by_us))
    words = said.split(":")[0]
    assert ours.startswith(f"rank {dist.get_rank()}: {words}: ")
    assert by_us[0].filename == __file__, "the warning names the line that wrapped the module"


class Chosen(nn.ModuleList):
    """A list that runs one of its layers."""

    def forward(self, x: Tensor) -> Tensor:
        return self[1](x)


@pytest.mark.spec("WRAP-19")
@ranks(2)
def test_container_with_own_forward_gives_no_warning() -> None:
    # A warning would be an error.
    model = FSDP(Chosen(nn.Linear(4, 4, device=device()) for _ in range(2)))
    assert running.loss_of(model(torch.ones(2, 4, device=device()))).requires_grad


# --- batch norms, which do not compute in low precision ---

LOW, FULL = torch.bfloat16, torch.float32


class Normed(nn.Module):
    """A linear layer and two norms. Each layer records the dtypes of its weight and of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.batch_norm, self.layer_norm = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.LayerNorm(6)
        self.seen: dict[str, tuple[torch.dtype, torch.dtype]] = {}
        for name, layer in self.named_children():
            layer.register_forward_hook(functools.partial(self._record, name))

    def _record(self, name: str, layer: Any, inputs: Any, output: Tensor) -> None:
        self.seen[name] = (layer.weight.dtype, inputs[0].dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer_norm(x + torch.tanh(self.batch_norm(self.linear(x))))


def by_policy(library: Any, model: nn.Module, **precision: Any) -> Any:
    policy = library.wrap.ModuleWrapPolicy({Normed})
    low = library.MixedPrecision(param_dtype=LOW, **precision)
    return library.FullyShardedDataParallel(model, auto_wrap_policy=policy, mixed_precision=low, device_id=device())


def in_one_unit(library: Any, model: nn.Module, **precision: Any) -> Any:
    low = library.MixedPrecision(param_dtype=LOW, **precision)
    return library.FullyShardedDataParallel(model, mixed_precision=low, device_id=device())


def by_hand(library: Any, model: nn.Module) -> Any:
    block = model[1]
    block.batch_norm = library.FullyShardedDataParallel(block.batch_norm, mixed_precision=None, device_id=device())
    model[1] = in_one_unit(library, block)
    return in_one_unit(library, model)


# A batch norm that stays in its unit computes in low precision. The CPU requires the same dtype for its buffers.
BUFFERS = {"buffer_dtype": LOW}
NO_CLASSES, LAYER_NORMS = {"_module_classes_to_ignore": ()}, {"_module_classes_to_ignore": (nn.LayerNorm,)}
SEPARATE = [
    # How the model is wrapped, the fields of its precision, the layers that compute in float32, and their warning.
    pytest.param(by_policy, {}, {"batch_norm"}, "BatchNorm1d", marks=pytest.mark.spec("MP-19")),
    pytest.param(by_policy, BUFFERS | LAYER_NORMS, {"layer_norm"}, "LayerNorm", marks=pytest.mark.spec("MP-21")),
    pytest.param(by_policy, BUFFERS | NO_CLASSES, set(), None, marks=pytest.mark.spec("MP-21")),
    pytest.param(in_one_unit, BUFFERS, set(), None, marks=pytest.mark.spec("MP-20")),
    pytest.param(in_one_unit, BUFFERS | LAYER_NORMS, set(), None, marks=pytest.mark.spec("MP-20")),
    pytest.param(by_hand, {}, {"batch_norm"}, None, marks=pytest.mark.spec("MP-22")),
]


@pytest.mark.parametrize(("wrap", "precision", "full", "warned"), SEPARATE)
@ranks(2)
def test_norms_in_units_of_their_own_compute_in_full_precision_and_train_like_torch(
    wrap: Any, precision: dict[str, Any], full: set[str], warned: str | None
) -> None:
    found = []
    for library in (minifsdp, torch_fsdp):
        normed = modules.seeded(Normed)
        with caught_warnings() as caught:
            model = wrap(library, nn.Sequential(nn.Linear(6, 6, device=device()), normed), **precision)
        if library is minifsdp:
            texts = [str(warning.message) for warning in caught]
            assert [warned in text for text in texts] == ([True] if warned else [])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(0)
        found.append([running.iterate(model, 0, optimizer) for _ in range(4)])
        assert {name for name, (weight, _) in normed.seen.items() if weight is FULL} == full
    assert found[0] == found[1]
    assert found[0][-1] < found[0][0], "the loss decreases"


@pytest.mark.spec("MP-19", "MP-22")
@pytest.mark.parametrize(("wrap", "of_input"), [(by_policy, FULL), (by_hand, LOW)])
@ranks(2)
def test_only_a_policy_casts_the_input_of_a_separate_batch_norm(wrap: Any, of_input: torch.dtype) -> None:
    normed = modules.seeded(Normed)
    with caught_warnings():
        model = wrap(minifsdp, nn.Sequential(nn.Linear(6, 6, device=device()), normed))
    with trace.record() as recorder:
        running.iterate(model)
    # The layer of a manually wrapped batch norm computes in low precision with its weights in float32.
    assert normed.seen == {"linear": (LOW, LOW), "batch_norm": (FULL, of_input), "layer_norm": (LOW, LOW)}
    gathered = {event.unit: event.dtype for event in recorder.events if event.kind == "AG"}
    assert gathered == {"": LOW, "1": LOW, "1.batch_norm": FULL}


@pytest.mark.spec("MP-19")
@ranks(2)
def test_one_warning_lists_all_separately_wrapped_classes() -> None:
    layers = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Flatten(), nn.BatchNorm1d(8), nn.BatchNorm1d(8))
    with pytest.warns(UserWarning, match="BatchNorm1d, BatchNorm2d") as caught:
        FSDP(layers.to(device()), auto_wrap_policy=subject.always_wrap_policy, mixed_precision=MixedPrecision(LOW))
    assert len(caught) == 1


# --- the private function that programs import ---


@pytest.mark.spec("NAMES-13", "WRAP-05")
@pytest.mark.parametrize("only_children", [False, True])
@ranks(2)
def test_recursive_wrap_creates_the_units_that_a_policy_chooses(only_children: bool) -> None:
    chosen: set[type[nn.Module]] = {modules.Block, modules.Stack}
    policy = functools.partial(subject.wrap._module_wrap_policy, module_classes=chosen)
    model, num_wrapped = subject.wrap._recursive_wrap(
        modules.seeded(), policy, FSDP, ignored_modules=set(), ignored_params=set(), only_wrap_children=only_children
    )
    assert isinstance(model, FSDP) is not only_children
    assert len(FSDP.fsdp_modules(model)) == (4 if only_children else 5)
    assert num_wrapped == (4 * 42 if only_children else 56 + 4 * 42)
    if only_children:
        running.iterate(model)
    else:
        assert_trains_like(model, modules.seeded())

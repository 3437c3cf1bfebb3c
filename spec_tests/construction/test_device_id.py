"""The compute device: how ``device_id`` and the module choose it, and when parameters and buffers move to it.

Some decisions need a machine with an accelerator. The pure tests check them without one: no tensor is really moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import minifsdp
from minifsdp.compat import bfloat16
from minifsdp.fsdp1 import build, initial
from spec_tests.checkpoint.refusals import refused
from spec_tests.harness import device, ranks
from spec_tests.models.gradients import assert_trains_like
from spec_tests.models.modules import seeded
from spec_tests.models.sharding import wrapped
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ModuleWrapPolicy

# --- the choice ---


@pytest.mark.spec("DEV-01", "DEV-02", "DEV-09")
@pytest.mark.parametrize("is_given", [False, True])
@ranks(2)
def test_a_model_trains_with_and_without_a_device_id(is_given: bool) -> None:
    model = wrapped(device_id=device() if is_given else None)
    assert {unit.compute_device for unit in FSDP.fsdp_modules(model)} == {device()}
    assert_trains_like(model)
    assert {parameter.device for parameter in model.parameters()} == {device()}


class Elsewhere(nn.Module):
    """Reports parameters on any given devices, also on devices that this machine does not have."""

    def __init__(self, places: str) -> None:
        super().__init__()
        self.places = places.split()

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        return iter([SimpleNamespace(device=torch.device(place)) for place in self.places])


@pytest.mark.spec("DEV-02", "DEV-10")
@pytest.mark.pure
@pytest.mark.parametrize(
    ("places", "given", "expected"),
    [
        ("cuda:3 cuda:3", None, "cuda:3"),
        ("cpu", "cpu", "cpu"),
        ("cpu cuda:0", "cuda:0", "cuda:0"),
        # The meta device does not count, because its tensors can move to any device.
        ("meta cuda:0", None, "cuda:0"),
    ],
)
def test_compute_device_is_the_one_of_the_module_or_the_given_one(
    places: str, given: str | None, expected: str
) -> None:
    assert build.compute_device(Elsewhere(places), given and torch.device(given)) == torch.device(expected)


@pytest.mark.spec("DEV-06", "DEV-10")
@pytest.mark.pure
@pytest.mark.parametrize(
    ("places", "given", "error", "message"),
    [
        ("cuda:0 cuda:0", "cuda:1", ValueError, r"rank 0: .*cuda:1.*cuda:0"),
        ("cuda:0", "cpu", ValueError, r"cpu.*cuda:0"),
        ("cpu cuda:0", None, RuntimeError, r"rank 0: .*several devices.*(cpu.*cuda:0|cuda:0.*cpu)"),
        ("cuda:0 cuda:1", "cuda:0", RuntimeError, r"cuda:0.*cuda:1"),
        ("cuda:0 cuda:1", "cpu", RuntimeError, r"cuda:0.*cuda:1"),
    ],
)
def test_module_on_another_device_or_on_several_devices_is_refused(
    places: str, given: str | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build.compute_device(Elsewhere(places), given and torch.device(given))


@pytest.mark.spec("DEV-01", "DEV-07")
@ranks(2)
def test_the_meta_device_and_a_function_that_was_not_called_are_refused() -> None:
    with refused(ValueError, "device_id is the meta device", "param_init_fn"):
        wrapped(device_id="meta")
    with refused(TypeError, "device_id", "call it"):
        wrapped(device_id=torch.cuda.current_device, sync_module_states=True)


@pytest.mark.spec("DEV-01", "DEV-07")
@pytest.mark.accelerator
@ranks(2)
def test_a_device_without_an_index_is_the_current_one_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="index"):
        model = FSDP(nn.Linear(2, 2), device_id=torch.device(device().type))
    assert model.compute_device == device()
    # A warning would be an error.
    index = torch.get_device_module(device()).current_device()
    assert FSDP(nn.Linear(2, 2), device_id=index).compute_device == device()


# --- the move ---


@pytest.mark.spec("DEV-03")
@pytest.mark.accelerator
@ranks(2)
def test_cpu_module_is_initialized_there_and_computes_on_the_current_device_with_a_warning() -> None:
    plain, computed_on = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), []
    for layer in plain:
        layer.register_forward_hook(lambda module, args, output: computed_on.append(output.device))
    with pytest.warns(UserWarning, match="device_id"):
        model = FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    model(torch.ones(2, 6, device=device())).sum().backward()
    assert computed_on == [device()] * 2
    assert {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {device()}


ACCELERATOR = torch.device("cuda", 1)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, torch.device]]:
    """Records each tensor that would be moved, and the device it would be moved to."""
    calls: list[tuple[Tensor, torch.device]] = []
    monkeypatch.setattr(initial, "_move", lambda tensor, device: calls.append((tensor, device)))
    return calls


@pytest.mark.spec("DEV-03", "LEGACY-06")
@pytest.mark.proof("order only")
@pytest.mark.pure
def test_model_on_cpu_without_device_id_moves_only_buffers_and_repeats_one_warning(moved: Any) -> None:
    # PyTorch 1.13 moved the model to the accelerator to shard it, and then back.
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"rank 0: .*on the CPU.*cuda:1.*device_id"):
            initial.move_modules(list(model.named_modules()), ACCELERATOR, set(), has_device_id=False, sends=False)
    # A shard moves after the parameter is sharded. Buffers are not sharded, so they must move now.
    assert [(id(tensor), device) for tensor, device in moved] == [(id(b), ACCELERATOR) for b in model.buffers()] * 2


@pytest.mark.spec("DEV-03", "DEV-09", "SYNC-04")
@pytest.mark.proof("order only")
@pytest.mark.parametrize("sends", [False, True])
@pytest.mark.parametrize("place", ["where it computes", "on the CPU", "all ignored"])
@pytest.mark.pure
def test_module_on_compute_device_gives_no_warning(place: str, sends: bool) -> None:
    model = nn.Linear(3, 3)
    if place == "where it computes":
        # Any device except the CPU works. The meta device exists on every machine.
        model.to("meta")
    computes_on = torch.device("cpu") if place == "on the CPU" else ACCELERATOR
    ignored = set(model.parameters()) if place == "all ignored" else set()
    # A warning would be an error.
    initial.move_modules(list(model.named_modules()), computes_on, ignored, has_device_id=False, sends=sends)


@pytest.mark.spec("SYNC-04")
@pytest.mark.pure
def test_values_on_the_cpu_cannot_be_sent_between_accelerators(moved: Any) -> None:
    modules = list(nn.Linear(3, 3).named_modules())
    with pytest.raises(ValueError, match=r"rank 0: .*cuda:1.*sync_module_states.*device_id"):
        initial.move_modules(modules, ACCELERATOR, set(), has_device_id=False, sends=True)
    assert moved == []


@pytest.mark.spec("DEV-04")
@ranks(2)
def test_with_device_id_parameters_and_buffers_are_on_that_device_after_construction() -> None:
    plain = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    buffers = list(plain.buffers())
    model = FSDP(plain, device_id=device())
    assert {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {device()}
    if device().type == "cpu":
        assert all(after is before for after, before in zip(model.buffers(), buffers, strict=True)), "the same objects"


@pytest.mark.spec("DEV-05", "DEV-04")
@ranks(2)
def test_units_are_moved_and_sharded_one_by_one_from_inner_to_outer() -> None:
    model = seeded()
    calls: list[tuple[list[str], int]] = []
    paths = {module: path for path, module in model.named_modules()}
    original = initial.move_modules

    def noting(modules: Any, *args: Any, **kwargs: Any) -> None:
        owners = [paths[module] for _, module in modules if module._parameters]
        calls.append((owners, len(FSDP.fsdp_modules(model))))
        original(modules, *args, **kwargs)

    with mock.patch.object(initial, "move_modules", noting):
        wrapped(model, device_id=device())
    # Each entry has the modules that are moved, and the number of units that are already sharded at that time.
    assert calls == [*(([f"blocks.{index}.linear"], index) for index in range(4)), (["enter", "leave"], 4)]


@pytest.mark.spec("DEV-05")
@pytest.mark.accelerator
@ranks(2)
def test_full_model_is_never_on_device_at_once() -> None:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    full = sum(parameter.nbytes for parameter in model.parameters())
    accelerator = torch.get_device_module(device())
    before = accelerator.memory_allocated()
    accelerator.reset_peak_memory_stats()
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=device())
    # Half of the parameters stay on this rank. The rest allows for one layer and one flat parameter before sharding.
    assert accelerator.max_memory_allocated() - before < 0.9 * full
    assert next(model.parameters()).device == device()


# --- inputs ---


@pytest.mark.spec("DEV-08")
@ranks(2)
def test_inputs_of_any_nesting_are_on_the_compute_device_in_forward() -> None:
    class Collects(nn.Linear):
        def forward(self, x: Tensor, *more: Any, options: dict[str, Any]) -> Tensor:
            seen.extend(t.device for t in (x, more[0][1][0], options["mask"], options["deep"][0]["y"]))
            return super().forward(x)

    seen: list[torch.device] = []
    model = FSDP(Collects(4, 2).to(device()))
    # The batch is created on the CPU in any case.
    mask = torch.ones(3, dtype=torch.bool)
    options = {"mask": mask, "deep": ({"y": torch.ones(1)},), "text": "word"}
    model(torch.ones(3, 4), ("a", [torch.ones(1)]), options=options).sum().backward()
    assert seen == [device()] * 4
    assert options["mask"] is mask and mask.device.type == "cpu", "the caller's own tensor is not changed"


# --- whether the device computes in bfloat16 ---


@pytest.mark.spec("MP-27")
@pytest.mark.parametrize(
    ("has_cuda", "is_new_enough", "nccl", "expected"),
    [
        (False, True, (2, 27, 5), False),
        (True, True, (2, 10, 3), True),
        (True, True, (3, 0, 0), True),
        (True, True, (2, 9, 9), False),
        (True, False, (2, 27, 5), False),
        (True, True, None, False),
    ],
)
@pytest.mark.pure
def test_bf16_supported_requires_a_new_gpu_and_an_nccl_with_bfloat16(
    has_cuda: bool, is_new_enough: bool, nccl: Any, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def supported(including_emulation: bool = True) -> bool:
        return including_emulation or is_new_enough

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    monkeypatch.setattr(bfloat16.dist, "is_nccl_available", lambda: nccl is not None)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: nccl)
    assert minifsdp.bf16_supported() is expected


@pytest.mark.spec("MP-27")
@pytest.mark.gpu
@pytest.mark.pure
def test_a_gpu_of_this_decade_computes_in_bfloat16() -> None:
    assert minifsdp.bf16_supported() is (torch.cuda.get_device_capability() >= (8, 0))

"""Machine-dependent behavior: a model on the CPU of a machine with an accelerator, and native support for bfloat16.

``test_initial.py`` has the tests that need such a machine. The tests here check the same decisions one by one. They do
not need the device, because no tensor is really moved to it.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import minifsdp
from minifsdp.compat import bfloat16
from minifsdp.fsdp1 import initial
from spec_tests.checkpoint.refusals import caught_warnings

ACCELERATOR = torch.device("cuda", 1)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, torch.device]]:
    """Records each tensor that would be moved, and the device it would be moved to."""
    calls: list[tuple[torch.Tensor, torch.device]] = []
    monkeypatch.setattr(initial, "_move", lambda tensor, device: calls.append((tensor, device)))
    return calls


def two_modules() -> tuple[nn.Module, list[tuple[str, nn.Module]]]:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    return model, list(model.named_modules())


@pytest.mark.spec("DEV-03", "LEGACY-06")
@pytest.mark.proof("order only")
@pytest.mark.pure
def test_model_on_cpu_without_device_id_moves_only_buffers(moved: Any) -> None:
    # PyTorch 1.13 moved the model to the accelerator to shard it, and then back.
    model, modules = two_modules()
    with pytest.warns(UserWarning, match=r"rank 0: .*on the CPU.*cuda:1.*device_id"):
        initial.move_modules(modules, ACCELERATOR, set(), has_device_id=False, sends=False)
    # A shard moves after the parameter is sharded. Buffers are not sharded, so they must move now.
    assert [(id(tensor), device) for tensor, device in moved] == [(id(b), ACCELERATOR) for b in model.buffers()]
    assert len(moved) == 3


@pytest.mark.spec("DEV-03")
@pytest.mark.proof("order only")
@pytest.mark.pure
def test_units_repeat_the_same_warning_text(moved: Any) -> None:
    said = set()
    for _ in range(2):
        with caught_warnings() as caught:
            initial.move_modules(two_modules()[1], ACCELERATOR, set(), has_device_id=False, sends=False)
        said |= {str(warning.message) for warning in caught}
    assert len(said) == 1


@pytest.mark.spec("DEV-03", "DEV-09", "SYNC-04")
@pytest.mark.proof("order only")
@pytest.mark.parametrize("sends", [False, True])
@pytest.mark.parametrize("place", ["where it computes", "on the CPU", "nothing left"])
@pytest.mark.pure
def test_module_on_compute_device_gives_no_warning(place: str, sends: bool) -> None:
    model, modules = two_modules()
    device, ignored = ACCELERATOR, set(model.parameters())
    if place == "where it computes":
        # Any device except the CPU works. The meta device exists on every machine.
        model.to("meta")
    elif place == "on the CPU":
        device = torch.device("cpu")
    else:
        modules = modules[:2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        initial.move_modules(
            modules, device, ignored if place == "nothing left" else set(), has_device_id=False, sends=sends
        )


@pytest.mark.spec("SYNC-04")
@pytest.mark.pure
def test_values_on_the_cpu_cannot_be_sent_between_accelerators(moved: Any) -> None:
    _, modules = two_modules()
    with pytest.raises(ValueError, match=r"rank 0: .*cuda:1.*sync_module_states.*device_id"):
        initial.move_modules(modules, ACCELERATOR, set(), has_device_id=False, sends=True)
    assert moved == []


# --- bfloat16 ---


@pytest.mark.spec("MP-27")
@pytest.mark.pure
def test_without_cuda_bfloat16_is_not_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert minifsdp.bf16_supported() is False


@pytest.mark.spec("MP-27")
@pytest.mark.parametrize(
    ("is_new_enough", "has_nccl", "version", "expected"),
    [
        (True, True, (2, 10, 3), True),
        (True, True, (2, 27, 5), True),
        (True, True, (3, 0, 0), True),
        (True, True, (2, 9, 9), False),
        (False, True, (2, 27, 5), False),
        (True, False, (2, 27, 5), False),
    ],
)
@pytest.mark.pure
def test_bf16_supported_requires_a_new_gpu_and_an_nccl_with_bfloat16(
    monkeypatch: pytest.MonkeyPatch, is_new_enough: bool, has_nccl: bool, version: tuple[int, ...], expected: bool
) -> None:
    def supported(including_emulation: bool = True) -> bool:
        return True if including_emulation else is_new_enough

    def version_of_nccl() -> Any:
        assert has_nccl, "without NCCL there is no version"
        return version

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    monkeypatch.setattr(bfloat16.dist, "is_nccl_available", lambda: has_nccl)
    monkeypatch.setattr(torch.cuda.nccl, "version", version_of_nccl)
    assert minifsdp.bf16_supported() is expected


@pytest.mark.spec("MP-27")
@pytest.mark.gpu
@pytest.mark.pure
def test_a_gpu_of_this_decade_computes_in_bfloat16() -> None:
    assert minifsdp.bf16_supported() is (torch.cuda.get_device_capability() >= (8, 0))

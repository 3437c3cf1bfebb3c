"""``set_manual_backward_finalization`` and ``finalize_backward``: the program decides when gradients are reduced.

torch has these functions since 2.15. Its pipeline schedules use them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh

import minifsdp
from spec_tests.harness import device, ranks
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch, loss_of
from spec_tests.oracles import count_collectives

LIBRARIES = [minifsdp, torch_fsdp] if hasattr(torch_fsdp, "GradientReductionHandle") else [minifsdp]


def sharded_by(library: Any, **options: Any) -> Any:
    model = seeded()
    for block in model.blocks:
        library.fully_shard(block, **options)
    return library.fully_shard(model, **options)


def backward(model: Any, number: int = 0) -> None:
    loss_of(model(batch(number))).backward()


@pytest.mark.spec("NEW-25")
@pytest.mark.parametrize("async_op", [False, True])
@ranks(2)
def test_finalize_backward_reduces_the_gradients_of_all_backwards_once(async_op: bool) -> None:
    model, usual = sharded_by(minifsdp), sharded_by(minifsdp)
    num_units = len(model.blocks) + 1
    for step in range(2):
        model.set_manual_backward_finalization(True)
        model.set_requires_gradient_sync(False)
        with count_collectives() as counts:
            for number in range(3):
                backward(model, 10 * step + number)
        assert counts.calls["reduce_scatter"] == 0
        model.set_requires_gradient_sync(True)
        with count_collectives() as counts:
            handle = model.finalize_backward(async_op=async_op)
            if async_op:
                handle.wait()
                handle.wait()
        assert (handle is None) is not async_op
        assert counts.calls["reduce_scatter"] == num_units
        model.set_manual_backward_finalization(False)
        for number in range(3):
            usual.set_requires_gradient_sync(number == 2)
            backward(usual, 10 * step + number)
        for found, expected in zip(model.parameters(), usual.parameters(), strict=True):
            assert torch.equal(found.grad.to_local(), expected.grad.to_local())
            found.grad = expected.grad = None
    # Automatic again.
    backward(model)
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.spec("NEW-25")
@ranks(2)
def test_a_manual_iteration_ends_with_finalize_backward_whatever_set_is_last_backward_says() -> None:
    model = sharded_by(minifsdp)
    model.set_manual_backward_finalization(True)
    model.set_is_last_backward(True)
    backward(model)
    with pytest.raises(RuntimeError, match="finalize_backward"):
        model.set_manual_backward_finalization(False)  # The iteration has not ended.
    backward(model, 1)
    model.finalize_backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.spec("NEW-25")
@ranks(2)
def test_finalize_backward_before_the_first_forward_does_nothing() -> None:
    for library in LIBRARIES:
        model = sharded_by(library)
        assert model.finalize_backward() is None
        model.finalize_backward(async_op=True).wait()
        backward(model)
        assert all(parameter.grad is not None for parameter in model.parameters())


# --- mistakes ---


def without_manual_mode(library: Any) -> None:
    model = sharded_by(library)
    backward(model)
    model.finalize_backward()


def on_a_block(library: Any) -> None:
    model = sharded_by(library)
    model.set_manual_backward_finalization(True)
    backward(model)
    model.blocks[0].finalize_backward()


def mode_of_a_block(library: Any) -> None:
    model = sharded_by(library)
    backward(model)
    model.blocks[0].set_manual_backward_finalization(True)


def mode_of_a_block_before_the_first_forward(library: Any) -> None:
    model = sharded_by(library)
    model.blocks[0].set_manual_backward_finalization(True)
    backward(model)


def twice(library: Any) -> None:
    model = sharded_by(library)
    model.set_manual_backward_finalization(True)
    backward(model)
    model.finalize_backward(async_op=True)
    model.finalize_backward()


def reset_and_waited_for(library: Any) -> None:
    model = sharded_by(library)
    model.set_manual_backward_finalization(True)
    backward(model)
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    handle.wait()


def mode_changed_after_backward(library: Any) -> None:
    model = sharded_by(library)
    model.set_manual_backward_finalization(True)
    backward(model)
    model.set_manual_backward_finalization(False)


def mode_changed_in_backward(library: Any) -> None:
    model = sharded_by(library)
    model.blocks[0].register_full_backward_pre_hook(lambda *_: model.set_manual_backward_finalization(True))
    backward(model)


def in_backward(library: Any) -> None:
    model = sharded_by(library)
    model.set_manual_backward_finalization(True)
    model.blocks[0].register_full_backward_pre_hook(lambda *_: model.finalize_backward())
    backward(model)


def replicas_that_are_not_all_reduced(library: Any) -> None:
    mesh = init_device_mesh(device().type, (2, 1), mesh_dim_names=("replicate", "shard"))
    model = sharded_by(library, mesh=mesh)
    model.set_manual_backward_finalization(True)
    model.set_requires_all_reduce(False)
    backward(model)
    model.finalize_backward()


MISTAKES: dict[str, tuple[Callable[[Any], None], str]] = {
    "not manual": (without_manual_mode, r"set_manual_backward_finalization\(True\)"),
    "a block": (on_a_block, "root"),
    "mode of a block": (mode_of_a_block, "root"),
    "mode of a block, first": (mode_of_a_block_before_the_first_forward, "root"),
    "twice": (twice, "wait"),
    "reset": (reset_and_waited_for, "handle"),
    "mode after backward": (mode_changed_after_backward, "mode"),
    "mode in backward": (mode_changed_in_backward, "mode"),
    "in backward": (in_backward, "backward"),
    "not all-reduced": (replicas_that_are_not_all_reduced, "all-?reduce|partial"),
}


@pytest.mark.spec("NEW-25")
@pytest.mark.parametrize("mistake", MISTAKES)
@ranks(2)
def test_a_mistake_with_manual_finalization_is_an_error_as_in_torch(mistake: str) -> None:
    program, words = MISTAKES[mistake]
    for library in LIBRARIES:
        with pytest.raises(RuntimeError, match=words):
            program(library)


@pytest.mark.spec("NEW-25")
@ranks(2)
def test_a_forward_before_the_wait_is_an_error_and_the_wait_still_completes_the_gradients() -> None:
    model, usual = sharded_by(minifsdp), sharded_by(minifsdp)
    backward(usual)
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    backward(model)
    model.set_requires_gradient_sync(True)
    handle = model.finalize_backward(async_op=True)
    with pytest.raises(RuntimeError, match="wait"):
        model(batch(1))
    handle.wait()
    for found, expected in zip(model.parameters(), usual.parameters(), strict=True):
        assert torch.equal(found.grad.to_local(), expected.grad.to_local())
    model(batch(1))


@pytest.mark.spec("NEW-25", "NEW-15")
@ranks(2)
def test_after_reset_iter_state_a_manual_iteration_can_be_repeated() -> None:
    model, usual = sharded_by(minifsdp), sharded_by(minifsdp)
    backward(usual)
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    backward(model, 5)
    model.reset_iter_state()
    backward(model)
    model.set_requires_gradient_sync(True)
    model.finalize_backward()
    for found, expected in zip(model.parameters(), usual.parameters(), strict=True):
        assert torch.equal(found.grad.to_local(), expected.grad.to_local())


@pytest.mark.spec("NEW-25", "NEW-15")
@ranks(2)
def test_handle_of_before_a_reset_does_not_keep_later_calls_from_working() -> None:
    model = sharded_by(minifsdp)
    model.set_manual_backward_finalization(True)
    first, second = (loss_of(model(batch(number))) for number in (0, 1))
    first.backward()
    model.finalize_backward(async_op=True)
    model.reset_iter_state()
    second.backward()
    backward(model, 2)
    model.finalize_backward()
    assert all(parameter.grad is not None for parameter in model.parameters())

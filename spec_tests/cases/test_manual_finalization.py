"""``set_manual_backward_finalization`` and ``finalize_backward``: the program decides when gradients are reduced.

torch has these functions since 2.15. Its pipeline schedules use them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed.fsdp as torch_fsdp

import minifsdp
from spec_tests.harness import ranks
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch, loss_of
from spec_tests.models.sharding import column_mesh
from spec_tests.models.values import assert_same, full_gradients
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
        assert_same(full_gradients(model), full_gradients(usual))
        model.zero_grad()
        usual.zero_grad()
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


def finalized_by_a_block(model: Any) -> None:
    backward(model)
    model.blocks[0].finalize_backward()


def twice(model: Any) -> None:
    backward(model)
    model.finalize_backward(async_op=True)
    model.finalize_backward()


def reset_and_waited_for(model: Any) -> None:
    backward(model)
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    handle.wait()


def mode_changed_after_backward(model: Any) -> None:
    backward(model)
    model.set_manual_backward_finalization(False)


def mode_changed_in_backward(model: Any) -> None:
    model.blocks[0].register_full_backward_pre_hook(lambda *_: model.set_manual_backward_finalization(False))
    backward(model)


def finalized_in_backward(model: Any) -> None:
    model.blocks[0].register_full_backward_pre_hook(lambda *_: model.finalize_backward())
    backward(model)


def replicas_that_are_not_all_reduced(model: Any) -> None:
    model.set_requires_all_reduce(False)
    backward(model)
    model.finalize_backward()


@pytest.mark.spec("NEW-25")
@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (finalized_by_a_block, "root"),
        (twice, "wait"),
        (reset_and_waited_for, "handle"),
        (mode_changed_after_backward, "mode"),
        (mode_changed_in_backward, "mode"),
        (finalized_in_backward, "backward"),
        (replicas_that_are_not_all_reduced, "all-?reduce|partial"),
    ],
)
@ranks(2)
def test_a_mistake_in_manual_mode_is_an_error_as_in_torch(mistake: Callable[[Any], None], words: str) -> None:
    for library in LIBRARIES:
        options = {"mesh": column_mesh()} if mistake is replicas_that_are_not_all_reduced else {}
        model = sharded_by(library, **options)
        model.set_manual_backward_finalization(True)
        with pytest.raises(RuntimeError, match=words):
            mistake(model)


@pytest.mark.spec("NEW-25")
@pytest.mark.parametrize("has_run", [False, True])
@ranks(2)
def test_manual_mode_belongs_to_the_root_and_is_needed(has_run: bool) -> None:
    for library in LIBRARIES:
        model = sharded_by(library)
        if has_run:
            backward(model)
            with pytest.raises(RuntimeError, match=r"set_manual_backward_finalization\(True\)"):
                model.finalize_backward()
        with pytest.raises(RuntimeError, match="root"):
            model.blocks[0].set_manual_backward_finalization(True)
            backward(model)


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
    assert_same(full_gradients(model), full_gradients(usual))
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
    assert_same(full_gradients(model), full_gradients(usual))


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

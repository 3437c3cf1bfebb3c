"""`set_reduction_overlap` in both APIs: overlap a reduction with the next backward, or use the least memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from minifsdp import set_reduction_overlap
from spec_tests.harness import device, ranks
from spec_tests.live_bytes import LiveBytes
from spec_tests.subject import BackwardPrefetch, FullyShardedDataParallel, ModuleWrapPolicy, fully_shard, trace

WIDTH, NUM_BLOCKS = 128, 4
BLOCK = 4 * WIDTH * WIDTH  # bytes


def sharded(api: str, overlaps: bool) -> Any:
    """A stack of linear layers, each of which is a unit."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_BLOCKS)))
    if api == "fully_shard":
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            device_id=device(),
            use_orig_params=api == "original",
            backward_prefetch=None if api == "no prefetch" else BackwardPrefetch.BACKWARD_PRE,
        )
    set_reduction_overlap(model, overlaps)
    return model


def backward(model: Any) -> None:
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    model(torch.randn(1, WIDTH, generator=generator).to(device())).sum().backward()


def peak_of_step(model: Any, live: LiveBytes) -> int:
    """Bytes at the peak of a step. ``live`` counts from before the model is sharded, so it counts unsharded parameters.

    Gloo's thread releases a tensor shortly after it reports completion, so the result can differ between steps.
    """
    model.zero_grad()
    live.forget_peak()
    backward(model)
    return live.peak


APIS = pytest.mark.parametrize("api", ["flat", "original", "no prefetch", "fully_shard"])


@pytest.mark.spec("NEW-24")
@APIS
@ranks(2)
def test_reduction_without_overlap_ends_before_the_next_backward_begins(api: str) -> None:
    model = sharded(api, overlaps=False)
    backward(model)
    with trace.record() as recorder:
        backward(model)
    order = [event for event in recorder.events if event.kind in ("RS", "B") and event.unit]
    reductions = [event for event in order if event.kind == "RS"]
    assert len(reductions) == NUM_BLOCKS
    for reduction in reductions:
        later = [event for event in order if event.kind == "B" and event.start > reduction.start]
        assert all(reduction.end <= event.start for event in later)


@pytest.mark.spec("NEW-24")
@APIS
@ranks(2)
def test_memory_drops_by_one_gradient_without_overlap(api: str) -> None:
    peaks, gradients = [], []
    for overlaps in (True, False):
        with LiveBytes() as live:
            model = sharded(api, overlaps)
            peaks.append(min(peak_of_step(model, live) for _ in range(5)))
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(_local(one), _local(other))
    assert peaks[0] - peaks[1] > 0.9 * BLOCK, "the packed gradient of the previous unit, and the memory of its sum"


def _local(gradient: Any) -> torch.Tensor:
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


@pytest.mark.spec("NEW-24")
@ranks(2)
def test_reduction_overlap_can_be_set_for_one_group() -> None:
    model = sharded("fully_shard", overlaps=True)
    set_reduction_overlap(model[2], False)
    backward(model)
    with trace.record() as recorder:
        backward(model)
    spans = {(event.kind, event.unit): event for event in recorder.events if event.kind in ("RS", "B")}
    assert spans["RS", "2"].end <= spans["B", "1"].start
    assert spans["RS", "3"].end > spans["B", "2"].start


@pytest.mark.spec("NEW-24")
@pytest.mark.pure
def test_reduction_overlap_requires_sharded_module() -> None:
    with pytest.raises(ValueError, match="neither Linear nor any module inside it is sharded"):
        set_reduction_overlap(nn.Linear(1, 1), False)

"""The calculator, compared with the papers, and with measured memory and traffic.

On the CPU, live storages are counted (``live_bytes.py``); on CUDA, the allocator's statistics are read. The threads of
gloo release a tensor with a short delay, so the smallest number of several equal steps is the correct one.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import minifsdp
from docs_build.reading import papers
from minifsdp.engine.mesh import Group, default_group
from minifsdp_tools import cost, formulas, peaks
from minifsdp_tools.cost import Cluster, Cost, Job, Sent, activation_bytes, cost_of, operations, sent_by_link, step_time
from spec_tests import subject
from spec_tests.harness import device, ranks
from spec_tests.live_bytes import LiveBytes
from spec_tests.models.sharding import grid
from spec_tests.subject import FullyShardedDataParallel, ShardingStrategy, trace
from tutorials.gpt.model import GPT

LOW, FULL = torch.bfloat16, torch.float32
HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
BILLION = 10**9
WIDTH = 64
UNIT = 2 * WIDTH * WIDTH * 4  # bytes of one unit in float32: 32 KiB
# Activations, and scalars such as an optimizer's step: less than a tenth of a unit. Half of a shard would exceed it.
SLACK = UNIT // 9
# In units. On an accelerator the CPU runs ahead, so in backward there may also be memory that communication streams
# still read: the packed gradients of two units, and the output of the last all-gather.
IN_FLIGHT = 3


class Pair(nn.Module):
    """One unit of two matrices. It computes on a single sample, so its activations are very small."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Tower(nn.Module):
    """Four units, and a matrix of the root that is used last."""

    def __init__(self, width: int = WIDTH, num_units: int = 4, *, has_root: bool = True) -> None:
        super().__init__()
        self.pairs = nn.Sequential(*(Pair(width) for _ in range(num_units)))
        self.last = nn.Linear(width, width, bias=False) if has_root else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.pairs(x))


MATRIX = (WIDTH, WIDTH)
JOB = Job(units=[[MATRIX, MATRIX]] * 4, root=[MATRIX], num_shards=2)


# ---- the papers -----------------------------------------------------------------------------------------------------


@pytest.mark.spec("COST-02")
@pytest.mark.parametrize(
    ("billions", "num_ranks", "gigabytes"),
    [
        (7.5, 1, (120, 120, 120, 120)),
        (7.5, 4, (120, 52.5, 41.25, 30)),
        (7.5, 64, (120, 31.4, 16.6, 1.88)),
        (128, 16, (2048, 608, 368, 128)),
        (1000, 1024, (16000, 4011, 2013, 15.6)),
    ],
)
def test_the_table_of_the_zero_paper(billions: float, num_ranks: int, gigabytes: tuple[float, ...]) -> None:
    ours = [papers.zero_bytes(billions * BILLION, num_ranks, stage) / BILLION for stage in (0, 1, 2, 3)]
    # The paper prints three or four digits.
    assert ours == pytest.approx(gigabytes, rel=5e-3, abs=5e-3)


@pytest.mark.spec("COST-01", "COST-09")
def test_ddp_keeps_sixteen_bytes_for_each_parameter_in_full_precision() -> None:
    assert papers.model_states(1, parameter=4, gradient=4, optimizer=8) == 16
    assert papers.model_states(7 * BILLION, parameter=4, gradient=4, optimizer=8) == 112 * BILLION
    replicated = cost_of(Job(units=[[(7, BILLION)]], strategy="NO_SHARD", num_replicas=8))
    assert replicated.after_backward == 112 * BILLION


@pytest.mark.spec("COST-02", "COST-03")
def test_first_example_of_the_calculator_page_is_correct() -> None:
    priced = cost_of(Job(units=[[(1000,)]] * 4, num_shards=2))
    assert (priced.stored, priced.peak_backward, sum(priced.sent.values())) == (24_000, 44_000, 24_000)


@pytest.mark.spec("COST-02", "COST-03", "COST-07")
def test_peak_parameter_memory_is_that_of_the_fsdp_paper() -> None:
    units = [[(n, 1000)] for n in (800, 1600, 3200, 800)]
    total, largest = 6400 * 1000, 3200 * 1000
    job = Job(units=units, num_shards=8, optimizer=0, backward_prefetch=False)
    # Stored shards in full precision, and the largest unit in the compute dtype.
    assert cost_of(job).peak_forward == 4 * total / 8 + 4 * largest
    assert cost_of(replace(job, compute=LOW)).peak_forward == 4 * total / 8 + 2 * largest


@pytest.mark.spec("COST-02")
@pytest.mark.parametrize(
    ("numel", "num_shards", "padded"), [(15, 16, 16), (16, 16, 16), (1, 8, 8), (0, 4, 0), (9, 2, 10)]
)
def test_bucket_padding_is_smaller_than_number_of_ranks(numel: int, num_shards: int, padded: int) -> None:
    assert formulas.padded_flat([(numel,)], num_shards) == padded


@pytest.mark.spec("COST-02")
def test_bucket_is_padded_once_and_parameters_individually() -> None:
    shapes = [(3, 4), (3,), (5,)]
    assert formulas.padded_flat(shapes, 2) == 20
    assert formulas.padded_per_parameter(shapes, 2) == 16 + 4 + 6


@pytest.mark.spec("COST-06")
def test_cross_host_bytes_of_the_fsdp_paper_are_reproduced_and_its_slip_is_shown() -> None:
    num_ranks, per_host, model = 16, 8, 1.0
    whole = formulas.ring_all_reduce_sends(model, num_ranks)
    assert whole == 1.875
    sharded = 3 * formulas.ring_sends(model, num_ranks)
    assert sharded == 2.8125
    assert papers.hybrid_cross_host_as_printed(model, num_ranks, per_host) == pytest.approx(0.234, abs=5e-4)
    # Each ring between the two hosts has two ranks, not sixteen.
    assert papers.hybrid_cross_host(model, num_ranks, per_host) == 0.125


@pytest.mark.spec("COST-07", "COST-08")
def test_low_precision_halves_communication_but_not_storage() -> None:
    full = cost_of(JOB)
    low = cost_of(replace(JOB, compute=LOW))
    assert (low.stored, low.after_backward) == (full.stored, full.after_backward)
    assert low.sent == {kind: num_bytes / 2 for kind, num_bytes in full.sent.items()}
    assert (low.peak_forward - low.stored) * 2 == full.peak_forward - full.stored
    summed_full = cost_of(replace(JOB, compute=LOW, reduce=FULL))
    assert (summed_full.sent["AG"], summed_full.sent["RS"]) == (low.sent["AG"], full.sent["RS"])
    only_summed_low = cost_of(replace(JOB, reduce=LOW))
    assert (only_summed_low.sent["AG"], only_summed_low.sent["RS"]) == (full.sent["AG"], low.sent["RS"])


@pytest.mark.spec("COST-03", "COST-04")
def test_unit_that_is_too_large_needs_inner_wrapping_and_not_more_ranks() -> None:
    memory = 6 * BILLION
    layer = [(250_000, 1000)] * 8  # 8 GB
    for num_ranks in (8, 1024, 1_000_000):
        assert cost_of(Job(units=[layer], num_shards=num_ranks)).peak > memory
    split = Job(units=[[matrix] for matrix in layer], num_shards=1024)
    assert cost_of(split).peak < memory


@pytest.mark.spec("COST-02")
def test_offload_keeps_stored_tensors_on_the_host() -> None:
    here, away = cost_of(JOB), cost_of(replace(JOB, offload=True))
    assert (away.stored, away.host) == (0, here.stored)
    assert away.sent == here.sent
    assert away.peak < here.peak


def test_buffers_are_unsharded_on_every_rank_in_own_dtype() -> None:
    assert cost_of(replace(JOB, buffers=100)).stored == cost_of(JOB).stored + 400
    assert cost_of(replace(JOB, buffers=100, buffer=LOW)).stored == cost_of(JOB).stored + 200


@pytest.mark.parametrize("wrong", [{"strategy": "ZERO"}, {"num_shards": 0}, {"num_replicas": 0}, {"micro_batches": 0}])
def test_invalid_job_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        cost_of(replace(JOB, **wrong))


@pytest.mark.spec("COST-10")
def test_memory_is_printed_in_gigabytes_with_four_digits(capsys: pytest.CaptureFixture[str]) -> None:
    line = cost.memory_line(1_234_560_000, 2 * BILLION, "rank 0")
    assert line == "rank 0: 1.2346 GB allocated, 2.0000 GB at most"
    cost.print_memory("rank 3")
    assert capsys.readouterr().out.startswith("rank 3: ")


# ---- measured memory and traffic ------------------------------------------------------------------------------------


def wrapped(job: Job) -> Any:
    """A `Tower`, sharded as the job describes."""
    model: Any = Tower(num_units=len(job.units), has_root=bool(job.root)).to(device())
    if job.per_parameter:
        policy = subject.MixedPrecisionPolicy(param_dtype=job.compute, reduce_dtype=job.reduce)
        for pair in model.pairs:
            subject.fully_shard(pair, reshard_after_forward=job.reshards_to or not job.keeps, mp_policy=policy)
        # The root uses the default: it stays unsharded for its backward.
        subject.fully_shard(model, mp_policy=policy)
    else:
        model = FullyShardedDataParallel(
            model,
            grid() if "HYBRID" in job.strategy else None,
            ShardingStrategy[job.strategy],
            auto_wrap_policy=subject.ModuleWrapPolicy({Pair}),
            mixed_precision=subject.MixedPrecision(job.compute, job.reduce, job.buffer),
            backward_prefetch=subject.BackwardPrefetch.BACKWARD_PRE if job.backward_prefetch else None,
            forward_prefetch=job.forward_prefetch,
        )
    if not job.overlaps:
        minifsdp.set_reduction_overlap(model, False)
    return model


def fused_adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer that needs no temporary memory."""
    return torch.optim.Adam(parameters, fused=True)


def one_step(model: Any, optimizer: torch.optim.Optimizer, job: Job, weigh: Any = lambda phase: None) -> None:
    """A training step. Calls ``weigh(name)`` at the end of each phase."""
    optimizer.zero_grad()
    weigh("stored")
    for number in range(job.micro_batches):
        waits = job.no_sync and number < job.micro_batches - 1
        with model.no_sync() if waits else contextlib.nullcontext():
            loss = model(torch.ones(1, WIDTH, device=device())).float().sum()
            weigh("peak_forward")
            loss.backward()
            del loss
            weigh("peak_backward")
    weigh("after_backward")
    optimizer.step()
    weigh("peak_optimizer")


def weighed(job: Job, make: Any = wrapped, optimize: Any = fused_adam) -> dict[str, float]:
    """Measures what a job needs, by the names in `Cost`. Each value is the smallest of several steps."""
    found: dict[str, float] = {}
    with LiveBytes() as live:
        model = make(job)
        optimizer = optimize(model.parameters())
        for step in range(5):
            of_step: dict[str, float] = {}

            def weigh(phase: str, of_step: dict[str, float] = of_step) -> None:
                # The threads of gloo release a tensor when they are scheduled, which takes a while on a busy machine.
                time.sleep(0.01)
                weight = live.peak if phase.startswith("peak") else live.now()
                of_step[phase] = max(weight, of_step.get(phase, 0))
                live.forget_peak()

            one_step(model, optimizer, job, weigh)
            if step:  # the first one creates the optimizer's state
                found = {phase: min(weight, found.get(phase, weight)) for phase, weight in of_step.items()}
    return found


def assert_memory(found: dict[str, float], priced: Cost) -> None:
    """Measured values are at least the predicted ones, and exceed them by no more than activations."""
    apart = {name: (found[name] - getattr(priced, name)) / UNIT for name in found}
    most = {"peak_backward": 0 if device().type == "cpu" else IN_FLIGHT}
    assert all(-0.01 < units < most.get(name, 0) + SLACK / UNIT for name, units in apart.items()), (
        f"in units: apart by {apart}"
    )


def assert_sends(model: nn.Module, job: Job, priced: Cost) -> None:
    """Each collective is a ring: the bytes that this rank sends follow from the recorded sizes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with trace.record() as recorder:
            one_step(model, optimizer, job)
        sent, num = dict.fromkeys(("AG", "RS", "AR"), 0.0), dict.fromkeys(("AG", "RS", "AR"), 0)
        for event in recorder.events:
            if event.kind in sent:
                size, times = len(event.ranks), 2 if event.kind == "AR" else 1
                sent[event.kind] += times * event.num_bytes * (size - 1) / size
                num[event.kind] += 1
        assert (num, sent) == (priced.num_collectives, priced.sent)


PRECISIONS: list[dict[str, Any]] = [{"compute": LOW}, {"compute": LOW, "reduce": FULL}, {"reduce": LOW}]
STEPS: list[dict[str, Any]] = [
    {},
    {"micro_batches": 3},
    {"micro_batches": 2, "no_sync": True},
    {"micro_batches": 3, "no_sync": True},
]
OF_FULL_SHARD: list[dict[str, Any]] = [
    {"forward_prefetch": True},
    {"backward_prefetch": False},
    {"root": ()},
    {"overlaps": False, "backward_prefetch": False},
]
SHARDED = ("FULL_SHARD", "SHARD_GRAD_OP")
ROWS: list[dict[str, Any]] = [
    *({"strategy": strategy, **options} for strategy in (*SHARDED, "NO_SHARD") for options in [*STEPS, *PRECISIONS]),
    *({"strategy": "FULL_SHARD", **options} for options in OF_FULL_SHARD),
    *({"strategy": name, "per_parameter": True, **options} for name in SHARDED for options in [{}, *PRECISIONS]),
    *({"strategy": name, "per_parameter": True, "overlaps": False} for name in SHARDED),
    *({"strategy": name, "overlaps": False} for name in SHARDED),
    {"strategy": "FULL_SHARD", "overlaps": False, "compute": LOW},
]


def job_for(strategy: str, **options: Any) -> Job:
    num_shards, num_replicas = (1, 2) if strategy == "NO_SHARD" else (2, 1)
    return replace(JOB, strategy=strategy, num_shards=num_shards, num_replicas=num_replicas, **options)


@pytest.mark.spec("COST-01", "COST-02", "COST-03", "COST-06", "COST-07", "COST-08", "COST-21", "SHARD-16")
@pytest.mark.spec("EXPLAIN-03")
@pytest.mark.parametrize("options", ROWS, ids=lambda options: "-".join(map(str, options.values())))
@ranks(2)
def test_a_step_needs_the_calculated_memory_and_sends_the_calculated_bytes(options: dict[str, Any]) -> None:
    job = job_for(**options)
    priced = cost_of(job)
    assert_memory(weighed(job), priced)
    model = wrapped(job)
    if job.micro_batches == 1:
        assert minifsdp.explain(model).cost == priced
    assert_sends(model, job, priced)
    if not job.overlaps:
        saved = cost_of(replace(job, overlaps=True)).peak_backward - priced.peak_backward
        # A flat gradient of several parameters exists twice while it is concatenated, which needs as much memory.
        assert saved > 0 if job.per_parameter else saved <= 0


@pytest.mark.spec("COST-02", "COST-03", "COST-06", "COST-19", "EXPLAIN-03")
@pytest.mark.parametrize(
    "options",
    [
        *({"strategy": name, "num_replicas": 2, **step} for name in HYBRID for step in STEPS),
        {"num_shards": 4},
        {"num_shards": 4, "reshards_to": 2, "per_parameter": True},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@ranks(4)
def test_four_ranks_need_the_calculated_memory_and_send_the_calculated_bytes(options: dict[str, Any]) -> None:
    sends_by_itself = device().type == "cpu" and Group.of(default_group()).transport is not None
    job = replace(JOB, **options, by_messages=sends_by_itself)
    priced = cost_of(job)
    if job.micro_batches == 1 and not job.reshards_to:
        assert_memory(weighed(job), priced)
    model = wrapped(job)
    explained = minifsdp.explain(model)
    assert_sends(model, job, priced)
    if job.micro_batches == 1:
        assert explained.cost == priced
        assert (explained.job.strategy, explained.job.by_messages) == (job.strategy, sends_by_itself)


@pytest.mark.spec("COST-01")
@ranks(2)
def test_ddp_stores_the_calculated_memory_of_no_shard() -> None:
    """The reference for ``NO_SHARD`` is torch's DDP."""
    replica = DistributedDataParallel(Tower().to(device()))
    optimizer = torch.optim.Adam(replica.parameters())
    replica(torch.ones(1, WIDTH, device=device())).sum().backward()
    optimizer.step()
    kept = [*replica.parameters(), *(p.grad for p in replica.parameters())]
    kept += [moment for state in optimizer.state.values() for name, moment in state.items() if name != "step"]
    num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in kept)
    assert num_bytes == cost_of(job_for("NO_SHARD")).after_backward == 16 * sum(p.numel() for p in replica.parameters())


@pytest.mark.spec("COST-19")
def test_example_of_four_ranks_at_the_beginning_of_the_peaks_is_correct() -> None:
    one = Job(units=[[(1000,)]], num_shards=4)
    assert [peaks._reduction(replace(one, by_messages=sends), 4000) for sends in (False, True)] == [5000, 7000]
    # With two ranks, the other rank's shard is received where the result will be. ``NO_SHARD`` all-reduces in place.
    assert peaks._reduction(replace(one, num_shards=2, by_messages=True), 4000) == 6000
    assert peaks._reduction(replace(one, strategy="NO_SHARD", by_messages=True), 4000) == 4000


@pytest.mark.spec("COST-20")
def test_activations_of_later_units_are_freed_before_backward() -> None:
    plain = replace(JOB, root=(), backward_prefetch=False)
    none, whole = cost_of(plain), cost_of(replace(plain, activations=1111))
    assert (whole.peak_forward, whole.peak_backward) == (none.peak_forward + 1111, none.peak_backward + 1111)
    # Activations before the first unit, of each unit, and after the last unit. At the end of forward all of them exist.
    by_unit = cost_of(replace(plain, activations=[1, 10, 100, 0, 0, 1000 * UNIT]))
    assert by_unit.peak_forward == none.stored + 111 + 1000 * UNIT
    # Backward has its peak in the first unit, when only its own activations and those before it still exist.
    assert by_unit.peak_backward == none.peak_backward + 11
    borrowed = replace(plain, strategy="NO_SHARD", activations=[1, 10, 100, 0, 0, 1000])
    assert cost_of(borrowed).peak_forward == cost_of(borrowed).stored + 1111


@pytest.mark.spec("COST-02")
@ranks(4)
def test_uneven_units_store_their_padding_and_no_more() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    sharded = FullyShardedDataParallel(model.to(device()), auto_wrap_policy=subject.ModuleWrapPolicy({nn.Linear}))
    stored = sum(p.untyped_storage().nbytes() for p in sharded.parameters())
    job = Job(units=[[(5, 3), (5,)], [(1, 5), (1,)]], num_shards=4, optimizer=0)
    assert stored == cost_of(job).stored == 4 * (5 + 2)


def chain(job: Job) -> nn.Module:
    """One unit for each unit of the job, of the matrices that the job lists."""
    blocks = [nn.Sequential(*(nn.Linear(i, o, bias=False) for o, i in unit)) for unit in job.units]
    units = [
        FullyShardedDataParallel(block.to(device()), sharding_strategy=ShardingStrategy[job.strategy])
        for block in blocks
    ]
    return FullyShardedDataParallel(nn.Sequential(*units))


@pytest.mark.spec("COST-03")
@ranks(3)
def test_matrix_with_padding_needs_two_copies_of_its_gradient() -> None:
    job = Job(units=[[(WIDTH + 1, WIDTH)]], num_shards=3)
    assert_memory(weighed(job, make=chain), cost_of(job))


@pytest.mark.spec("COST-03")
@ranks(3)
def test_units_of_one_padded_matrix_free_the_gradient_of_the_unit_before() -> None:
    job = Job(units=[[(WIDTH + 1, WIDTH)], [(WIDTH, WIDTH + 1)]] * 2, num_shards=3)
    packed = 4 * (WIDTH + 1) * WIDTH
    assert weighed(job, make=chain)["peak_backward"] - cost_of(job).peak_backward < packed


@pytest.mark.spec("COST-03")
@ranks(2)
def test_middle_micro_batch_has_the_peak_if_the_first_unit_is_large() -> None:
    wide = 4 * WIDTH
    large, small = [(wide, WIDTH), (WIDTH, wide)], [MATRIX, MATRIX]
    job = Job(units=[large, *[small] * 4], num_shards=2, micro_batches=3, no_sync=True)
    assert_memory(weighed(job, make=chain), cost_of(job))


@pytest.mark.spec("COST-05", "COST-04")
@ranks(2)
def test_single_unit_uses_memory_of_full_model() -> None:
    job = Job(units=[], root=[MATRIX] * 8, num_shards=2)
    with LiveBytes() as live:
        model = FullyShardedDataParallel(Tower(has_root=False).to(device()))
        gc.collect()
        stored = live.now()
        live.forget_peak()
        model(torch.ones(1, WIDTH, device=device())).sum().backward()
    priced = cost_of(replace(job, optimizer=0))
    assert stored == pytest.approx(priced.stored, abs=SLACK)
    assert live.peak == pytest.approx(priced.peak_backward, abs=SLACK)


@pytest.mark.spec("COST-06")
@ranks(4)
def test_hybrid_strategy_sends_the_counted_bytes_across_hosts_and_not_those_of_the_paper() -> None:
    """Four ranks on two hosts of two: only the all-reduces are between hosts."""
    job = replace(JOB, strategy="HYBRID_SHARD", num_replicas=2)
    model = wrapped(job)
    with trace.record() as recorder:
        model(torch.ones(1, WIDTH, device=device())).sum().backward()
    here = dist.get_rank() // 2
    leaving = [event for event in recorder.events if any(rank // 2 != here for rank in event.ranks)]
    assert {event.kind for event in leaving} == {"AR"}
    sent = sum(event.num_bytes * 2 * (len(event.ranks) - 1) / len(event.ranks) for event in leaving)
    num_bytes = 4 * sum(p.numel() for p in Tower().parameters())
    assert sent == papers.hybrid_cross_host(num_bytes, 4, 2)
    assert sent != papers.hybrid_cross_host_as_printed(num_bytes, 4, 2)


# ---- links within machines and between them --------------------------------------------------------------------------

PER_MACHINE, KINDS = 2, ("AG", "RS", "AR")


def sent_by_ranks(job: Job) -> dict[str, Sent]:
    """Bytes sent within machines and between them, by kind: the mean over all ranks.

    Each collective is a ring in the order of ranks.
    """
    model, rank = wrapped(job), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trace.record() as recorder:
        one_step(model, optimizer, job)
    links = torch.zeros(3, 2, dtype=torch.float64)
    for event in recorder.events:
        if event.kind in KINDS:
            size = len(event.ranks)
            receiver = event.ranks[(event.ranks.index(rank) + 1) % size]
            is_between = rank // PER_MACHINE != receiver // PER_MACHINE
            times = 2 if event.kind == "AR" else 1
            links[KINDS.index(event.kind), int(is_between)] += times * event.num_bytes * (size - 1) / size
    dist.all_reduce(links)
    return {kind: Sent(*of_kind) for kind, of_kind in zip(KINDS, (links / 4).tolist(), strict=True)}


def job_on_four(strategy: str, **options: Any) -> Job:
    shards = {"NO_SHARD": 1, "FULL_SHARD": 4, "SHARD_GRAD_OP": 4}.get(strategy, 2)
    return replace(JOB, strategy=strategy, num_shards=shards, num_replicas=4 // shards, **options)


@pytest.mark.spec("COST-15")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@ranks(4)
def test_machine_links_carry_calculated_bytes(strategy: str) -> None:
    job = job_on_four(strategy, micro_batches=2)
    assert sent_by_ranks(job) == sent_by_link(job, PER_MACHINE)


@pytest.mark.spec("COST-15")
@ranks(4)
def test_smaller_mesh_all_gathers_within_machine_in_backward() -> None:
    job = job_on_four("FULL_SHARD", per_parameter=True, reshards_to=2)
    found = sent_by_link(job, PER_MACHINE)
    assert sent_by_ranks(job) == found
    # In a ring of both machines, half of the hops are between machines. All-gathers for backward stay within one.
    assert 0 < found["AG"].between < found["AG"].within
    assert found["RS"].between == found["RS"].within


@pytest.mark.spec("COST-15")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD"])
def test_bytes_within_and_between_machines_add_up_to_all_sent_bytes(strategy: str) -> None:
    job = replace(JOB, strategy=strategy, num_shards=4, num_replicas=3)
    sent = cost_of(job).sent
    for per_machine in (1, 3, 4, 12):
        links = sent_by_link(job, per_machine)
        assert {kind: one.within + one.between for kind, one in links.items()} == pytest.approx(sent)
        if per_machine == 1:
            assert {kind: one.within for kind, one in links.items()} == dict.fromkeys(sent, 0.0)
        if per_machine == 12:
            assert {kind: one.between for kind, one in links.items()} == dict.fromkeys(sent, 0.0)


@pytest.mark.spec("COST-15")
def test_sharding_within_machines_sends_nearly_as_much_in_total_and_less_between_machines() -> None:
    units = [[(1000, 1000)]] * 8
    full = Job(units=units, num_shards=64)
    hybrid = Job(units=units, strategy="HYBRID_SHARD", num_shards=8, num_replicas=8)
    assert sum(cost_of(hybrid).sent.values()) > 0.95 * sum(cost_of(full).sent.values())
    between = [sum(sent.between for sent in sent_by_link(job, 8).values()) for job in (full, hybrid)]
    model = 4 * 8_000_000
    # Three rings of all 64 ranks, with one hop in eight between machines; and the all-reduce of an eighth by 8 ranks.
    assert between == pytest.approx([3 * model * 63 / 64 / 8, 2 * model / 8 * 7 / 8])
    assert between[1] < 0.6 * between[0]


SLOW = Cluster(per_machine=2, operations=1e6, within=1e4, between=1e3)


@pytest.mark.spec("COST-18")
def test_step_takes_at_least_the_time_of_its_slowest_component_or_their_sum() -> None:
    # With 4000 bytes on 4 ranks, each rank sends 3000 in a collective: half between machines in 1.5 s, half within in
    # 0.15 s.
    job = Job(units=[[(1000,)]], num_shards=4)
    assert sent_by_link(job, 2)["RS"] == Sent(1500, 1500)
    time = step_time(job, 2e6, SLOW)
    # Two all-gathers and one reduce-scatter.
    assert (time.compute, time.communication) == pytest.approx((2.0, 4.5))
    assert (time.overlapped, time.apart) == pytest.approx((4.5, 6.5))
    busy = step_time(job, 9e6, SLOW)
    assert (busy.overlapped, busy.apart) == pytest.approx((9.0, 13.5))


@pytest.mark.spec("COST-18")
def test_different_links_overlap_and_one_ring_does_not() -> None:
    # A hybrid strategy sends 3 * 2000 bytes within a machine, and its all-reduce 2 * 2000 / 2 bytes between machines.
    job = Job(units=[[(1000,)]], strategy="HYBRID_SHARD", num_shards=2, num_replicas=2)
    time = step_time(job, 0.0, SLOW)
    assert time.communication == pytest.approx(0.6 + 2.0)
    assert time.overlapped == pytest.approx(2.0)


# ---- on an accelerator ----------------------------------------------------------------------------------------------

MIB = 2**20
WIDE = 1024  # a unit of 8 MiB, so that the allocator's rounding to 2 MiB does not matter


def memory() -> Any:
    """The device module that reports an accelerator's memory."""
    return torch.get_device_module(device())


@pytest.mark.accelerator
@pytest.mark.spec("COST-01", "COST-02", "COST-03")
@pytest.mark.parametrize("strategy", [*SHARDED, "NO_SHARD"])
@ranks(2)
def test_the_allocator_has_the_calculated_memory_between_steps_and_at_the_peak(strategy: str) -> None:
    job = Job(units=[[(WIDE, WIDE)] * 2] * 4, strategy=strategy, num_shards=1 if strategy == "NO_SHARD" else 2)
    _allocate_workspaces()
    before = memory().memory_allocated()
    model = FullyShardedDataParallel(
        Tower(WIDE, has_root=False).to(device()),
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=subject.ModuleWrapPolicy({Pair}),
    )
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    for _ in range(3):
        memory().reset_peak_memory_stats()
        model(torch.ones(1, WIDE, device=device())).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    memory().synchronize()
    assert memory().memory_allocated() - before == pytest.approx(cost_of(job).stored, abs=4 * MIB)
    if device().type == "cuda" and strategy in SHARDED:
        # The CPU runs ahead: up to two units are in flight where the formula counts one.
        peak, unit = memory().max_memory_allocated() - before, 2 * WIDE * WIDE * 4
        assert cost_of(job).peak - unit / 2 <= peak <= cost_of(job).peak + unit + 4 * MIB


def _allocate_workspaces(dtype: torch.dtype = torch.float32) -> None:
    """Allocates the workspaces of cuBLAS, one in this thread and one in that of backward: 64 MiB on an H200."""
    layer = nn.Linear(WIDE, WIDE, device=device(), dtype=dtype)
    layer(torch.ones(1, WIDE, device=device(), dtype=dtype, requires_grad=True)).sum().backward()
    memory().synchronize()


# --- the estimate of activations and of operations ---


HEADS, LENGTH, SEQUENCES = 4, 128, 8
TOKENS = LENGTH * SEQUENCES


class Checkpointed(nn.Module):
    """A checkpointed block: only its inputs are saved for backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, **kwargs)


def gpt(width: int, num_blocks: int, *, checkpointing: bool = False) -> GPT:
    """The model of ``train_gpt.py``."""
    torch.manual_seed(0)
    model = GPT(width=width, num_blocks=num_blocks, num_heads=HEADS)
    if checkpointing:
        model.blocks = nn.ModuleList(map(Checkpointed, model.blocks))
    return model


def job_of(model: GPT) -> Job:
    blocks = {id(p) for p in model.blocks.parameters()}
    root = [tuple(p.shape) for p in model.parameters() if id(p) not in blocks]
    return Job(units=[[tuple(p.shape) for p in block.parameters()] for block in model.blocks], root=root)


def loss_of(model: Callable[[Tensor], Tensor], text: Tensor) -> Tensor:
    return F.cross_entropy(model(text).flatten(0, 1), text.flatten())


@pytest.mark.spec("COST-16", "COST-17")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("width", "num_blocks"), [(64, 4), (128, 6), (256, 3)])
def test_activations_and_operations_of_the_small_gpt(width: int, num_blocks: int, checkpointing: bool) -> None:
    model = gpt(width, num_blocks, checkpointing=checkpointing)
    job, text = job_of(model), torch.randint(0, 256, (SEQUENCES, LENGTH))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with LiveBytes() as live:
        loss_of(model, text).backward()
    # The estimate omits the rotated queries and keys, and on a CPU a copy of the attention's output. The peak includes
    # the gradient of one matrix before it is accumulated: a few percent of all activations.
    assert 1.0 <= live.peak / activation_bytes(job, TOKENS, checkpointing=checkpointing) < 1.25
    with FlopCounterMode(display=False) as counter:
        loss_of(model, text).backward()
    by_operator = counter.get_flop_counts()["Global"]
    products = sum(number for operator, number in by_operator.items() if "attention" not in str(operator))
    assert operations(job, TOKENS, checkpointing=checkpointing) == products


@pytest.mark.spec("COST-16")
def test_the_count_of_the_paper_about_activations_is_reproduced() -> None:
    h, tokens = 64, 10
    block = [(3 * h, h), (3 * h,), (h, h), (4 * h, h), (h, 4 * h)]
    job = Job(units=[block] * 3, compute=torch.bfloat16)
    working = 2 * tokens * 5 * h
    # 34 bytes for each token and element of h, minus the two dropout masks of one byte each.
    assert activation_bytes(job, tokens) == (34 - 2) * tokens * h * 3 + working
    assert activation_bytes(job, tokens, checkpointing=True) == 2 * tokens * h * 3 + 32 * tokens * h + working


def test_job_without_matrices_has_no_activations_or_operations() -> None:
    job = Job(units=[[(1000,)]] * 4, num_shards=2)
    assert (activation_bytes(job, 100), operations(job, 100)) == (0, 0)
    assert (activation_bytes(job, 100, checkpointing=True), operations(job, 100, checkpointing=True)) == (0, 0)

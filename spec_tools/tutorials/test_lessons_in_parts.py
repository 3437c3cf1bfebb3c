"""Parts of the lessons that no run on a CPU shows: each line that differs, and the effect of each switch."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

needs_transformers = pytest.mark.needs("transformers")


@pytest.fixture(autouse=True)
def scripts_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "tutorials"))


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


@needs_transformers
@pytest.mark.spec("TRAIN-19")
def test_track_memory_records_and_shows_the_memory_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    t5 = importlib.import_module("t5_summarise")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2**30)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2**31)
    tracked, not_tracked = (t5.record_of(1, 2.0, (3.0, None), t5.parse(given)) for given in (["--track-memory"], []))
    assert (tracked.allocated, tracked.reserved) == (2**30, 2**31)
    assert "1.0000 GB allocated, 2.0000 GB reserved" in t5.describe(tracked)
    assert (not_tracked.allocated, not_tracked.reserved) == (None, None)
    assert "allocated" not in t5.describe(not_tracked)


@needs_transformers
@pytest.mark.spec("TRAIN-19")
@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("validates", [False, True])
def test_save_model_and_run_validation_decide_what_is_called(
    saves: bool, validates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    t5 = importlib.import_module("t5_summarise")
    called: list[str] = []
    monkeypatch.setattr(t5, "train", lambda model, training, optimizer, *_: optimizer.step() or 2.0)
    monkeypatch.setattr(t5, "validate", lambda *_: called.append("validate") or 1.0)
    monkeypatch.setattr(t5, "save", lambda model, path, place: called.append(f"save {path.parent}"))
    monkeypatch.setattr(t5, "say", lambda *_: None)
    given = ["--epochs=2", "--folder=here", *(["--save-model"] if saves else [])]
    options: Any = t5.parse([*given, *([] if validates else ["--no-run-validation"])])
    nothing: Any = None
    records, saved = t5.fit(torch.nn.Linear(1, 1), nothing, nothing, options, nothing)
    assert [record.validation_loss for record in records] == [1.0 if validates else None] * 2
    # The validation loss does not fall in the second epoch. Without validation, the last epoch is saved.
    epochs = ([1] if validates else [2]) if saves else []
    assert saved == epochs
    assert called.count("validate") == 2 * validates
    assert called.count("save here") == len(epochs)


@needs_transformers
@pytest.mark.spec("TRAIN-19")
@pytest.mark.parametrize(("given", "expected"), [([], "auto"), (["--no-cuda"], "cpu")])
def test_no_cuda_chooses_the_cpu(given: list[str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    common: Any = importlib.import_module("common")
    chosen = []
    monkeypatch.setattr(common, "on_ranks", lambda lesson, device: chosen.append(device))
    path = Path(str(importlib.import_module("t5_summarise").__file__))
    monkeypatch.setattr(sys, "argv", [str(path), *given])
    script: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec"), script)
    assert chosen == [expected]


@needs_transformers
@pytest.mark.spec("TRAIN-19")
def test_the_help_names_the_default_of_each_number(capsys: pytest.CaptureFixture[str]) -> None:
    t5 = importlib.import_module("t5_summarise")
    with pytest.raises(SystemExit):
        t5.parse(["--help"])
    stated, options = " ".join(capsys.readouterr().out.split()), vars(t5.parse([]))
    numbers = re.findall(r"--([a-z-]+) (?:N|LR|GAMMA) (?:[^-]*?)default: ([0-9.]+)", stated)
    assert {name for name, _ in numbers} >= {"batch-size", "test-batch-size", "epochs", "lr", "gamma", "seed"}
    assert all(float(default) == options[name.replace("-", "_")] for name, default in numbers)

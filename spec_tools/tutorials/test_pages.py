"""The code of the API page, of the boxes "Your code" and of "Use it with your model" runs as it is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from spec_tests.harness.accounting import ROOT

pytestmark = pytest.mark.pure


def output_of(program: str, folder: Path, num_ranks: int = 2) -> str:
    """The output of a program, started by torchrun in a folder."""
    (folder / "train.py").write_text(program)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    ended = subprocess.run([*launch, "train.py"], cwd=folder, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


BEFORE = """
import torch
import torch.distributed as dist
from minifsdp import fully_shard

class Block(torch.nn.Linear):
    pass

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(8, 8) for _ in range(3))
        self.head = torch.nn.Linear(8, 1)

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x)

def new():
    torch.manual_seed(0)
    return Model()

def sharded(model):
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)

def assert_equal_gradients(model, plain):
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)

def assert_equal_values(model, expected):
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.full_tensor(), expected[name])

dist.init_process_group("gloo")
model, plain = new(), new()
batch = torch.randn(8, 8)
"""
AFTER = "dist.destroy_process_group()\n"

# ---- the API page: for each example, in the order of the page, the lines before and after it ----

EXAMPLES = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "api.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
AROUND_EXAMPLES = {
    "fully_shard": (
        "",
        """
        expected = torch.optim.AdamW(plain.parameters())
        plain(batch).mean().backward()
        expected.step()
        assert_equal_values(model, plain.state_dict())
        # Adam's step hardly depends on the scale of the gradient.
        assert_equal_gradients(model, plain)
        """,
    ),
    "mixed precision": (
        "model = new()",
        """
        output.mean().backward()
        model.reshard()
        assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
        """,
    ),
    "replicate": (
        "model, plain = new(), new()",
        """
        plain(batch).mean().backward()
        assert all(placement.is_replicate() for placement in model.blocks[0].weight.placements)
        assert_equal_gradients(model, plain)
        """,
    ),
    "wrapper": (
        "model, plain = new(), new()",
        "assert len(FullyShardedDataParallel.fsdp_modules(model)) == 4",
    ),
    "no_sync": (
        # The step of SGD depends on the scale of the gradient.
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        """
        expected = torch.optim.SGD(plain.parameters(), lr=0.1)
        plain(batch).mean().backward()
        expected.step()
        with FullyShardedDataParallel.summon_full_params(model):
            for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(one, other)
        """,
    ),
    "state_dict_type": (
        "",
        """
        dist.barrier()
        loaded = torch.load("model.pt", weights_only=True)
        torch.testing.assert_close(loaded, dict(plain.state_dict()))
        """,
    ),
    "optim_state_dict": (
        """
        optimizer = torch.optim.AdamW(model.parameters())
        model(batch).mean().backward()
        optimizer.step()
        before = [optimizer.state.get(p, {}) for p in model.parameters()]
        """,
        """
        assert state["state"].keys() == dict(plain.named_parameters()).keys()
        for p, other in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(optimizer.state.get(p, {}), other)
        """,
    ),
    "while_all_have_data": (
        """
        loader = [batch] * (3 + 2 * dist.get_rank())
        before = optimizer.state_dict()['state'][0]['step'].item()
        """,
        "assert optimizer.state_dict()['state'][0]['step'].item() == before + 3",
    ),
    "explain": ("", "assert 'on 8 ranks' in str(found) and found.cost.peak > 0"),
}


@pytest.mark.spec("LEARN-09")
def test_examples_of_the_api_page_run(tmp_path: Path) -> None:
    program = [BEFORE]
    for example, (before, after) in zip(EXAMPLES, AROUND_EXAMPLES.values(), strict=True):
        program += [dedent(before), example, dedent(after)]
    output_of("\n".join([*program, AFTER]), tmp_path)


# ---- the boxes "Your code": for each page, the lines before and after the box ----

BOX = re.compile(r'^!!! example "Your code"\n\n    ```python\n(.*?)^    ```', re.MULTILINE | re.DOTALL)
AROUND_BOXES = {
    "unit": ("", "assert len(list(model.parameters())) == 8; model(batch).sum().backward()"),
    "strategies": ("", "assert model.head.weight.device_mesh.shape == (2, 2); model(batch).sum().backward()"),
    "precision": (
        "",
        """
        # Before the first forward, the parameters are the stored shards.
        assert model.head.weight.dtype == torch.float32
        assert model(batch).dtype == torch.bfloat16
        """,
    ),
    "accumulate": (
        """
        sharded(model)
        loss_of = lambda output: output.square().mean()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        expected = torch.optim.SGD(plain.parameters(), lr=0.1)
        loss_of(plain(batch)).backward()
        expected.step()
        """,
        "assert_equal_values(model, plain.state_dict())",
    ),
    "checkpoints": (
        """
        sharded(model)
        optimizer = torch.optim.Adam(model.parameters())
        model(batch).sum().backward()
        optimizer.step()
        before = {name: value.full_tensor() for name, value in model.state_dict().items()}
        """,
        "assert_equal_values(model, before)",
    ),
}


@pytest.mark.parametrize("page", AROUND_BOXES)
def test_the_box_runs(page: str, tmp_path: Path) -> None:
    before, after = map(dedent, AROUND_BOXES[page])
    (box,) = BOX.findall((ROOT / "docs" / "learn" / f"{page}.md").read_text("utf-8"))
    code = dedent(box).replace('init_device_mesh("cuda", (2, 8)', 'init_device_mesh("cpu", (2, 2)')
    program = "\n".join([BEFORE, before, code, after, AFTER])
    output_of(program, tmp_path, num_ranks=4 if page == "strategies" else 2)


# ---- "Use it with your model" ----

PAGE = (ROOT / "docs" / "use-it.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
# For each API: the script, and the lines that load its checkpoint in one process.
SCRIPTS = {"fully_shard": BLOCKS[:2], "wrapper": BLOCKS[2:]}
PRINT_MASK = "print(f'mask {torch.nn.functional.dropout(torch.ones(64)).tolist()}')"
SAVE_WEIGHTS = "torch.save(model.state_dict(), 'weights.pt')"


@pytest.mark.parametrize("api", SCRIPTS)
def test_a_resumed_script_computes_the_same_bits_with_dropout(api: str, tmp_path: Path) -> None:
    script, in_one_process = SCRIPTS[api]
    assert "dropout=0.1" in script
    assert "NUM_EPOCHS = 2" in script
    once, twice = tmp_path / "once", tmp_path / "twice"
    once.mkdir()
    twice.mkdir()
    lines = output_of(script + PRINT_MASK, once).splitlines(keepends=True)
    expected = "".join(line for line in lines if line.startswith("epoch"))
    assert len({line for line in lines if line.startswith("mask")}) == 2, "all ranks drop the same values"
    first = output_of(script.replace("NUM_EPOCHS = 2", "NUM_EPOCHS = 1"), twice)
    assert expected.count("\n") == 2
    assert first + output_of(script, twice) == expected
    weights = []
    for folder in (once, twice):
        output_of(in_one_process + SAVE_WEIGHTS, folder, num_ranks=1)
        weights.append(torch.load(folder / "weights.pt"))
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name

"""The boxes "Your code" of the learning pages run as they are, on two ranks or four."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from spec_tests.harness.accounting import ROOT

pytestmark = pytest.mark.pure

BOX = re.compile(r'^!!! example "Your code"\n\n    ```python\n(.*?)^    ```', re.MULTILINE | re.DOTALL)
BOXES = {path.stem: BOX.findall(path.read_text("utf-8")) for path in sorted((ROOT / "docs" / "learn").glob("*.md"))}
BEFORE = """
import copy
import torch
import torch.distributed as dist
from minifsdp import fully_shard

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.head = torch.nn.Linear(8, 1)

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x)

def sharded(model):
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)

def full(model):
    return {name: value.full_tensor() for name, value in model.state_dict().items()}

dist.init_process_group("gloo")
torch.manual_seed(0)
model = Model()
plain = copy.deepcopy(model)
"""
# The program before the box of a page, and after it.
AROUND = {
    "unit": ("", "assert len(list(model.parameters())) == 8; model(torch.ones(2, 8)).sum().backward()"),
    "strategies": (
        "",
        "assert model.head.weight.device_mesh.shape == (2, 2); model(torch.ones(2, 8)).sum().backward()",
    ),
    "precision": (
        "",
        """
        # Before the first forward, the parameters are the stored shards.
        assert model.head.weight.dtype == torch.float32
        assert model(torch.ones(2, 8)).dtype == torch.bfloat16
        """,
    ),
    "accumulate": (
        """
        sharded(model)
        batch = torch.randn(8, 8)
        loss_of = lambda output: output.square().mean()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        expected = torch.optim.SGD(plain.parameters(), lr=0.1)
        loss_of(plain(batch)).backward()
        expected.step()
        """,
        "for name, value in full(model).items(): torch.testing.assert_close(value, plain.state_dict()[name])",
    ),
    "checkpoints": (
        """
        sharded(model)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        before = full(model)
        """,
        "for name, value in full(model).items(): torch.testing.assert_close(value, before[name])",
    ),
}


@pytest.mark.parametrize("page", AROUND)
def test_the_box_runs(page: str, tmp_path: Path) -> None:
    (box,) = BOXES[page]
    before, after = AROUND[page]
    code = textwrap.dedent(box).replace('init_device_mesh("cuda", (2, 8)', 'init_device_mesh("cpu", (2, 2)')
    end = "dist.destroy_process_group()\n"
    (tmp_path / "train.py").write_text("\n".join([BEFORE, textwrap.dedent(before), code, textwrap.dedent(after), end]))
    num_ranks = "4" if page == "strategies" else "2"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks, "train.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-3000:]

"""The examples of the API page run as they are, on two ranks, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spec_tests.harness.accounting import ROOT
from spec_tests.harness.programs import output_of_ranks

pytestmark = pytest.mark.pure

PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
BEFORE = """
import os
import torch
import torch.distributed as dist

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

def new(batch_size=8):
    torch.manual_seed(0)
    return Model(), torch.randn(batch_size, 8)

dist.init_process_group("gloo")
os.chdir(os.environ["FOLDER"])
"""
# For each example, in the order of the page: a line that is only in this example, the lines before it, and after it.
CASES = {
    "fully_shard": (
        "optimizer = torch.optim.AdamW(model.parameters())\nmodel(batch)",
        "model, batch = new(); plain, _ = new()",
        """
expected = torch.optim.AdamW(plain.parameters())
plain(batch).mean().backward()
expected.step()
for one, other in zip(model.parameters(), plain.parameters(), strict=True):
    torch.testing.assert_close(one.full_tensor(), other)
    # Adam's step hardly depends on the scale of the gradient.
    torch.testing.assert_close(one.grad.full_tensor(), other.grad)
""",
    ),
    "mixed precision": (
        "policy = MixedPrecisionPolicy(",
        "model, batch = new()",
        """
output.mean().backward()
model.reshard()
assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
""",
    ),
    "replicate": (
        "replicate(model.blocks[0])",
        "model, batch = new(); plain, _ = new()",
        """
plain(batch).mean().backward()
placements = model.blocks[0].weight.placements
assert all(placement.is_replicate() for placement in placements), placements
for one, other in zip(model.parameters(), plain.parameters(), strict=True):
    torch.testing.assert_close(one.grad.full_tensor(), other.grad)
""",
    ),
    "wrapper": (
        "model = FullyShardedDataParallel(",
        "model, batch = new(); plain, _ = new()",
        "assert len(FullyShardedDataParallel.fsdp_modules(model)) == 4",
    ),
    "no_sync": (
        "with model.no_sync():",
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
        "config = FullStateDictConfig(",
        "",
        """
dist.barrier()
loaded = torch.load("model.pt", weights_only=True)
torch.testing.assert_close(loaded, dict(plain.state_dict()))
""",
    ),
    "optim_state_dict": (
        "state = FullyShardedDataParallel.optim_state_dict(",
        "optimizer = torch.optim.AdamW(model.parameters()); model(batch).mean().backward(); optimizer.step(); "
        "before = [optimizer.state.get(p, {}) for p in model.parameters()]",
        """
assert state["state"].keys() == dict(plain.named_parameters()).keys()
for p, other in zip(model.parameters(), before, strict=True):
    torch.testing.assert_close(optimizer.state.get(p, {}), other)
""",
    ),
    "while_all_have_data": (
        "for batch in while_all_have_data(loader):",
        "loader, before = [batch] * (3 + 2 * dist.get_rank()), optimizer.state_dict()['state'][0]['step'].item()",
        "assert optimizer.state_dict()['state'][0]['step'].item() == before + 3",
    ),
    "explain": ("found = explain(", "", "assert 'on 8 ranks' in str(found) and found.cost.peak > 0"),
}


@pytest.mark.spec("LEARN-09")
def test_examples_of_the_api_page_run(tmp_path: Path) -> None:
    program = [BEFORE]
    for example in EXAMPLES:
        ((_, before, after),) = [case for case in CASES.values() if case[0] in example]
        program += [before, example, after]
    (tmp_path / "examples.py").write_text("\n".join([*program, "dist.destroy_process_group()\n"]))
    environment = {"FOLDER": str(tmp_path)}
    output_of_ranks(tmp_path / "examples.py", num_ranks=2, environment=environment, limit=90.0)

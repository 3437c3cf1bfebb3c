"""``fully_shard`` in a program that does not call ``init_process_group``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from minifsdp.batches import token_scale
from spec_tests.harness.accounting import ROOT
from spec_tests.harness.programs import output_of_ranks
from spec_tests.subject import FullyShardedDataParallel, ShardedGradScaler, ShardingStrategy, fully_shard

pytestmark = pytest.mark.pure

MODEL = """
import os
from collections import OrderedDict
import torch
import torch.distributed as dist
from torch import nn

torch.manual_seed(0)
blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
model = nn.Sequential(OrderedDict(blocks=blocks, head=nn.Linear(4, 2)))
"""
STEP = """
mesh = model.head.weight.device_mesh
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for step in range(2):
    torch.manual_seed(step + 10 * dist.get_rank())
    model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
values = [parameter.full_tensor().sum().item() for parameter in model.parameters()]
shown = [dist.get_world_size(), dist.get_backend_config(), mesh.device_type, mesh.shape]
shown += [round(value, 4) for value in values]
# In one call, because the ranks print to the same pipe.
os.write(1, f"shows {dist.get_rank()} {shown}\\n".encode())
dist.destroy_process_group()
"""


def of_torch(text: str) -> str:
    """The snippet with minifsdp's import line replaced by torch's."""
    lines = [line for line in text.splitlines() if not line.startswith("from minifsdp")]
    return "\n".join(line.removeprefix("# ") for line in lines) + "\n"


def shown_by_two_ranks(program: str, folder: Path) -> list[str]:
    """The output of the ranks of ``program``, which start with only a launcher's environment variables."""
    script = folder / "program.py"
    script.write_text(program)
    output = output_of_ranks(script, num_ranks=2, environment={})
    return sorted(line for line in output.splitlines() if line.startswith("shows"))


@pytest.mark.spec("START-02")
def test_index_page_snippet_runs_with_changed_import(tmp_path: Path) -> None:
    page = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    text = page.partition("```python\n")[2].partition("```")[0]
    ours = shown_by_two_ranks(MODEL + text + STEP, tmp_path)
    assert ours == shown_by_two_ranks(MODEL + of_torch(text) + STEP, tmp_path)
    assert len(ours) == 2


@pytest.mark.spec("START-03")
def test_fully_shard_without_a_launcher_names_launcher_init_function_and_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"(?s)RANK expected.*torchrun.*init_process_group.*mesh=") as caught:
        fully_shard(nn.Linear(2, 2))
    assert "process_group=" not in str(caught.value)


@pytest.mark.spec("START-03", "CTOR-07")
def test_error_of_each_other_function_names_its_own_argument() -> None:
    for strategy in (None, ShardingStrategy.NO_SHARD, ShardingStrategy.HYBRID_SHARD):
        # The device is given, because this process belongs to no rank and must not create a context on a GPU.
        with pytest.raises(RuntimeError, match=r"init_process_group\(\).*process_group="):
            FullyShardedDataParallel(nn.Linear(2, 2), sharding_strategy=strategy, device_id=torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"init_process_group\(\).*pass group="):
        token_scale(torch.ones(()))
    with pytest.raises(RuntimeError, match=r"init_process_group\(\).*process_group="):
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
        ShardedGradScaler(device="cpu")._unscale_grads_(optimizer, torch.ones(()), torch.zeros(()), False)

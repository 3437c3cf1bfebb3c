"""Lightning Fabric trains a small GPT-2 on a file of Python's standard library, with FSDP1.

python tutorials/frameworks/fabric_gpt.py
"""

import argparse
from pathlib import Path

import instead_of_torch  # noqa: F401
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

fabric = Fabric(devices=2, strategy=FSDPStrategy(auto_wrap_policy={GPT2Block}))
fabric.launch()

fabric.seed_everything(0)
config = GPT2Config(vocab_size=256, n_positions=32, n_embd=64, n_layer=2, n_head=2)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
model = fabric.setup_module(GPT2LMHeadModel(config))
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))

text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
rows = text[: 64 * 32].view(64, 32)
loader = fabric.setup_dataloaders(DataLoader(rows, batch_size=4))

for tokens in loader:
    loss = model(input_ids=tokens, labels=tokens).loss
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    fabric.print(f"loss {loss.item():.5f}")

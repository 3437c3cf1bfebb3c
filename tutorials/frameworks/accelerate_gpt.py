"""Accelerate trains a small GPT-2 on a file of Python's standard library, with FSDP2.

torchrun --nproc-per-node 2 tutorials/frameworks/accelerate_gpt.py
"""

import argparse
from pathlib import Path

import instead_of_torch  # noqa: F401
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2,
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=["GPT2Block"],
)
accelerator = Accelerator(fsdp_plugin=plugin, cpu=not torch.cuda.is_available())

torch.manual_seed(0)
# Accelerate shards no tied weights with FSDP2.
config = GPT2Config(vocab_size=256, n_positions=32, n_embd=64, n_layer=2, n_head=2, tie_word_embeddings=False)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
rows = text[: 64 * 32].view(64, 32)
loader = DataLoader(rows, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for tokens in loader:
    loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"loss {loss.item():.5f}")

accelerator.end_training()

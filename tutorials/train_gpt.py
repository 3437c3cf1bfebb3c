"""Train a GPT on the source of Python itself, with every parameter sharded over the ranks.

Run it in one of two ways; the second starts the first::

    torchrun --standalone --nproc-per-node 2 tutorials/train_gpt.py
    python tutorials/train_gpt.py

It takes about a minute on two CPU cores. There is nothing to download: the text is the standard library of the Python
that runs it, byte by byte, and the 256 values of a byte are the vocabulary.

What happens, and what to look at:

1. **Every rank builds the same model.** Same seed, same weights: FSDP cuts what it is given and does not compare.
2. **Sharding is one call.** Each block becomes a unit, and what is left over (embedding and final norm) the root
   unit. From here on a rank stores its slice of each unit, and nothing else.
3. **The optimizer comes after the sharding.** It must own the slices, and before that call they do not exist.
4. **Every rank trains on windows of its own.** The loop is the plain loop of PyTorch, and not a line of it is about
   sharding: a unit is gathered when its forward begins, freed when it ends, and the same again in backward.
5. **All ranks measure and all ranks write**, since each forward needs the slices of everybody; but only rank 0 prints.

Look at the loss: it starts near 5.5, which is the surprise of a blind guess among 256 bytes (``ln 256 = 5.545``), and
ends below 2. Look at the table at the end: each rank stored one half of everything. Then turn some knobs::

    --strategy SHARD_GRAD_OP      keep parameters between forward and backward: fewer gathers, more memory
    --library torch               the same script on torch's own FSDP; the losses are the same
    --compare                     one process, DDP, torch's FSDP and minifsdp on the same windows, in one table
    --timeline step.svg           a picture of the last step: what each rank gathered, computed, freed and reduced
    --trace steps.json            the last steps for https://ui.perfetto.dev or chrome://tracing

Spec: TRAIN-01, TRAIN-02, TRAIN-20, TRAIN-21.
"""

from __future__ import annotations

import argparse
import math
import sys

import gpt  # noqa: F401  (first, since it silences a warning that torch's import gives without NumPy)
import torch
import torch.nn.functional as F
from gpt.compare import compare
from gpt.data import Corpus, batch_of, read_standard_library
from gpt.model import GPT, Block, generate
from gpt.options import parse
from gpt.ranks import Place, joined_ranks, pairs_and_copies, require_equal, start_ranks, started_by_torchrun
from gpt.recording import Recordings
from gpt.report import Progress, count, fact, introduce, mean_over_ranks, measure, print_stored, readable
from torch import Tensor, nn

PROMPT = b"def "


def build(options: argparse.Namespace, place: Place) -> GPT:
    # 1. Seeded right before, so that nothing drawn earlier can make the ranks differ.
    torch.manual_seed(options.seed)
    model = GPT(width=options.width, num_blocks=options.blocks, num_heads=options.heads)
    return model.to(place.device)


def shard(model: nn.Module, library: str, options: argparse.Namespace, place: Place) -> nn.Module:
    # The two libraries differ in the lines that import them.
    if library == "torch":
        from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    else:
        from minifsdp import BackwardPrefetch, ShardingStrategy
        from minifsdp import FullyShardedDataParallel as FSDP
        from minifsdp.wrap import ModuleWrapPolicy
    # 2. The one call. The policy says where to cut; what no block owns stays with the outermost unit, the root.
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy[options.strategy],
        backward_prefetch=None if options.prefetch == "NONE" else BackwardPrefetch[options.prefetch],
        forward_prefetch=options.forward_prefetch,
        device_id=place.device,
        process_group=pairs_and_copies(place) if options.strategy == "HYBRID_SHARD" else None,
    )


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> Tensor:
    # 4. The plain step of PyTorch. It serves the single process, DDP and both FSDPs alike.
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Rises to ``options.lr`` within 20 steps, then falls along half a cosine to a twentieth of it."""
    falling = 0.5 * (1 + math.cos(math.pi * step / options.steps))
    return float(options.lr * min(1.0, (step + 1) / 20) * (0.05 + 0.95 * falling))


def next_batch(text: Tensor, step: int, options: argparse.Namespace, place: Place) -> tuple[Tensor, Tensor]:
    inputs, targets = batch_of(
        text, seed=options.seed, rank=place.rank, step=step, num_windows=options.batch, context=options.context
    )
    return inputs.to(place.device), targets.to(place.device)


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor, options: argparse.Namespace, place: Place) -> float:
    """The loss on text that was never trained on: eight batches of each rank, the mean over all of them."""
    batches = [next_batch(text, step, options, place) for step in range(8)]
    losses = [F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) for inputs, targets in batches]
    return mean_over_ranks(torch.stack(losses).mean())


def train(options: argparse.Namespace, corpus: Corpus, place: Place) -> None:
    model = build(options, place)
    num_parameters = count(model)
    model = shard(model, options.library, options, place)
    # 3. After the sharding, for now there are slices to own. One decay for all: a slice mixes matrices with norms.
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    recordings = Recordings(options.trace, options.timeline)
    tokens = place.num_ranks * options.batch * options.context
    progress = Progress(options.steps, tokens, shown=place.speaks)
    losses = []
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        inputs, targets = next_batch(corpus.train, step, options, place)
        with recordings.around(step, of=options.steps):
            loss = train_step(model, optimizer, inputs, targets)
        losses.append(mean_over_ranks(loss))
        progress.advance(step, losses[-1])
    seconds = progress.close()
    stored = measure(model, optimizer)

    # 5. Every rank computes, one speaks.
    held_out = evaluate(model, corpus.held_out, options, place)
    text = generate(
        model, PROMPT, num_bytes=options.sample, context=options.context, seed=options.seed + 1, device=place.device
    )
    if place.speaks:
        last = losses[-10:]  # One batch is a small sample; ten are less of a gamble.
        fact("time", f"{seconds:.1f} s, {options.steps * tokens / seconds:,.0f} tokens/s")
        fact("loss", f"{losses[0]:.3f} at first, {sum(last) / len(last):.3f} at last, {held_out:.3f} on held-out files")
    recordings.write(speaks=place.speaks)
    if place.speaks:
        print(f"\nwhat the model writes after {PROMPT.decode()!r}\n\n{readable(text)}")
    print_stored(stored, num_parameters, speaks=place.speaks)


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

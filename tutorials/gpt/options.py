"""The command line options of `train_gpt.py`. argparse reports wrong options before any rank is started."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
from pathlib import Path

__all__ = ["parse"]

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"]
PREFETCHES = ["BACKWARD_PRE", "BACKWARD_POST", "NONE"]
STEPS, STEPS_OF_COMPARISON = 300, 30
SAVE_EVERY, KEEP = 100, 2


def parse(arguments: list[str]) -> argparse.Namespace:
    """Reads the options.

    Raises:
        SystemExit: an option is unknown, has an invalid value, or contradicts another one; status 2.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.steps is None:
        options.steps = STEPS_OF_COMPARISON if options.compare else STEPS
    if options.width % (2 * options.heads):
        parser.error(f"--width {options.width} is not a multiple of twice --heads {options.heads}")
    records = options.trace or options.timeline
    if records and (options.library != "minifsdp" or options.compare):
        parser.error("--trace and --timeline record a training by minifsdp; leave out --library and --compare")
    if options.api == "fully_shard":
        _check_function(parser, options)
    _check_saving(parser, options)
    if options.library == "minifsdp" and importlib.util.find_spec("minifsdp") is None:
        parser.error("minifsdp is not installed in this Python; run first: python -m pip install -e .")
    launched = os.environ.get("WORLD_SIZE")
    if options.world_size is not None and launched is not None and int(launched) != options.world_size:
        parser.error(f"--world-size {options.world_size}, but the launcher has started {launched} ranks")
    options.world_size = options.world_size or int(launched or 2)
    if options.strategy == "HYBRID_SHARD" and options.world_size % 2:
        parser.error(
            f"--strategy HYBRID_SHARD shards over pairs of ranks, and {options.world_size} ranks are not pairs"
        )
    return options


def _check_function(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.strategy == "NO_SHARD":
        parser.error("--api fully_shard always shards; use DistributedDataParallel instead of NO_SHARD")
    if options.prefetch != "BACKWARD_PRE" or options.forward_prefetch:
        parser.error("--api fully_shard always uses BACKWARD_PRE; leave out --prefetch and --forward-prefetch")


def _check_saving(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.compare and (options.save or options.resume):
        parser.error("--compare does not save models; leave out --save and --resume")
    given = [name for name in ("save_every", "keep", "full") if getattr(options, name)]
    if given and options.save is None:
        parser.error(f"--{given[0].replace('_', '-')} needs --save with a folder")
    options.save_every, options.keep = options.save_every or SAVE_EVERY, options.keep or KEEP


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on Python's own source, sharded over several ranks."
    )
    run = parser.add_argument_group("the run")
    run.add_argument("--steps", type=_positive, help=f"default: {STEPS}, with --compare {STEPS_OF_COMPARISON}")
    run.add_argument("--world-size", type=_positive, help="ranks to start, default: 2; torchrun sets its own number")
    run.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: CUDA if there are enough GPUs"
    )
    run.add_argument("--seed", type=int, default=0, help="seed of weights, windows and sample, default: %(default)s")
    run.add_argument(
        "--sample", type=_positive, default=320, metavar="BYTES", help="text to generate, default: %(default)s"
    )
    sharding = parser.add_argument_group("the sharding")
    choice = functools.partial(sharding.add_argument, type=str.upper, help="default: %(default)s")
    choice("--strategy", choices=STRATEGIES, default="FULL_SHARD")
    choice("--prefetch", choices=PREFETCHES, default="BACKWARD_PRE")
    sharding.add_argument("--forward-prefetch", action="store_true", help="also prefetch in forward")
    sharding.add_argument(
        "--api",
        choices=["wrapper", "fully_shard"],
        default="wrapper",
        help="FullyShardedDataParallel around the model, or fully_shard in place; default: %(default)s",
    )
    sharding.add_argument("--library", choices=["minifsdp", "torch"], default="minifsdp", help="default: %(default)s")
    saving = parser.add_argument_group("checkpoints")
    saving.add_argument("--save", type=_folder, metavar="DIR", help="save checkpoints to this folder")
    saving.add_argument(
        "--save-every", type=_positive, metavar="N", help=f"steps between two checkpoints, default: {SAVE_EVERY}"
    )
    saving.add_argument("--keep", type=_positive, metavar="N", help=f"checkpoints to keep, default: {KEEP}")
    saving.add_argument("--full", action="store_true", help="rank 0 saves one file, instead of one file for each rank")
    saving.add_argument(
        "--resume",
        type=_folder,
        metavar="DIR",
        help="resume from this checkpoint, or from the newest one in this folder; use only checkpoints that you trust",
    )
    watching = parser.add_argument_group("reports")
    watching.add_argument("--compare", action="store_true", help="one process, DDP and all four FSDPs, in one table")
    watching.add_argument("--trace", type=_file, metavar="FILE.json", help="write a Chrome trace of the last two steps")
    watching.add_argument("--timeline", type=_file, metavar="FILE.svg", help="draw the last step")
    model = parser.add_argument_group("the model and the data")
    number = functools.partial(model.add_argument, type=_positive, metavar="N")
    number("--blocks", default=5, help="layers; each is a unit; default: %(default)s")
    number("--width", default=144, help="size of the vectors between two blocks, default: %(default)s")
    number("--heads", default=4, help="attention heads, default: %(default)s")
    number("--context", default=128, help="bytes in a window, default: %(default)s")
    number("--batch", default=8, help="windows for each rank and step, default: %(default)s")
    model.add_argument("--lr", type=_positive_float, default=4e-3, help="highest learning rate, default: %(default)s")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def _positive_float(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _file(text: str) -> Path:
    path = Path(text)
    # Report this now instead of after a minute of training.
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder {path.parent} does not exist")
    return path


def _folder(text: str) -> Path:
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a file, not a folder")
    return path


# argparse prints these names in "invalid ... value".
_positive.__name__, _positive_float.__name__ = "whole number", "number"

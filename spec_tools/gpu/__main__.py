"""``python -m spec_tools.gpu``: runs the stages, one chunk after the other, and keeps the report up to date.

Exit status: 0 if all chunks passed, 1 if one did not, 2 if the platform is not available, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from spec_tools.gpu import report
from spec_tools.gpu.chunks import ROOT, Chunk, Outcome, end_leftovers, run_chunk
from spec_tools.gpu.platforms import PLATFORMS, NotHere, Platform, find
from spec_tools.gpu.progress import InUse, Progress
from spec_tools.gpu.stages import STAGES, Settings, Stage

__all__ = ["Kit", "main"]

NAMES = [stage.name for stage in STAGES]


def main(arguments: Sequence[str] | None = None, build: Path = ROOT / "build") -> int:
    """Runs the command; returns the exit status."""
    options = _options(arguments)
    try:
        platform = find(options.device)
        more = {"num_again": options.again, "with_names": options.with_names}
        settings = Settings(platform, build / "gpu" / platform.name, options.limit, options.quick, **more)
        progress = Progress(settings.folder, holds_for(platform, options.quick))
    except (NotHere, InUse) as reason:
        print(reason, file=sys.stderr)
        return 2
    # No core dumps: a thousand failing tests would fill the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    # SIGTERM acts like Ctrl-C, so that it also ends the running chunk.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    end_leftovers(settings.folder)
    # A report needs the hardware, so this stage always runs.
    stages = [stage for stage in STAGES if stage.name in ("hardware", *options.stages)]
    default = "gpu-report.md" if not platform.caution else f"gpu-report-{platform.name}.md"
    kit = Kit(settings, progress, options.report or build / default)
    try:
        return kit.run(stages, options.fresh)
    except KeyboardInterrupt:
        kit._write_report()  # with the findings of the chunk that was stopped
        print("\nStopped. The same command goes on from here.")
        return 130
    finally:
        progress.close()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m spec_tools.gpu", description=str(__doc__).splitlines()[0])
    parser.add_argument("--device", choices=PLATFORMS, default="cuda", help="others than cuda try the kit itself")
    parser.add_argument("--stages", type=_stages, default=NAMES, metavar="A,B", help=f"some of: {', '.join(NAMES)}")
    parser.add_argument("--fresh", action="store_true", help="also run what is done already")
    parser.add_argument("--limit", type=float, default=900.0, metavar="SECONDS", help="for one chunk (default: 900)")
    parser.add_argument("--quick", action="store_true", help="three files of tests, fewer rounds, fewer delays")
    parser.add_argument("--again", type=int, default=40, metavar="N", help="failed tests that run again (default: 40)")
    parser.add_argument("--with-names", action="store_true", help="keep names of hosts and users, and paths")
    parser.add_argument("--report", type=Path, metavar="FILE", help="where to write it (default: build/gpu-report.md)")
    return parser.parse_args(arguments)


def _stages(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no stage {unknown[0]!r}; there are {', '.join(NAMES)}")
    return names


def holds_for(platform: Platform, quick: bool) -> dict[str, str | int | bool]:
    """The facts that outcomes depend on; if one of them changes, a run starts from the beginning."""
    versions = {"torch": torch.__version__, "commit": report.commit()}
    return {"platform": platform.name, "devices": platform.num_devices(), "quick": quick, **versions}


class Kit:
    """One run.

    Args:
        settings: the user's options.
        progress: the outcomes so far.
        path: path of the report.
    """

    def __init__(self, settings: Settings, progress: Progress, path: Path) -> None:
        self.settings, self.progress, self.path = settings, progress, path
        self.left: list[Chunk] = []
        self.chosen: list[str] = []

    def run(self, stages: Sequence[Stage], fresh: bool = False) -> int:
        """Runs the stages; returns the exit status."""
        self.chosen = [stage.name for stage in stages]
        for name in self.chosen if fresh else []:
            self.progress.forget(name)
        if self.settings.platform.caution:
            print(self.settings.platform.caution)
        if self.progress.outcomes:
            print(f"chunks done already: {len(self.progress.outcomes)}; --fresh runs them again")
        self._write_report()
        all_passed = all(list(self._stages(stages)))  # a list, because `all` stops at the first failed stage
        self._write_report()
        print(f"\nThe report is in {self.path}")
        return 0 if all_passed else 1

    def _stages(self, stages: Sequence[Stage]) -> Iterator[bool]:
        """Runs the stages; yields for each of them whether it passed."""
        for stage in stages:
            passed = self._stage(stage)
            yield passed
            if stage.is_vital and not passed:
                print(f"\n{stage.name} has failed, so nothing after it was started; --stages runs what you name")
                # The failed chunk runs again, so that the report can say whether minifsdp or the machine is the cause.
                yield from (self._stage(one) for one in stages if one.name == "control")
                return

    def _stage(self, stage: Stage) -> bool:
        chunks = stage.chunks(self.settings)
        self.left = [chunk for chunk in chunks if chunk.name not in self.progress.outcomes]
        print(f"\n{stage.name}: {stage.question}? chunks: {len(chunks)}, to run: {len(self.left)}", flush=True)
        while self.left:
            if self.left[0].estimate:
                print(f"  {self.left[0].name}: about {self.left[0].estimate:.0f} s", flush=True)
            outcome = run_chunk(self.left[0], self.settings.folder)
            self.progress.note(self.left.pop(0).name, outcome)
            self._write_report()
            _print(next(reversed(self.progress.outcomes)), outcome)
        return all(self.progress.outcomes[chunk.name].word == "passed" for chunk in chunks)

    def _write_report(self) -> None:
        outcomes = self.progress.with_stopped()
        now = report.compose(self.settings.platform, outcomes, self.chosen, len(self.left), self.settings.with_names)
        report.write(now, self.path)


def _print(name: str, outcome: Outcome) -> None:
    word = "ok" if outcome.word == "passed" else outcome.word.upper()
    print(f"  {word:8s}{outcome.seconds:7.1f} s  {name}  {outcome.reason}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""``python -m spec_tools.gpu``: runs the stages, one chunk after the other, and keeps the report up to date.

Exit status: 0 if all chunks passed, 1 if one did not, 2 if the platform is not available, 3 if the disk is full, 130
after Ctrl-C.
"""

from __future__ import annotations

import argparse
import errno
import resource
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from spec_tools.gpu import advice, report
from spec_tools.gpu.chunks import ROOT, Chunk, Outcome, end_leftovers, run_chunk
from spec_tools.gpu.names import HOST
from spec_tools.gpu.platforms import PLATFORMS, NotHere, Platform, find
from spec_tools.gpu.progress import InUse, Progress
from spec_tools.gpu.stages import STAGES, Settings, Stage

__all__ = ["Kit", "main"]

NAMES = [stage.name for stage in STAGES]
FULL = (errno.ENOSPC, errno.EDQUOT)
DISK_FULL = """The disk is full ({error}), so the kit stops. {free}
The outcomes of all chunks that have ended are kept. Free some space, and run the same command again: it continues."""


def main(arguments: Sequence[str] | None = None, build: Path = ROOT / "build") -> int:
    """Runs the command; returns the exit status."""
    options = _options(arguments)
    try:
        platform = find(options.device)
        name = f"{platform.name}-trial" if options.trial else platform.name
        more = {"num_again": options.again, "with_names": options.with_names}
        settings = Settings(platform, build / "gpu" / name, options.limit, options.quick, **more)
        return _run(settings, options, build)
    except (NotHere, InUse) as reason:
        print(reason, file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in FULL:
            raise
        print(f"\n{DISK_FULL.format(error=error, free=_free_space(build))}", file=sys.stderr)
        return 3


def _run(settings: Settings, options: argparse.Namespace, build: Path) -> int:
    progress = Progress(settings.folder, holds_for(settings.platform, options.quick))
    # No core dumps: a thousand failing tests would fill the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    # SIGTERM acts like Ctrl-C, so that it also ends the running chunk.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    end_leftovers(settings.folder)
    # A report needs the hardware, so this stage always runs.
    stages = [stage for stage in STAGES if stage.name in ("hardware", *options.stages)]
    default = "gpu-report.md" if settings.folder.name == "cuda" else f"gpu-report-{settings.folder.name}.md"
    kit = Kit(settings, progress, options.report or build / default)
    try:
        return kit.run(stages, options.fresh or options.trial)
    except KeyboardInterrupt:
        kit._write_report()  # with the findings of the chunk that was stopped
        print("\nStopped. The same command continues from here.")
        return 130
    finally:
        progress.close()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m spec_tools.gpu", description=str(__doc__).splitlines()[0])
    parser.add_argument("--device", choices=PLATFORMS, default="cuda", help="other devices test the kit itself")
    parser.add_argument("--stages", type=_stages, default=NAMES, metavar="A,B", help=f"some of: {', '.join(NAMES)}")
    parser.add_argument("--fresh", action="store_true", help="also repeat completed stages")
    parser.add_argument("--limit", type=float, default=900.0, metavar="SECONDS", help="for one chunk (default: 900)")
    parser.add_argument("--quick", action="store_true", help="three files of tests, fewer rounds, fewer delays")
    parser.add_argument("--again", type=int, default=40, metavar="N", help="failed tests that run again (default: 40)")
    parser.add_argument("--trial", action="store_true", help="run again, apart from the outcomes and report so far")
    parser.add_argument("--with-names", action="store_true", help="keep names of users, hosts and folders in reports")
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
                self._print_why_it_stops(stage)
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
            outcome = self._run_chunk(self.left[0])
            self.progress.note(self.left.pop(0).name, outcome)
            self._write_report()
            _print(next(reversed(self.progress.outcomes)), outcome)
        return all(self.progress.outcomes[chunk.name].word == "passed" for chunk in chunks)

    def _run_chunk(self, chunk: Chunk) -> Outcome:
        """Runs a chunk.

        Raises:
            OSError: the disk is full. The chunk has no outcome, so the next run starts with it.
        """
        outcome = run_chunk(chunk, self.settings.folder, _tell, with_names=self.settings.with_names)
        if outcome.word == "passed":
            return outcome
        if advice.kind_of(outcome) == "disk_full":
            raise OSError(errno.ENOSPC, f"in {chunk.name}: {outcome.reason}")
        platform = self.settings.platform
        options = [] if platform.name == "cuda" else ["--device", platform.name]
        given = advice.advise(chunk.name, outcome, options, platform.num_devices(), self._warnings())
        return replace(outcome, advice=given)

    def _warnings(self) -> list[dict[str, str]]:
        """The warnings of the stage ``hardware``."""
        outcomes = [one for name, one in self.progress.outcomes.items() if name.startswith("hardware/")]
        return [warning for one in outcomes for finding in one.findings for warning in finding.get("warnings", ())]

    def _print_why_it_stops(self, stage: Stage) -> None:
        layer = f" (layer: {stage.layer})" if stage.layer else ""
        print(f"\n{stage.name}{layer} has failed, so no later stage was started; --stages runs the given stages")
        failed = [name for name in self.progress.outcomes if name.split("/")[0] == stage.name]
        name = next(name for name in failed if self.progress.outcomes[name].word != "passed")
        outcome = self.progress.outcomes[name]
        home = self.settings.folder / name
        if outcome.advice:
            paths = [str(home / file) for file in ("log.txt", *outcome.files)]
            print("\n" + "\n".join(advice.as_lines(outcome.advice, paths)), flush=True)

    def _write_report(self) -> None:
        outcomes = self.progress.with_stopped()
        now = report.compose(self.settings.platform, outcomes, self.chosen, len(self.left), self.settings.with_names)
        report.write(now, self.path)


def _tell(line: str) -> None:
    """Prints a line of a chunk, with the name of this machine. The report has another name."""
    print(line.replace(f"[{HOST}:", f"[{socket.gethostname()}:"), flush=True)


def _free_space(folder: Path) -> str:
    """The free space of the folder of the results and of the temporary folder, as text."""
    found = []
    for name, path in (("the results", folder), ("temporary files", Path(tempfile.gettempdir()))):
        existing = next(one for one in (path, *path.absolute().parents) if one.exists())
        found.append(f"{shutil.disk_usage(existing).free // 2**20} MiB in the folder of {name}")
    return f"Free: {', '.join(found)}."


def _print(name: str, outcome: Outcome) -> None:
    word = "ok" if outcome.word == "passed" else outcome.word.upper()
    print(f"  {word:8s}{outcome.seconds:7.1f} s  {name}  {outcome.reason}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

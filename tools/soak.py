"""Harm tiny runs at random, let them go on, and see that nothing is lost and nothing is silent.

    python tools/soak.py                                      # 200 faults, about 20 minutes
    python tools/soak.py --count 20 --seed 7 --kinds full_disk two_runs

Each fault is drawn from the seed and its number: SIGTERM, SIGINT, SIGHUP or SIGKILL to a rank or to
the launcher, a disk that is full from some write on, a damaged checkpoint file, a second run in the
same folders.  Then the same command is run again until it ends.  Its last checkpoint and its
metrics must be those of a run that was left alone, bit for bit.  Prints counts for each kind; the
exit status is 1 if anything was wrong, and the folders of those runs are kept.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

# before torch is imported: no GPU and no thread, because runs are forked from here
os.environ.update(CUDA_VISIBLE_DEVICES="", CUDA_DEVICE_MAX_CONNECTIONS="1")
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.soaking.checks import differences
from tools.soaking.faults import FAULTS, Harm
from tools.soaking.jobs import Job, Kind, run_to_end
from tools.soaking.preload import preload

MOST_RESUMES = 3
KINDS: tuple[Kind, ...] = ("sft", "rl")
JOBS = [
    Job(kind=kind, num_ranks=ranks, save_interval=interval)
    for kind in KINDS
    for ranks in (1, 2)
    for interval in (1, 2)
]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the faults; 1 if something was wrong."""
    parser = argparse.ArgumentParser(description="Random faults on tiny runs.")
    parser.add_argument("--count", type=int, default=200, help="faults (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="what decides all draws (default 0)")
    parser.add_argument("--first", type=int, default=0, help="number of the first (default 0)")
    parser.add_argument(
        "--kinds", nargs="+", choices=list(FAULTS), default=list(FAULTS), help="default: all"
    )
    options = parser.parse_args(argv)
    preload()
    root = Path(tempfile.mkdtemp(prefix="soak-"))
    seconds = {job: left_alone(job, folder_of(root, job)) for job in JOBS}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    started = time.monotonic()
    for number in tqdm(range(options.first, options.first + options.count), unit="fault"):
        draw = random.Random(f"{options.seed} {number}")
        kind = options.kinds[number % len(options.kinds)]
        job = draw.choice(JOBS)
        folder = root / f"fault-{number}"
        harm = Harm(job=job, folder=folder, draw=draw, seconds=seconds[job])
        wrong = harmed(kind, harm, whole=folder_of(root, job))
        counts[kind]["wrong" if wrong else "fine"] += 1
        for reason in wrong:
            print(f"fault {number} ({kind}, {job}): {reason}; see {folder}", flush=True)
        if not wrong:
            shutil.rmtree(folder)
    for kind in options.kinds:
        print(f"{kind:20} {counts[kind]['fine']:4} fine  {counts[kind]['wrong']:4} wrong")
    print(f"{time.monotonic() - started:.0f} s")
    is_right = not any(count["wrong"] for count in counts.values())
    if is_right:
        shutil.rmtree(root)
    return 0 if is_right else 1


def folder_of(root: Path, job: Job) -> Path:
    """Of the run of a job that is left alone."""
    return root / f"whole-{job.kind}-{job.num_ranks}-{job.save_interval}"


def left_alone(job: Job, folder: Path) -> float:
    """Run a job without any fault; the seconds that it takes."""
    started = time.monotonic()
    running = run_to_end(job, folder)
    if running.code != 0:
        sys.exit(f"the job does not run at all:\n{running.said()[-4000:]}")
    return time.monotonic() - started


def harmed(kind: str, harm: Harm, *, whole: Path) -> list[str]:
    """Do one fault, let the run go on to its end; what was wrong."""
    wrong = FAULTS[kind](harm)
    for _ in range(MOST_RESUMES):
        resumed = run_to_end(harm.job, harm.folder)
        if resumed.code == 0:
            return wrong + differences(harm.folder, whole, may_lack_record=kind == "full_disk")
    return [*wrong, f"it does not go on: exit code {resumed.code}: {resumed.said()[-600:]}"]


if __name__ == "__main__":
    sys.exit(main())

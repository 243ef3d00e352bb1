"""Long campaigns of faults against checkpoints, with seeds that replay.

    python tests/campaigns/soak.py kill --trials 10000 --jobs 2 --seed 1
    python tests/campaigns/soak.py power --trials 1000 --jobs 8          # needs root
    python tests/campaigns/soak.py damage|errors|crashes|reshard --trials 10000
    python tests/campaigns/soak.py kill --seed 1 --only 17               # one trial again

Each trial is drawn from (seed, number of the trial) alone. At the end the verdicts are counted; any
violation is printed with what replays it, and the exit status is 1.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import closing, contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [
    str(HERE.parents[1] / "src"),
    str(HERE),
    str(HERE.parent),
    str(HERE.parent / "checkpoint"),
]

import in_memory  # noqa: E402
import kills  # noqa: E402
import whole_worlds  # noqa: E402
import worlds  # noqa: E402

CAMPAIGNS = ("kill", "power", "crashes", "errors", "damage", "reshard")
Trial = Callable[[int, random.Random], str]


def _stopped(campaign, options):
    def trial(number, rng):
        if options.spread:
            drawn = kills.spread(rng, number, options.trials)
        else:
            drawn = kills.draw(rng, options.fresh)
        try:
            verdict, told = campaign.run(drawn, rng)
        except Exception as error:
            error.add_note(str(drawn))
            raise
        return f"{verdict}{' after save had returned' if told else ''}"

    return trial


@contextmanager
def campaign(options, folder):
    """Give the function that runs one trial: it returns a verdict, or raises for a violation."""
    if options.campaign == "crashes":
        yield in_memory.crash
    elif options.campaign == "errors":
        yield in_memory.fail
    elif options.campaign == "reshard":
        yield whole_worlds.Reshards(folder).run
    elif options.campaign == "kill":
        yield _stopped(kills.Kills(folder), options)
    elif options.campaign == "power":
        with closing(kills.PowerCuts(folder)) as cuts:
            yield _stopped(cuts, options)
    else:
        with closing(whole_worlds.Damages(folder)) as damages:
            yield damages.run


def run_trials(options, numbers):
    """Run some trials in this process; yield a row for each."""
    prefix = f"soak-{options.campaign}-"
    with (
        tempfile.TemporaryDirectory(prefix=prefix, dir=options.folder) as folder,
        campaign(options, Path(folder)) as trial,
    ):
        for number in numbers:
            row = {"number": number}
            begin = time.monotonic()
            try:
                row["verdict"] = trial(number, random.Random(f"{options.seed}/{number}"))
            except Exception as error:
                row["verdict"] = "VIOLATION"
                row["why"] = "".join(traceback.format_exception(error))[-4000:]
                replay = f"--trials {options.trials} --spread " if options.spread else ""
                replay += f"--seed {options.seed} --only {number}"
                print(f"{replay}: {row['why']}", file=sys.stderr)
            row["seconds"] = time.monotonic() - begin
            yield row


def in_jobs(options, numbers):
    """Share the trials among processes; return their rows."""
    if options.jobs == 1:
        return list(run_trials(options, numbers))
    with tempfile.TemporaryDirectory() as folder:
        for job in range(options.jobs):
            if os.fork() == 0:
                with open(Path(folder, str(job)), "w", buffering=1) as out:
                    for row in run_trials(options, numbers[job :: options.jobs]):
                        print(json.dumps(row), file=out)
                os._exit(0)
        for _ in range(options.jobs):
            os.wait()
        lines = [line for file in sorted(Path(folder).iterdir()) for line in file.open()]
        return [json.loads(line) for line in lines]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("campaign", choices=CAMPAIGNS)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this one trial again")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the trials")
    parser.add_argument("--fresh", type=float, default=0.1, help="share looked at by fresh ranks")
    parser.add_argument("--spread", action="store_true", help="moments evenly over the save")
    parser.add_argument("--folder", help="where to work (default: the system's temporary folder)")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    options = parser.parse_args()
    worlds.warm_up()
    numbers = list(range(options.trials)) if options.only is None else [options.only]
    begin = time.monotonic()
    verdicts = Counter()
    violations, seconds = [], 0.0
    for row in in_jobs(options, numbers):
        verdicts[row["verdict"]] += 1
        seconds += row["seconds"]
        if row["verdict"] == "VIOLATION":
            violations.append(row)
    missing = len(numbers) - sum(verdicts.values())
    result = {
        "campaign": options.campaign,
        "seed": options.seed,
        "trials": len(numbers),
        "missing": missing,
        "verdicts": dict(sorted(verdicts.items())),
        "violations": violations,
        "seconds": time.monotonic() - begin,
        "seconds_per_trial": seconds / max(1, sum(verdicts.values())),
    }
    if options.json:
        print(json.dumps(result))
    else:
        counts = ", ".join(f"{verdict} {n}" for verdict, n in sorted(verdicts.items()))
        print(
            f"{options.campaign}, seed {options.seed}: {len(numbers)} trials: {counts}; "
            f"{result['seconds']:.0f} s, {result['seconds_per_trial']:.3f} s a trial"
        )
    return 1 if violations or missing else 0


if __name__ == "__main__":
    sys.exit(main())

"""Every fault and every healthy run of the doctor's suite, on real ranks; a program, not a test.

    python tests/campaigns/doctor.py [--only NAME] [--repeat 1]

It prints a line for each run, the recall over the faults (the code, and the rank where one is to be
named) and the share of healthy runs in which anything was found, and ends with exit code 1 if
recall is below 95 % or false alarms are above 2 %.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent.parent
sys.path[:0] = [str(HERE), str(HERE / "monitor"), str(HERE.parent / "examples")]

import ranks  # noqa: E402 - found through the line above
from faults import FAULTS, HEALTHY, train  # noqa: E402
from shardwise.monitor import metrics as m  # noqa: E402
from shardwise.monitor.doctor import diagnose  # noqa: E402
from shardwise.monitor.doctor.evidence import Evidence  # noqa: E402
from shardwise.monitor.record import read_run  # noqa: E402
from training_faults import TRAINING_FAULTS, TRAINING_HEALTHY  # noqa: E402

MEMORY_GROWS = "SW034"
GROUPS = (
    ("fault", FAULTS | TRAINING_FAULTS),
    ("healthy", HEALTHY | TRAINING_HEALTHY),
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="runs whose name has this in it")
    parser.add_argument("--group", default="", choices=["", *(name for name, _ in GROUPS)])
    parser.add_argument("--from", dest="first", type=int, default=0, help="index in each group")
    parser.add_argument("--repeat", type=int, default=1)
    asked = parser.parse_args()
    right = alarms = beside = num_faults = num_healthy = 0
    for _ in range(asked.repeat):
        for group, scenarios in GROUPS:
            for name, scenario in [*scenarios.items()][asked.first :]:
                if asked.only not in name or asked.group not in ("", group):
                    continue
                found = run_one(group, name, scenario)
                if group == "fault":
                    num_faults += 1
                    right += (scenario.code, scenario.rank) in found
                    beside += any(code != scenario.code for code, _ in found)
                else:
                    num_healthy += 1
                    alarms += bool(found)
    ranks.close_all()
    sys.stdout.flush()
    print(f"{right} of {num_faults} faults found; {beside} of these runs told of others beside")
    print(f"{alarms} of {num_healthy} healthy runs told of anything")
    return int(right < 0.95 * num_faults or alarms > 0.02 * num_healthy)


def run_one(group, name, scenario):
    begun_s = time.monotonic()
    if scenario.code == MEMORY_GROWS:
        ranks.close_all()  # memory that an earlier run has freed would hide the growth
    with tempfile.TemporaryDirectory() as output:
        try:
            live = ranks.run_ranks(train, scenario.world_size, output, group, name)[0]
        except ranks.RankError as error:
            print(f"NOT {group} '{name}': {str(error)[:2000]}", flush=True)
            return {("error", None)}
        run = read_run(output)
        diagnosis, seconds = diagnose(run), Evidence(run).late_seconds
    found = {(finding.code, finding.rank) for finding in diagnosis.findings}
    expected = (scenario.code, scenario.rank)
    is_right = expected in found if group == "fault" else not found
    print(
        f"{'ok ' if is_right else 'NOT'} {group} '{name}' ({time.monotonic() - begun_s:.1f} s): "
        f"{sorted(found, key=str)}, live {live}, "
        f"{sorted({a.missing for a in diagnosis.abstentions})}",
        flush=True,
    )
    if not is_right and run.steps[8:]:
        whole_s = sum(n.num_steps * n.metrics[m.STEP_S].median for n in run.steps[3:])
        print(f"    {whole_s:.1f} s of steps, late: {seconds()}")
    for finding in diagnosis.findings if not is_right or len(found) > 1 else ():
        print(f"    {finding.code} {finding.verdict} {dict(finding.evidence)}")
    return found


if __name__ == "__main__":
    sys.exit(main())

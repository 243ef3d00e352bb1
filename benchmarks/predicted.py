"""Hold the planner's predictions against this machine: step time and peak memory on CPU ranks.

    python benchmarks/predicted.py                           # what `make bench` runs
    python benchmarks/predicted.py --ranks 2 --models small --stages 3 --rounds 3
    python benchmarks/predicted.py --json runs/predicted.jsonl --calibration runs/cpu-{ranks}.json

Targets: after calibration the median step time within 10 % of the measured one at every setting,
the peak of the allocator within 1 %.

How. The built-in decoder in a few sizes, stages 0 to 3, with and without activation checkpointing,
AdamW(fused=True) and clip_grad_norm_ 1.0, one thread per rank. The ranks first calibrate, as
`shardwise bench --calibrate` does, then take turns through all settings, round by round; a step
lasts from the end of the step before to its own end, on rank 0, and each setting's time is the
median over its steps. The prediction is traced, played, priced with that calibration and simulated;
nothing of it was fitted to these settings. With --peaks each setting also runs once under the
profiler, which sees every block that the allocator gives out.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import _common as common

common.find_shardwise()
sys.path.insert(0, str(common.HERE.parent / "tests" / "plan"))  # the allocator's trace

MODELS = {
    "small": {"dim": 256, "layers": 6, "heads": 4, "seq": 128, "vocab": 4096, "micro_batch": 4},
    "medium": {"dim": 512, "layers": 8, "heads": 8, "seq": 128, "vocab": 8192, "micro_batch": 2},
    "wide": {"dim": 768, "layers": 4, "heads": 12, "seq": 256, "vocab": 16384, "micro_batch": 2},
}
TIME_LIMIT, PEAK_LIMIT = 0.10, 0.01
_SEED = 7
_WARM_UP = 2
_PARTS = ("forward", "backward", "clip", "optimizer")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=_numbers, default=[2, 4])
    parser.add_argument("--models", default=",".join(MODELS), help="of " + ", ".join(MODELS))
    parser.add_argument("--stages", type=_numbers, default=[0, 1, 2, 3])
    parser.add_argument("--checkpointing", type=_numbers, default=[0, 1], help="0, 1 or both")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="timed steps per round")
    parser.add_argument("--peaks", action="store_true", help="measure peak memory too; slow")
    parser.add_argument("--calibration", help="read this file; {ranks} stands for their number")
    parser.add_argument(
        "--measured", help="keep what was measured in this file, and use it if it is there; {ranks}"
    )
    parser.add_argument("--timeout", type=float, default=3000)
    parser.add_argument("--json", metavar="FILE", help="append the results, one line per setting")
    args = parser.parse_args()
    args.models = args.models.split(",")
    return args


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def settings_of(args: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"model": model, "stage": stage, "checkpointed": bool(checkpointed)}
        for model in args["models"]
        for checkpointed in args["checkpointing"]
        for stage in args["stages"]
    ]


# -- one rank
def work(config: Mapping[str, Any]) -> None:
    import torch

    with common.joined_ranks(config):
        calibration = None
        if not config["calibration"]:
            from shardwise.bench.calibrate import calibrate
            from shardwise.plan.machine.calibration import to_json

            found = calibrate(torch.device("cpu"), Path(tempfile.gettempdir()))
            calibration = to_json(found)
        settings = settings_of(config)
        times: list[list[list[float]]] = [[] for _ in settings]
        loads = []
        for _ in range(config["rounds"]):
            for number, setting in enumerate(settings):
                times[number] += timed_steps(config, setting, config["steps"])
                loads.append(os.getloadavg()[0])
        peaks = [measured_peak(config, s) if config["peaks"] else None for s in settings]
        result = {"calibration": calibration, "times": times, "peaks": peaks, "loads": loads}
        common.write_result(config, result)


def build(config: Mapping[str, Any], setting: Mapping[str, Any]) -> Any:
    """Return the plain model of a setting."""
    import torch

    from shardwise.train.config import TrainConfig
    from shardwise.train.decoder import Decoder

    sizes = {k: v for k, v in MODELS[setting["model"]].items() if k not in ("vocab", "micro_batch")}
    torch.manual_seed(_SEED)
    keys = TrainConfig(**sizes, activation_checkpointing=setting["checkpointed"])
    return Decoder(keys, MODELS[setting["model"]]["vocab"])


def batch_of(setting: Mapping[str, Any]) -> Any:
    import torch

    sizes = MODELS[setting["model"]]
    return torch.randint(sizes["vocab"], (sizes["micro_batch"], sizes["seq"]))


def stepper(config: Mapping[str, Any], setting: Mapping[str, Any]) -> Iterator[list[float]]:
    """Take steps; yield the clock at the begin of each and after each of its parts."""
    import torch

    import shardwise

    model = shardwise.shard(
        build(config, setting), stage=setting["stage"], precision=config["precision"]
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids, targets = batch_of(setting), batch_of(setting)
    while True:
        clock = [time.perf_counter()]
        loss = model(ids, targets)
        clock.append(time.perf_counter())
        loss.backward()
        clock.append(time.perf_counter())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        clock.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad()
        del loss
        clock.append(time.perf_counter())
        yield clock


def timed_steps(
    config: Mapping[str, Any], setting: Mapping[str, Any], count: int
) -> list[list[float]]:
    """Return the seconds of each step: the whole, then its parts."""
    import torch.distributed as dist

    steps = stepper(config, setting)
    for _ in range(_WARM_UP):
        next(steps)
    dist.barrier()
    found = []
    for _ in range(count):
        clock = next(steps)
        parts = [end - begin for begin, end in zip(clock, clock[1:])]  # noqa: B905, RUF007
        found.append([clock[-1] - clock[0], *parts])
    del steps
    gc.collect()
    return found


def measured_peak(config: Mapping[str, Any], setting: Mapping[str, Any]) -> int:
    """Return the most bytes that the allocator had given out at once in a steady step."""
    from allocator import traced

    with traced() as trace:
        steps = stepper(config, setting)
        for _ in range(_WARM_UP):
            next(steps)
        for number in range(2):
            with trace.window(f"step {number}"):
                next(steps)
        del steps
        gc.collect()
    return min(trace.peak(f"step {number}") for number in range(2))


# -- the prediction
def predict(
    args: Mapping[str, Any], setting: Mapping[str, Any], num_ranks: int, calibration: Any
) -> dict[str, Any]:
    """Trace, play, price, simulate."""
    from shardwise.plan.candidate import Candidate
    from shardwise.plan.machine.calibration import CalibratedPrices
    from shardwise.plan.model.tracing import trace
    from shardwise.plan.step.play import play
    from shardwise.plan.timing.simulate import simulate

    sizes = MODELS[setting["model"]]
    checkpointing = "full" if setting["checkpointed"] else "none"
    tape = trace(
        build(args, setting),
        lambda: (batch_of(setting), batch_of(setting)),
        lambda model, batch: model(*batch),
        name=setting["model"],
        compute_dtype="float32" if args["precision"] == "fp32" else "bfloat16",
    )
    candidate = Candidate(
        stage=setting["stage"],
        num_shards=num_ranks,
        precision=args["precision"],
        micro_batch=sizes["micro_batch"],
        activation_checkpointing=checkpointing,
        transport="point_to_point",
    )
    played = play(tape, candidate)
    prices = CalibratedPrices(calibration, candidate)
    simulated = simulate(played.program, prices.seconds, overlap=prices.overlap)
    phases = dict(simulated.phase_s)
    return {
        "step_s": simulated.step_s,
        "compute_s": simulated.compute_s,
        "communication_s": simulated.communication_s,
        "exposed_s": simulated.exposed_s,
        "phase_s": phases,
        "peak_bytes": played.peak.ledger.total,
        "num_params": sum(unit.numel for unit in tape.units),
    }


# -- the table
def measure(args: argparse.Namespace, num_ranks: int) -> list[dict[str, Any]]:
    """Run the ranks, or read what an earlier call with the same settings measured."""
    kept = Path(args.measured.replace("{ranks}", str(num_ranks))) if args.measured else None
    if kept is not None and kept.exists():
        found: list[dict[str, Any]] = json.loads(kept.read_text())
        return found
    found = common.run_processes(Path(__file__), vars(args), num_ranks, timeout_s=args.timeout)
    if kept is not None:
        kept.write_text(json.dumps(found))
    return found


def rows_of(args: argparse.Namespace, num_ranks: int) -> list[dict[str, Any]]:
    from shardwise.plan.machine.calibration import read_calibration

    ranks = measure(args, num_ranks)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "calibration.json")
        if args.calibration:
            path = Path(args.calibration.replace("{ranks}", str(num_ranks)))
        else:
            path.write_text(json.dumps(ranks[0]["calibration"]))
        calibration = read_calibration(path)
    rows = []
    for number, setting in enumerate(settings_of(vars(args))):
        steps = ranks[0]["times"][number]
        whole, *parts = (common.median(part) for part in zip(*steps, strict=True))
        predicted = predict(vars(args), setting, num_ranks, calibration)
        peak = ranks[0]["peaks"][number]
        rows.append(
            {
                **setting,
                "num_ranks": num_ranks,
                "precision": args.precision,
                "measured_s": whole,
                "measured_quartiles_s": list(common.quartiles([s[0] for s in steps])),
                "measured_parts_s": dict(zip(_PARTS, parts, strict=True)),
                "predicted": predicted,
                "error": predicted["step_s"] / whole - 1,
                "measured_peak_bytes": peak,
                "peak_error": predicted["peak_bytes"] / peak - 1 if peak else None,
                "load": common.median(ranks[0]["loads"]),
                "calibration": {k: v for k, v in asdict(calibration).items() if k != "curves"},
            }
        )
    return rows


def print_report(rows: Sequence[Mapping[str, Any]]) -> None:
    table = []
    for row in rows:
        first, third = row["measured_quartiles_s"]
        parts, predicted = row["measured_parts_s"], row["predicted"]
        table.append(
            [
                row["model"] + (" ckpt" if row["checkpointed"] else ""),
                str(row["num_ranks"]),
                str(row["stage"]),
                f"{row['measured_s'] * 1e3:.1f} ({first * 1e3:.1f}-{third * 1e3:.1f})",
                " ".join(f"{parts[p] * 1e3:.1f}" for p in _PARTS),
                f"{predicted['step_s'] * 1e3:.1f}",
                f"{predicted['compute_s'] * 1e3:.1f} {predicted['communication_s'] * 1e3:.1f} "
                f"{predicted['exposed_s'] * 1e3:.1f}",
                f"{row['error']:+.1%}",
                "-" if row["peak_error"] is None else f"{row['peak_error']:+.2%}",
            ]
        )
    header = "model|ranks|stage|measured ms (quartiles)|forward backward clip optimizer"
    header += "|predicted ms|compute communication exposed|error|peak error"
    common.print_table(header.split("|"), table)
    for num_ranks in sorted({row["num_ranks"] for row in rows}):
        of_ranks = [row for row in rows if row["num_ranks"] == num_ranks]
        errors = [abs(row["error"]) for row in of_ranks]
        overlap = of_ranks[0]["calibration"]["overlap"]
        print(
            f"{num_ranks} ranks: median error {common.median(errors):.1%}, largest "
            f"{max(errors):.1%} of {len(errors)}; target <= {TIME_LIMIT:.0%}: "
            f"{common.verdict(max(errors), TIME_LIMIT)}; overlap {overlap:.2f}, load "
            f"{of_ranks[0]['load']:.1f}"
        )
        peaks = [abs(row["peak_error"]) for row in of_ranks if row["peak_error"] is not None]
        if peaks:
            verdict = common.verdict(max(peaks), PEAK_LIMIT)
            print(f"{num_ranks} ranks: largest peak error {max(peaks):.2%}: {verdict}")


def main() -> None:
    args = parse()
    rows = [row for num_ranks in args.ranks for row in rows_of(args, num_ranks)]
    print_report(rows)
    for row in rows:
        common.append_json(args.json, {"benchmark": "predicted", **row})


if __name__ == "__main__":
    common.main(work, main)

"""Time one training step: Shardwise stages 0 to 3 beside DDP and FSDP2, on CPU ranks over gloo.

    python benchmarks/step_time.py                             # what `make bench` runs
    python benchmarks/step_time.py --cases ddp,stage1 --rounds 9 --json runs/step_time.jsonl
    python benchmarks/step_time.py --layout flat --precision bf16 --accumulation 4

Targets: stages 0 to 2 take at most 1.05 x DDP's step, stage 3 runs at 1.3 x FSDP2's speed or more,
and the peak of resident memory is below the peer's (0 to 2: DDP, 3: FSDP2).

How. The built-in decoder, the same weights and batches for every case, AdamW(fused=True) and
clip_grad_norm_ 1.0 for everybody, one thread per rank. Every case of every round runs in processes
of its own; cases take turns (A B C A B C ...), so that a machine that slows down slows all of them.
A step lasts from the end of the step before to its own end, on rank 0; nothing but the engine's own
collectives holds the ranks together. Warm-up steps are not counted. Ratios are given twice: ratio
of the medians over all steps, and median of the rounds' ratios.

Memory is measured in rounds of their own (--memory-rounds), whose processes give freed blocks back
to the system at once (malloc's mmap and trim thresholds at 64 KiB, set in the environment). Without
that the peak shows what malloc keeps, not what is alive; with it steps are slower, so those rounds
do not count for time. Peaks are VmHWM above the level after imports and a first tiny step, reset
through /proc/self/clear_refs after the warm-up, worst rank. `state` is the bytes between steps by
count: parameters, optimizer state and gradient buffers that persist.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _common as common

common.find_shardwise()

CASES = ("ddp", "fsdp2", "stage0", "stage1", "stage2", "stage3")
OPTIONAL_CASES = ("ddp+zero", "fully_shard")  # the latter is ours
PEER = {
    "stage0": "ddp",
    "stage1": "ddp",
    "stage2": "ddp",
    "stage3": "fsdp2",
    "fully_shard": "fsdp2",
}
TIME_LIMIT = {"stage0": 1.05, "stage1": 1.05, "stage2": 1.05, "stage3": 1 / 1.3, "fully_shard": 1.0}
_NUM_BATCHES = 4
_MIB = 2**20


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ", ".join((*CASES, *OPTIONAL_CASES))
    parser.add_argument("--cases", default=",".join(CASES), help=f"comma-separated, of {known}")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count for time")
    parser.add_argument("--memory-rounds", type=int, default=1, help="rounds for memory; 0: none")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="timed steps per round")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layout", choices=["rows", "flat"], default="rows")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    model = {"dim": 512, "layers": 8, "heads": 8, "seq": 128, "vocab": 8192}
    work = {"micro_batch": 2, "accumulation": 1, "seed": 7}
    for key, value in {**model, **work}.items():
        parser.add_argument("--" + key.replace("_", "-"), type=int, default=value)
    parser.add_argument("--tied-head", action="store_true")
    parser.add_argument("--timeout", type=float, default=900, help="seconds per case and round")
    parser.add_argument("--json", metavar="FILE", help="append the results, one line per case")
    args = parser.parse_args()
    args.cases = args.cases.split(",")
    unknown = [c for c in args.cases if c not in (*CASES, *OPTIONAL_CASES)]
    if unknown:
        parser.error(f"no case {unknown[0]!r}; there are {known}")
    return args


# -- one rank of one case
def work(config: Mapping[str, Any]) -> None:
    import torch
    from _trainers import Settings, build_trainer

    with common.joined_ranks(config):
        _touch(config)
        base = common.resident_bytes()
        common.reset_resident_peak()
        model = _build_model(config)
        settings = Settings(config["num_ranks"], config["precision"], config["layout"])
        trainer = build_trainer(config["case"], model, settings)
        built_peak = common.peak_resident_bytes() - base
        batches = [_batches(config, number) for number in range(_NUM_BATCHES)]
        wall, cpu, losses = [], [], []
        sent = 0
        for number in range(config["warmup"] + config["steps"]):
            if number == config["warmup"]:
                common.reset_resident_peak()
                sent = trainer.sent_bytes() if trainer.sent_bytes else 0
            begin, cpu_begin = time.perf_counter(), time.process_time()
            losses.append(trainer.step(batches[number % _NUM_BATCHES]))
            wall.append(time.perf_counter() - begin)
            cpu.append(time.process_time() - cpu_begin)
        result = {
            "wall_s": wall[config["warmup"] :],
            "cpu_s": cpu[config["warmup"] :],
            "losses": losses,
            "built_peak_bytes": built_peak,
            "peak_bytes": common.peak_resident_bytes() - base,
            "resident_bytes": common.resident_bytes() - base,
            "state_bytes": trainer.state_bytes(),
            "sent_bytes": None,
            "num_params": sum(p.numel() for p in trainer.model.parameters()),
            "torch": torch.__version__,
        }
        if trainer.sent_bytes:
            result["sent_bytes"] = (trainer.sent_bytes() - sent) / config["steps"]
        common.write_result(config, result)


def _build_model(config: Mapping[str, Any], **changes: Any) -> Any:
    import torch

    from shardwise.train.config import TrainConfig
    from shardwise.train.decoder import Decoder

    chosen = {**config, **changes}
    keys = ("dim", "layers", "heads", "seq", "tied_head")
    torch.manual_seed(config["seed"])
    return Decoder(TrainConfig(**{key: chosen[key] for key in keys}), chosen["vocab"])


def _touch(config: Mapping[str, Any]) -> None:
    """Load the kernels and modules that every case uses, so that they count as imports."""
    import torch
    import torch.distributed.fsdp
    import torch.distributed.optim

    model = _build_model(config, dim=64, layers=1, vocab=64, heads=2)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16, enabled=config["precision"] == "bf16"):
        model(ids, ids).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters(), fused=True).step()
    torch.distributed.all_reduce(torch.zeros(1))


def _batches(config: Mapping[str, Any], number: int) -> list[tuple[Any, Any]]:
    """Draw this rank's micro-batches of one global batch; the same in every case."""
    import torch

    generator = torch.Generator().manual_seed(config["seed"] + 1 + number)
    shape = (config["accumulation"], config["num_ranks"], config["micro_batch"], config["seq"] + 1)
    tokens = torch.randint(config["vocab"], shape, generator=generator)[:, config["rank"]]
    return [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]


# -- all cases, turn by turn
def run_rounds(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Run every round of every case; a case that fails is left out from then on."""
    found: dict[str, list[dict[str, Any]]] = {case: [] for case in args.cases}
    failed: set[str] = set()
    kinds = ["time"] * args.rounds + ["memory"] * args.memory_rounds
    for number, kind in enumerate(kinds):
        for case in args.cases:
            if case in failed:
                continue
            config = {**vars(args), "case": case}
            env = common.RETURN_FREED_BLOCKS if kind == "memory" else {}
            try:
                ranks = common.run_processes(
                    Path(__file__), config, args.ranks, env, timeout_s=args.timeout
                )
            except common.CaseFailed as failure:
                failed.add(case)
                print(f"{case}: {failure}", flush=True)
                continue
            found[case].append({"kind": kind, "round": number, "ranks": ranks})
            wall = common.median(ranks[0]["wall_s"])
            print(f"round {number + 1}/{len(kinds)} {kind:6} {case:8} {wall:.3f} s", flush=True)
    return {case: rounds for case, rounds in found.items() if rounds}


def summarize(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Reduce one case's rounds to the numbers of its row."""
    timed = [r["ranks"] for r in rounds if r["kind"] == "time"]
    for_memory = [rank for r in rounds if r["kind"] == "memory" for rank in r["ranks"]]
    steps = [s for ranks in timed for s in ranks[0]["wall_s"]]
    any_ranks = rounds[0]["ranks"]
    losses = [sum(step) / len(any_ranks) for step in zip(*(r["losses"] for r in any_ranks))]  # noqa: B905
    sent = [r["sent_bytes"] for r in any_ranks]
    first, third = common.quartiles(steps)
    return {
        "step_s": common.median(steps),
        "step_quartiles_s": [first, third],
        "round_s": {
            r["round"]: common.median(r["ranks"][0]["wall_s"])
            for r in rounds
            if r["kind"] == "time"
        },
        "cpu_s": common.median([s for ranks in timed for rank in ranks for s in rank["cpu_s"]]),
        "peak_bytes": max((r["peak_bytes"] for r in for_memory), default=None),
        "built_peak_bytes": max((r["built_peak_bytes"] for r in for_memory), default=None),
        "resident_bytes": max((r["resident_bytes"] for r in for_memory), default=None),
        "state_bytes": max(r["state_bytes"] for r in any_ranks),
        "sent_bytes": None if None in sent else max(sent),
        "losses": losses,
        "num_params": any_ranks[0]["num_params"],
        "torch": any_ranks[0]["torch"],
    }


def ratios(rows: Mapping[str, dict[str, Any]], case: str, peer: str) -> tuple[float, float] | None:
    """Return (ratio of the medians, median of the rounds' ratios) of step times."""
    if peer not in rows or not rows[peer]["round_s"] or not rows[case]["round_s"]:
        return None
    ours, theirs = rows[case]["round_s"], rows[peer]["round_s"]
    each = [ours[number] / theirs[number] for number in ours.keys() & theirs.keys()]
    return rows[case]["step_s"] / rows[peer]["step_s"], common.median(each)


def print_report(args: argparse.Namespace, rows: Mapping[str, dict[str, Any]]) -> None:
    first = next(iter(rows.values()))
    print(
        f"\n{first['num_params'] / 1e6:.1f}M parameters, {args.ranks} ranks, 1 thread each, "
        f"micro-batch {args.micro_batch} x {args.seq} tokens x {args.accumulation}, "
        f"{args.precision}, Shardwise layout {args.layout}, torch {first['torch']}; "
        f"{args.rounds} rounds of {args.steps} steps"
    )
    reference = rows.get("ddp", {}).get("losses")
    table = []
    for case, row in rows.items():
        first_q, third_q = row["step_quartiles_s"]
        far = [abs(a - b) for a, b in zip(row["losses"], reference or (), strict=False)]
        table.append(
            [
                case,
                f"{row['step_s']:.3f} ({first_q:.3f}-{third_q:.3f})",
                *(_ratio(ratios(rows, case, peer)) for peer in ("ddp", "fsdp2")),
                f"{row['cpu_s']:.3f}",
                *(_mib(row[k]) for k in ("built_peak_bytes", "peak_bytes", "resident_bytes")),
                _mib(row["state_bytes"]),
                _mib(row["sent_bytes"]),
                f"{row['losses'][-1]:.4f}",
                f"{max(far):.1e}" if far else "-",
            ]
        )
    header = "case|step s (quartiles)|x DDP|x FSDP2|CPU s|peak build|peak step|between|state|sent"
    common.print_table([*header.split("|"), "last loss", "max loss distance"], table)
    print(
        "x: ratio of medians (median of the rounds' ratios), below 1 is faster. CPU s: per step "
        "and rank. MiB per rank: peak while building, while stepping, resident between steps; "
        "state by count; sent per step by Shardwise's counters."
    )
    print_targets(rows)


def print_targets(rows: Mapping[str, dict[str, Any]]) -> None:
    for case, peer in PEER.items():
        if case not in rows or peer not in rows:
            continue
        ratio = ratios(rows, case, peer)
        if ratio is not None:
            limit = TIME_LIMIT[case]
            print(
                f"{case}: step {ratio[0]:.2f} x {peer}, target <= {limit:.2f}: "
                f"{common.verdict(ratio[0], limit)}"
            )
        ours, theirs = rows[case]["peak_bytes"], rows[peer]["peak_bytes"]
        if ours is not None and theirs is not None:
            print(
                f"{case}: peak {ours / theirs:.2f} x {peer}, target < 1: "
                f"{common.verdict(ours / theirs, 1.0)}"
            )


def _ratio(pair: tuple[float, float] | None) -> str:
    return "-" if pair is None else f"{pair[0]:.2f} ({pair[1]:.2f})"


def _mib(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / _MIB:.0f}"


def main() -> None:
    args = parse()
    rows = {case: summarize(rounds) for case, rounds in run_rounds(args).items()}
    if not rows:
        raise SystemExit("every case failed")
    print_report(args, rows)
    settings = {k: v for k, v in vars(args).items() if k not in ("cases", "json", "timeout")}
    for case, row in rows.items():
        record = {"benchmark": "step_time", "case": case, **settings, **row}
        for peer in ("ddp", "fsdp2"):
            pair = ratios(rows, case, peer)
            record[f"ratio_{peer}"] = None if pair is None else list(pair)
        common.append_json(args.json, record)


if __name__ == "__main__":
    common.main(work, main)

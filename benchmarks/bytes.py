"""Count and time encoded gathers and reductions beside bf16: over the loopback, and 1 Gbit/s.

    python benchmarks/bytes.py                                    # 2 and 4 ranks, both links
    python benchmarks/bytes.py --ranks 2 --links loopback --rounds 1 --json runs/bytes.jsonl

Targets: at stage 3 with blocks of 256 gathers and reductions send 0.502 to 0.51 x the bytes of bf16
in 8 bits, and 0.26 x in 4; over the loopback a step takes at most 1.05 x as long. Over the link it
is to be 1.5 x as fast with both in 8 bits ("int8 both", "fp8 both").

How. The built-in decoder in bf16 at stage 3, one thread per rank; the transport's own counts of a
step. Choices take turns, each in processes of its own, and a ratio is one of medians over all
rounds. Over the loopback no byte costs anything, so it shows what encoding costs; `cpu ms` is the
processor time of a step of rank 0, all its threads, which other processes do not change much.

The link is a pair of virtual network cards between two network namespaces, each limited by the
kernel (`tc ... tbf`), with half of the ranks in each: two machines, as far as TCP can tell. Needs
root and the programs `ip` and `tc` (Debian: iproute2); both are removed in the end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import _common as common

common.find_shardwise()

PLAIN, BOTH = "bf16", " both"  # gathers alone are encoded, or reductions too
CHOICES = ("int8", "fp8", "int4", "int8 both", "fp8 both")
BYTES = {"int8": (0.502, 0.51), "fp8": (0.502, 0.51), "int4": (0.25, 0.26)}
LOOPBACK_LIMIT, LINK_LIMIT = 1.05, 1 / 1.5  # x the step of bf16; the latter with both in 8 bits
VOCAB = 256
Prefix = Callable[[int], Sequence[str]]


def work(config: Mapping[str, Any]) -> None:
    """Run some steps of a decoder on this rank; count and time them."""
    import torch

    from shardwise import Precision, shard
    from shardwise.debug import stats
    from shardwise.train.config import TrainConfig
    from shardwise.train.decoder import Decoder

    with common.joined_ranks(config):
        torch.manual_seed(0)
        keys = TrainConfig(dim=config["dim"], layers=4, heads=8, kv_heads=8, seq=config["tokens"])
        format_, both, _ = config["choice"].partition(BOTH)
        gather = None if format_ == PLAIN else format_
        reduce = f"{gather}-a2a" if both else torch.float32
        precision = Precision(torch.bfloat16, torch.float32, reduce, gather=gather)
        model = shard(Decoder(keys, VOCAB), stage=3, precision=precision)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        ids = torch.randint(VOCAB, (1, config["tokens"]))
        times, cpu, sent = [], [], []
        for _ in range(config["steps"] + 1):
            before = sent_by(stats(model))
            begin, begin_cpu = time.perf_counter(), time.process_time()
            model(ids, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - begin)
            cpu.append(time.process_time() - begin_cpu)
            sent.append([now - b for now, b in zip(sent_by(stats(model)), before, strict=True)])
    gathered, reduced, everything = sent[-1]
    result = {"gathered": gathered, "reduced": reduced, "sent": everything}
    result |= {"times": times[1:], "cpu": cpu[1:]}
    common.write_result(config, result)


def sent_by(found: Any) -> tuple[int, int, int]:
    """Return the bytes that a rank has sent in gathers, in reductions, and in all collectives."""
    sent = found.sent_bytes
    return (
        sent.get("shard.all_gather", 0),
        sent.get("shard.reduce_scatter", 0),
        sum(sent.values()),
    )


@contextlib.contextmanager
def limited_link(rate: str, num_ranks: int) -> Iterator[tuple[Prefix, Mapping[str, str]]]:
    """Make two namespaces with a link of a rate between them; remove them in the end.

    **Raises** SystemExit where the system refuses, with what it says.
    """
    names = [f"shardwise-{os.getpid()}-{side}" for side in "ab"]
    cards = [f"sw{os.getpid()}{side}" for side in "ab"]
    made = []
    try:
        for name in names:
            run("ip", "netns", "add", name)
            made.append(name)
        run("ip", "link", "add", cards[0], "type", "veth", "peer", "name", cards[1])
        for number, (name, card) in enumerate(zip(names, cards, strict=True), 1):
            run("ip", "link", "set", card, "netns", name, "name", "shardwise0")
            inside = ("ip", "netns", "exec", name)
            run(*inside, "ip", "addr", "add", f"10.177.0.{number}/24", "dev", "shardwise0")
            run(*inside, "ip", "link", "set", "shardwise0", "up")
            run(*inside, "ip", "link", "set", "lo", "up")
            limit = ("rate", rate, "burst", "1mb", "latency", "100ms")
            run(*inside, "tc", "qdisc", "add", "dev", "shardwise0", "root", "tbf", *limit)
        env = {"GLOO_SOCKET_IFNAME": "shardwise0"}
        yield lambda rank: ("ip", "netns", "exec", names[rank * 2 // num_ranks]), env
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False)


def run(*command: str) -> None:
    """Run a command of the system. **Raises** SystemExit with what it says where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise SystemExit(f"{command[0]}: not installed; give --links loopback") from None
    if done.returncode:
        said = f"{' '.join(command)}: {done.stderr.strip()}"
        raise SystemExit(f"{said}; a link needs root, give --links loopback")


def compare(args: argparse.Namespace, link: str, ranks: int) -> None:
    """Print what a step sends, and how long it takes, for each choice beside bf16."""
    found: dict[str, list[dict[str, Any]]] = {}
    limited = limited_link(args.rate, ranks) if link != "loopback" else None
    with limited or contextlib.nullcontext((lambda rank: (), {})) as (prefix, env):
        for _ in range(args.rounds):
            for choice in (PLAIN, *args.choices):
                case = {"choice": choice, "dim": args.dim, "tokens": args.tokens}
                case["steps"] = args.steps
                of_ranks = common.run_processes(Path(__file__), case, ranks, env, prefix=prefix)
                found.setdefault(choice, []).append(of_ranks[0])
    rows = []
    times = {name: [t for each in runs for t in each["times"]] for name, runs in found.items()}
    for choice, runs in found.items():
        ratio = runs[0]["gathered"] / found[PLAIN][0]["gathered"]
        step = common.median(times[choice])
        longer = step / common.median(times[PLAIN])
        reduced = runs[0]["reduced"] / found[PLAIN][0]["reduced"]
        low, high = BYTES.get(choice.removesuffix(BOTH), (1.0, 1.0))
        is_both = choice.endswith(BOTH)
        kept = low <= ratio <= high and (not is_both or low <= reduced <= high)
        limit = LOOPBACK_LIMIT if link == "loopback" else LINK_LIMIT if is_both else None
        in_time = common.verdict(longer, limit) if limit else ""
        row = [choice, f"{runs[0]['gathered']:,}", f"{ratio:.4f}", f"{reduced:.4f}"]
        row.append("" if choice == PLAIN else "met" if kept else "missed")
        all_sent = runs[0]["sent"] / found[PLAIN][0]["sent"]
        busy = common.median([t for each in runs for t in each["cpu"]])
        row += [f"{all_sent:.3f}", f"{busy * 1e3:.0f}", f"{step * 1e3:.0f}", f"{longer:.3f}"]
        rows.append([*row, "" if choice == PLAIN else in_time])
        record = {"link": link, "ranks": ranks, "choice": choice, "gathered": runs[0]["gathered"]}
        record |= {
            "ratio": ratio,
            "reduced_ratio": reduced,
            "all_sent": all_sent,
            "step_s": step,
            "longer": longer,
        }
        record |= {"cpu_s": busy, "tokens": args.tokens}
        common.append_json(args.json, {"benchmark": "bytes", "rate": args.rate, **record})
    print(f"\n{ranks} ranks, {link}{f' {args.rate}' if link != 'loopback' else ''}\n", flush=True)
    header = ["encoded in", "bytes of gathers", "x bf16", "reductions x", "target", "all bytes x"]
    common.print_table([*header, "cpu ms", "step ms", "step x bf16", "target"], rows)


def parse() -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def words(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--choices", default=CHOICES, type=words)
    parser.add_argument("--links", default=["loopback", "limited"], type=words)
    parser.add_argument("--ranks", default=["2", "4"], type=words)
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc writes it")
    parser.add_argument("--dim", type=int, default=512, help="width of the decoder")
    parser.add_argument("--tokens", type=int, default=64, help="of a rank in a step")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every choice")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a turn")
    parser.add_argument("--json", help="append results to this file")
    return parser.parse_args()


def main() -> None:
    """Run one rank, or compare all choices over every link."""
    config = common.worker_config()
    if config is not None:
        work(config)
        return
    args = parse()
    for ranks in map(int, args.ranks):
        for link in args.links:
            compare(args, link, ranks)


if __name__ == "__main__":
    main()

"""Train the recipe inside a rank of a test, and let it die in a given step."""

import json
import random
from contextlib import closing

import torch

from roundings import of_gradient
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.folder import step_name
from shardwise.checkpoint.read import Checkpoint
from shardwise.checkpoint.verify import check_quickly
from shardwise.train.checks import check_run
from shardwise.train.config import load_config
from shardwise.train.launch import RankPlace, StopRequest
from shardwise.train.loop import train_prepared
from shardwise.train.setup import prepare_run

TINY = {
    **{"dim": 16, "layers": 2, "heads": 2, "seq": 16, "micro_batch": 2},
    **{"lr": 3e-2, "sample_tokens": 2, "eval_windows": 3, "threads": 1},
}
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "def", "return", "while\n"]


def decoder_roundings(config, rows, vocab=256):
    """Count the roundings of a gradient of the decoder, summed over so many windows.

    Twice, since each step starts where the roundings of those before it have led.
    """
    dim, hidden = config.dim, 32 * max(1, round(config.ffn_multiple * config.dim / 32))
    attends = (dim, dim, dim // config.heads, config.seq, dim)  # norm, query, scores, values, out
    block = (*attends, dim, dim, hidden)  # norm, gate, down
    return 2 * of_gradient(*block * config.layers, dim, dim, vocab, over=rows * config.seq)


class Died(Exception):
    """Stands for the end of a process."""


class CountsSteps:
    """A `StopRequest` that counts the steps, asks to stop after the n-th, or dies in it.

    It dies in the middle: the state has changed, and no other rank has heard of it.
    """

    def __init__(self, die_in=None, stop_in=None):
        self.num_steps = 0
        self._die_in, self._stop_in = die_in, stop_in

    def listen(self):
        pass

    @property
    def requested(self):
        self.num_steps += 1
        if self.num_steps == self._die_in:
            raise Died
        return self.num_steps == self._stop_in


def write_text(folder):
    """Write a small text to train on."""
    path = folder / "text.txt"
    draw = random.Random(1)
    path.write_text(" ".join(draw.choice(WORDS) for _ in range(600)))
    return path


def prepared(rank, world_size, flags):
    """Make one rank's run of the tiny model; the loss scale of fp16 starts too high."""
    config = check_run(load_config(None, {**TINY, **flags}), world_size)
    place = RankPlace(rank, world_size, rank, world_size)
    run = prepare_run(config, place, torch.device("cpu"))
    if run.scaler.is_enabled():
        high = {"scale": 2.0**19, "growth_interval": 3}
        run.scaler.load_state_dict({**run.scaler.state_dict(), **high})
    return run


def train(rank, world_size, flags, stop=None, said=None):
    """Train as one rank; ``said`` takes the lines for people."""
    say = said.append if said is not None else lambda line: None
    return train_prepared(prepared(rank, world_size, flags), stop or StopRequest(), say)


def train_and_die(rank, world_size, flags, step):
    """Train as one rank that dies in the n-th step that it takes."""
    try:
        train(rank, world_size, flags, CountsSteps(step))
    except Died:
        return
    raise AssertionError("it was to die")


def lines_of(output):
    """Return the metrics of a run."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def curve_of(output):
    """Return (step, loss, gradient norm) of every step, the numbers to the bit."""
    steps = [line for line in lines_of(output) if "loss" in line]
    return [(s["step"], s["loss"].hex(), (s["grad_norm"] or 0.0).hex()) for s in steps]


def moments_of(output, step):
    """Return the means of gradients that Adam had in a step of a run, in full, by parameter."""
    files, path = Files(), output / "checkpoints" / step_name(step)
    manifest, _ = check_quickly(files, path)
    with closing(Checkpoint(files, path, manifest)) as found:
        return {
            info.name: found.read(info, 0, info.numel)
            for info in found.tensors
            if info.state == "exp_avg"
        }

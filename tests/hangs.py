"""Programs of one rank that a fault is injected into, run as users run theirs: as scripts.

`run_case` starts the ranks of one, and returns when and how each ended, and what it wrote. As a
script it is one rank: a decoder over some axes in a loop with a collective of its own, a clipped
step and saves; at one place of one step one rank does what the case says.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

_VERDICTS = " failed: ", "could not agree: "
GRACE_S = 60.0  # after the longest that any case should take: a rank that still runs hangs
AXES = {
    "data": {},
    "fully_shard": {},
    "ddp": {},
    "replicas": {"dp_replicate": 2},
    "tensor": {"tp": 2},
    "pipeline": {"pp": 2},
    "expert": {"ep": 2},
    "context": {"cp": 2},
}
NUM_RANKS = {"data": 3, "fully_shard": 3, "ddp": 3}  # 4 for others
PLACES = ("forward", "backward", "loss", "step", "save", "loader")


@dataclass(frozen=True)
class Case:
    """What one rank does at one place of one step; ``unit`` is a block, in forward and backward."""

    axis: str
    fault: str
    rank: int = 1
    place: str = "forward"
    unit: int = 0
    step: int = 3
    timeout_s: float = 5.0
    agent: bool = True  # the store is its launcher's, as torchrun's, or else rank 0's

    @property
    def num_ranks(self):
        return NUM_RANKS.get(self.axis, 4)


@dataclass(frozen=True)
class End:
    """How a rank ended: when it said why and when it was over, after the fault; its words."""

    rank: int
    said_s: float | None  # None where it said nothing
    after_s: float | None  # None where it had to be killed
    exit_code: int | None
    text: str


# -- what a rank does instead of going on
def stuck_in_a_loader():
    queue.Queue[int]().get()


def compute_for_long(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def inject(case, folder):
    """Do what the case says; some faults are a branch in the loop and do nothing here."""
    Path(folder, "began").write_text(str(time.time()))
    if case.fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if case.fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if case.fault == "loader":
        stuck_in_a_loader()
    if case.fault == "slow":
        compute_for_long(4 * case.timeout_s)
    if case.fault == "raise":
        raise ValueError("this rank had enough")


# -- one rank
def train(case, folder):
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy

    import shardwise

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    rank = dist.get_rank()
    model, step_of = _make(case, torch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    now = {"step": -1}

    def due(*places):
        return rank == case.rank and now["step"] == case.step and case.place in places

    _hook(model, case, folder, due)
    Path(folder, f"ready{rank}").touch()
    for step in range(1000):
        now["step"] = step
        if due("loader"):
            inject(case, folder)
        loss = step_of(cross_entropy)
        if due("loss"):
            inject(case, folder)
        _average(case, loss, due("loss"), torch, dist)
        if due("step"):
            inject(case, folder)
        if case.axis != "ddp" and not (case.fault == "skip" and due("step")):
            shardwise.parallel.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 0 and case.axis != "ddp":
            if due("save"):
                inject(case, folder)
            if not (case.fault == "skip" and due("save")):
                shardwise.save(folder / "saved" / str(step), model, optimizer, step=step)


def _average(case, loss, due, torch, dist):
    """Average the loss over all ranks, as loops do; what a case changes of that is changed."""
    shown = torch.zeros(4) if loss is None else loss.detach().expand(4).clone()
    if due and case.fault == "skip":
        return
    if due and case.fault == "shape":
        shown = torch.zeros(7)
    if due and case.fault == "dtype":
        shown = shown.double()
    if due and case.fault == "order":
        dist.barrier()
    dist.all_reduce(shown)
    if due and case.fault == "order":
        dist.all_reduce(shown)


def _make(case, torch):
    """Return the model over its axes, and a function that runs forward and backward."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    import shardwise
    from shardwise.config import Units
    from shardwise.plan.model.decoder import PlainDecoder, token_loss
    from shardwise.plan.model.shapes import DecoderShape, Experts
    from shardwise.train.decoder import DecoderStage, spread_decoder

    axes = shardwise.Axes(**AXES[case.axis])
    experts = Experts(4, 2, 8) if case.axis == "expert" else None
    shape = DecoderShape(4, 16, 2, 2, 8, 32, 32, **({"experts": experts} if experts else {}))
    model = PlainDecoder(shape)
    ids, labels = torch.randint(32, (2, 4, 8))
    spread_decoder(shardwise.parallel.spread_experts(model, axes), axes)
    if axes.pp > 1:
        model = DecoderStage(model, axes["pp"].get_local_rank(), axes.pp)
    if case.axis == "fully_shard":
        for block in model.blocks:
            shardwise.fully_shard(block)
        shardwise.fully_shard(model)
        shardwise.debug.watch(case.timeout_s)
    elif case.axis == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
        shardwise.debug.watch(case.timeout_s)
    else:
        of_experts = "*.experts" if experts else ()
        shardwise.debug.watch(case.timeout_s)
        shardwise.shard(model, mesh=axes, units=Units(experts=of_experts))
    if axes.pp > 1:
        index = axes["pp"].get_local_rank()
        group = axes["pp"].get_group()
        pipe = PipelineStage(model, index, axes.pp, torch.device("cpu"), group=group)
        schedule = ScheduleGPipe(pipe, 2, loss_fn=token_loss)
        given = (ids,) if index == 0 else ()
        kwargs = {"target": labels} if index else {}

        def run(_):
            schedule.step(*given, **kwargs)

        return model, run
    context = shardwise.parallel.ContextParallel(model, axes) if axes.cp > 1 else None

    def step(cross_entropy):
        cut = context.cut(ids, labels) if context is not None else nullcontext((ids, labels, None))
        with cut as (part, wanted, positions):
            logits = model(part, positions=positions)
            loss = cross_entropy(logits.flatten(0, 1), wanted.flatten())
            loss.backward()
        return loss

    return model, step


def _hook(model, case, folder, due):
    """Let the fault happen before a block's forward, or where backward comes to its output."""
    blocks = list(getattr(model, "module", model).blocks.children())
    block = blocks[case.unit % len(blocks)]

    def before(module, args):
        if due("forward"):
            inject(case, folder)

    def after(module, args, output):
        if due("backward"):
            found = output[0] if isinstance(output, tuple) else output
            found.register_hook(lambda grad: inject(case, folder))

    block.register_forward_pre_hook(before)
    block.register_forward_hook(after)


# -- all ranks
def run_case(case, folder):
    """Run a case; return how each rank ended. The rank with the fault is ended if it lives."""
    folder.mkdir(parents=True, exist_ok=True)
    import torch.distributed as dist

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    told, num = json.dumps(asdict(case)), case.num_ranks
    if not case.agent:
        del store
    ranks = [_start(rank, num, port, told, folder, case.agent) for rank in range(num)]
    began = Path(folder, "began")
    ended = {}
    said = {}
    until = time.time() + 120 + GRACE_S
    while time.time() < until:
        for rank, process in enumerate(ranks):
            log = Path(folder, f"{rank}.log").read_text()
            if rank not in said and any(verdict in log for verdict in _VERDICTS):
                said[rank] = time.time()
            if rank not in ended and process.poll() is not None:
                ended[rank] = time.time()
        if began.exists() and until > time.time() + case.timeout_s + GRACE_S:
            until = time.time() + case.timeout_s + GRACE_S
        if len(ended.keys() - {case.rank}) == case.num_ranks - 1:
            break
        time.sleep(0.02)
    begun_s = float(began.read_text()) if began.exists() else float("nan")
    for process in ranks:
        process.kill()
        process.wait()
    return [
        End(
            rank,
            said[rank] - begun_s if rank in said else None,
            ended[rank] - begun_s if rank in ended else None,
            process.returncode if rank in ended else None,
            Path(folder, f"{rank}.log").read_text(),
        )
        for rank, process in enumerate(ranks)
    ]


def _start(rank, num, port, told, folder, agent):
    place = {"RANK": rank, "WORLD_SIZE": num, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = os.environ | {name: str(value) for name, value in place.items()}
    environment |= {"OMP_NUM_THREADS": "1", "TORCHELASTIC_USE_AGENT_STORE": str(agent)}
    with Path(folder, f"{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, __file__, told, str(folder)], stdout=log, stderr=log, env=environment
        )


def named(case, end):
    """Tell whether a survivor has said who is at fault, and what of."""
    rank, text = case.rank, end.text
    said = {
        "kill": [f"rank {rank} (process", "has died"],
        "stop": [f"rank {rank} (process", "it is stopped"],
        "loader": [f"rank {rank} is in no call of Shardwise, but in stuck_in_a_loader"],
        "slow": [f"rank {rank} is in no call of Shardwise, but in compute_for_long"],
        "raise": [f"rank {rank} (process", "ValueError"],
        "skip": [f"rank {rank}"],
        "order": [f"rank {rank}"],
        "shape": ["(7,)"],
        "dtype": ["float64"],
    }[case.fault]
    if case.fault == "stop" and "it is stopped" not in text:
        # The survivor that was over its limit first has killed the stopped rank.
        said = [f"rank {rank} (process", "has died"]
    return all(each in text for each in said)


if __name__ == "__main__":
    train(Case(**json.loads(sys.argv[1])), Path(sys.argv[2]))

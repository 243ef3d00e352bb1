"""Lab 7: overlap and prefetch."""

from shardwise_labs.course import Claim, Decision, Defect, Lab, Number

LAB = Lab(
    number=7,
    name="overlap",
    title="Overlap, prefetch and buckets",
    targets={
        "start": 1,
        "gather": 2,
        "bucket": 4,
        "finish": 5,
        "order": 3,
        "bits": 3,
        "sent": 3,
        "full": 3,
    },
    num_ranks=(2,),
    predict={
        "gathers of 12 that run beside compute": Number(
            10, "nothing computes before the first of forward, nor before the first of backward"
        ),
        "full units at once": Number(2, "one that computes, and one that is gathered"),
        "bytes sent, over those without prefetch": Number(1, "the same messages begin earlier"),
        "reductions of six units": Number(3, "two units in each"),
    },
    claims={
        "Prefetch sends no fewer bytes": Claim(
            True, "{sent} bytes with it, {plain_sent} without, at other times"
        ),
        "Overlap costs no memory": Claim(
            False, "the peak is {peak} bytes with it, and {plain_peak} without"
        ),
        "With prefetch no gather is waited for": Claim(
            False, "{exposed} of {gathers} gathers have no compute before their wait"
        ),
    },
    defect=Defect(
        "self.ahead = len(modules)",
        "SW011",
        "all gathers begin at once, so all units are full at once and nothing is saved",
    ),
    decision=Decision(
        1,
        "4 ms hide behind 6 ms with one gather ahead; each further one costs 400 MB for nothing",
        "how many gathers of 4 ms hide behind 6 ms of compute? Each one ahead holds 400 MB",
    ),
    hints={
        1: (
            "The first two lines of lab 5's gather stay. Which call would wait here?",
            "dist.all_gather(list(self.values.chunk(N)), self.shard.data, async_op=True)",
            "Return if self.is_full or self.work is not None; else resize, and self.work = ...",
        ),
        2: (
            "Three steps: begin, wait, prefetch. Two of them may have nothing to do.",
            "work.wait() returns once the slices are there. Then work is None again.",
            "Call self.trainer.prefetch(self.index) last, on every call of gather.",
        ),
        3: (
            "self.direction is 1 or -1. For distance 1: index + self.direction.",
            "units[-1] is the last unit in Python, and none here: compare with 0 and len.",
            "for distance in range(1, self.ahead + 1): if 0 <= following < len(self.units): ...",
        ),
        4: (
            "What does rank 1 need of each unit? Its slice. So which tensor goes to rank 1?",
            "torch.cat([full.chunk(N)[r] for full in fulls]) for each rank r.",
            "mine = torch.empty(sum of all lengths // N); async_op=True; return work, mine.",
        ),
        5: (
            "A loop over the oldest of self.in_flight: pop(0), wait, then its values are there.",
            "mine.split([unit.shard.numel() for unit in units]) gives one part per unit.",
            "Divide by the number of ranks, and add to shard.grad if there is one.",
        ),
    },
    needs=("lab03_zero1.py", "lab04_zero2.py", "lab05_zero3.py"),
)

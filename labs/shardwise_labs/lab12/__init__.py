"""Lab 12: kill a rank."""

from shardwise_labs.course import Claim, Decision, Defect, Lab, Number

LAB = Lab(
    number=12,
    name="restart",
    title="Kill a rank, restart, and the same losses",
    targets={
        "newest": 2,
        "recut": 4,
        "save": 1,
        "state": 3,
        "torn": 1,
        "losses": 5,
        "ranks": 5,
    },
    num_ranks=(2,),
    predict={
        "GB of a checkpoint of 7e9 parameters": Number(84, "4 + 4 + 4 bytes for each"),
        "GB that each of 8 ranks writes": Number(10.5, "84 / 8: each writes its own slice"),
        "steps lost by a failure, on average": Number(250, "half of 500"),
        "losses that differ after a restart": Number(0, "not one, if all state is restored"),
    },
    claims={
        "The parameters are enough to go on with the same losses": Claim(
            False,
            "with moments of zero {differ} of {resumed} losses differ after the restart",
        ),
        "If one rank has written its file, that part of the step can be used": Claim(
            False,
            "the killed save left {left} of 2 whole files: slices of two different steps make no "
            "model, so training went on from step {torn_from}",
        ),
        "A checkpoint can be loaded on more ranks than have saved it": Claim(
            True, "saved on 2 and loaded on 3: {moved} of {numel} values differ"
        ),
    },
    defect=Defect(
        "every = max(every, steps)",
        "SW051",
        "the only save comes after the last step, so a failure costs all the work before it",
    ),
    decision=Decision(
        20,
        "a save costs 10.5 s; the square root of 2 x 10.5 s x 86,400 s is 1,347 s, 22 minutes",
        "seconds of a save: a rank writes 84 / 8 GB. Then the interval of lab 10",
    ),
    hints={
        1: (
            "Two barriers: one before the rename, one after. What would go wrong without each?",
            "growing.mkdir, write, flush, fsync, dist.barrier(), rank 0 renames, dist.barrier().",
            "if rank == 0: growing.rename(whole)",
        ),
        2: (
            "The names of whole checkpoints begin with step-, those of unfinished ones do not.",
            "Names have six digits, so sorting them sorts the steps.",
            "found = sorted(folder.glob('step-*')); return found[-1] if found else None",
        ),
        3: (
            "Five entries: values, first, second, count, random.",
            "adam = trainer.optimizer.state[trainer.shard] has exp_avg, exp_avg_sq, step.",
            "'values': trainer.shard.data.clone(), 'random': torch.get_rng_state()",
        ),
        4: (
            "torch.cat(slices) has all elements, and some zeros at the end.",
            "A flat tensor of padded(numel, num_ranks) zeros, whose first numel are the old ones.",
            "flat.chunk(num_ranks)[rank].clone()",
        ),
        5: (
            "Three places: the shard, the optimizer's state of the shard, the full values.",
            "The shard is a view of the full values: copy_ into shard.data, then gather_slices.",
            "optimizer.state[trainer.shard] = {'exp_avg': ..., 'exp_avg_sq': ..., 'step': count}",
        ),
    },
    needs=("lab03_zero1.py",),
    starts_ranks=True,
    hang_s=90.0,
)

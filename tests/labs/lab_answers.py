"""Right and typical wrong answers of the labs, by the line of the solution that they replace."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Wrong:
    """A wrong line, its gap, the target that is missed, and words of the verdict."""

    gap: int
    target: str
    old: str
    new: str
    words: str


@dataclass(frozen=True)
class Answers:
    """What a reader writes into a lab's file beside the gaps, and wrong lines."""

    right: dict[str, str]
    wrong: list[Wrong] = field(default_factory=list)
    timed_rows: tuple[str, ...] = ()  # rows of the run's table that are compared roughly
    rough_columns: tuple[int, ...] = ()


HEART = "    zero1 = numel * (param + grad + adam / dp)"
ZERO2 = "    zero2 = numel * (param + (grad + adam) / dp)"
ZERO3 = "    zero3 = numel * (param + grad + adam) / dp"
STORAGES = "{t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}"
HELD = "    return sum(storages.values())"
PEAK = "    return slices + 12 * max(unit_numels)"
STAGE = "        if held <= device_bytes:\n            return stage"
MIXED = '"adam": 4 + 4 + 4}'
LAB1 = Answers(
    {
        '"line": None': '"line": 15',
        '"finding": None': '"finding": "SW001"',
        '"stage": None': '"stage": "zero1"',
        'of ranks": None': 'of ranks": False',
        'faster": None': 'faster": False',
        'fp32": None': 'fp32": False',
    },
    [
        Wrong(1, "mixed", MIXED, '"adam": 8}', "8 bytes, 12 expected: an fp32 master and two fp32"),
        Wrong(1, "mixed", MIXED, '"adam": 4}', "4 bytes, 12 expected"),
        Wrong(1, "mixed", '{"param": 2', '{"param": 4', '"param" is 4 bytes, 2 expected'),
        Wrong(1, "mixed", '"grad": 2', '"grad": 4', '"grad" is 4 bytes, 2 expected'),
        Wrong(1, "mixed", MIXED, '"moments": 12}', '"adam" is None bytes, 12 expected'),
        Wrong(2, "formula", HEART, HEART.replace(" / dp", ""), "Adam's state is not divided"),
        Wrong(
            2,
            "formula",
            HEART,
            HEART.replace("grad + adam / dp", "(grad + adam) / dp"),
            "gradients stay",
        ),
        Wrong(
            2,
            "formula",
            ZERO2,
            HEART.replace("zero1", "zero2"),
            "gradients are not divided: this is zero1",
        ),
        Wrong(2, "formula", ZERO2, ZERO3.replace("zero3", "zero2"), "parameters are divided too"),
        Wrong(2, "formula", ZERO3, ZERO2.replace("zero2", "zero3"), "parameters are not divided"),
        Wrong(2, "formula", ZERO3, ZERO3.replace(" / dp", ""), "nothing is divided"),
        Wrong(3, "stage", STAGE, STAGE.replace("<=", ">"), "expected"),
        Wrong(
            3,
            "stage",
            STAGE,
            STAGE.replace("<= device_bytes", "<= device_bytes / 2"),
            "a lower stage fits",
        ),
        Wrong(
            3, "stage", STAGE, STAGE.replace("return stage", 'return "zero3"'), "a lower stage fits"
        ),
        Wrong(3, "stage", "    return None", '    return "zero3"', "where nothing fits: None is"),
        Wrong(3, "stage", STAGE, STAGE.replace("held", "held / 2"), "that does not fit"),
        Wrong(4, "held", HELD, "    return len(storages)", "460 expected"),
        Wrong(4, "held", HELD, "    return sum(storages.values()) // 4", "460 expected"),
        Wrong(4, "held", STORAGES, "{i: t.numel() for i, t in enumerate(tensors)}", "elements are"),
        Wrong(4, "held", STORAGES, "{i: t.nbytes for i, t in enumerate(tensors)}", "460 expected"),
        Wrong(
            4,
            "held",
            STORAGES,
            "{i: t.untyped_storage().nbytes() for i, t in enumerate(tensors)}",
            "once for each view",
        ),
        Wrong(4, "held", HELD, "    print(storages)", "is None: does it return?"),
        Wrong(5, "peak", PEAK, "    return slices", "without the unit that is full"),
        Wrong(5, "peak", PEAK, PEAK.replace("12", "4"), "three are needed"),
        Wrong(5, "peak", PEAK, PEAK.replace("12", "8"), "packed copy of the gradients is missing"),
        Wrong(5, "peak", PEAK, PEAK.replace("max", "sum"), "all units are full at once"),
        Wrong(5, "peak", PEAK, PEAK.replace("max", "min"), "this is the smallest unit"),
        Wrong(5, "peak", PEAK, PEAK.replace("12", "3"), "elements are counted, not bytes"),
    ],
    rough_columns=(2, 3),
)

PADDED = "    return -(-numel // num_ranks) * num_ranks"
REDUCE = """    mine = torch.empty(grads.numel() // num_ranks)
    dist.reduce_scatter(mine, list(grads.chunk(num_ranks)))
    mine /= num_ranks
    return mine"""
GATHER = "    dist.all_gather(list(values.chunk(dist.get_world_size())), shard)"
SHARD = "nn.Parameter(self.flat.values[rank * size : (rank + 1) * size])"
ADAM = "torch.optim.Adam([self.shard], lr=lr, foreach=False)"
MEAN = "        self.shard.grad = mean_slice(self.flat.grads)\n"
STEP = "        self.optimizer.step()\n"
BACK = "        gather_slices(self.flat.values, self.shard.data)\n"
ZERO = "        self.flat.grads.zero_()\n"
LAB3 = Answers(
    {
        '"line": None': '"line": 20',
        '"finding": None': '"finding": "SW006"',
        '"fewest ranks": None': '"fewest ranks": 16',
        'gathers": None': 'gathers": False',
        'parameters": None': 'parameters": False',
        'only": None': 'only": False',
    },
    [
        Wrong(1, "pad", PADDED, "    return numel // num_ranks * num_ranks", "rounded down"),
        Wrong(1, "pad", PADDED, "    return numel", "is 10, 12 expected: no multiple of 4"),
        Wrong(1, "pad", PADDED, "    return numel + num_ranks", "padded(10, 4) is 14, 12"),
        Wrong(
            1,
            "pad",
            PADDED,
            "    return (numel // num_ranks + 1) * num_ranks",
            "padded(12, 4) is 16, 12 expected: a multiple stays as it is",
        ),
        Wrong(1, "pad", PADDED, "    return -(-numel // num_ranks)", "this is one slice"),
        Wrong(
            2,
            "mean",
            "    mine /= num_ranks\n",
            "",
            "is the sum, the mean was asked for: exactly 3.000 x",
        ),
        Wrong(
            2,
            "mean",
            REDUCE,
            "    dist.all_reduce(grads)\n"
            "    return grads.chunk(num_ranks)[dist.get_rank()] / num_ranks",
            "16,384 bytes sent, 8,192 are needed: all-reduce (line 37) where reduce-scatter would",
        ),
        Wrong(
            2,
            "mean",
            REDUCE,
            "    return grads.chunk(num_ranks)[dist.get_rank()].clone()",
            "is the slice of this rank's own values",
        ),
        Wrong(
            2,
            "mean",
            "list(grads.chunk(num_ranks)))",
            "list(grads.chunk(num_ranks))[::-1])",
            "is rank 2's slice",
        ),
        Wrong(2, "mean", "    mine /= num_ranks\n", "    mine /= num_ranks**2\n", "divided twice"),
        Wrong(2, "mean", "    return mine", "    print(mine.shape)", "is None: does it return?"),
        Wrong(
            2,
            "mean",
            REDUCE,
            "    dist.all_reduce(grads)\n    return grads / num_ranks",
            "has 3072 elements, 1024 expected",
        ),
        Wrong(
            2,
            "mean",
            "list(grads.chunk(num_ranks)))\n    mine /= num_ranks",
            "list((grads / num_ranks).chunk(num_ranks)))",
            "divided before the sum",
        ),
        Wrong(
            3,
            "gather",
            GATHER,
            "    values.chunk(dist.get_world_size())[dist.get_rank()].copy_(shard)",
            "has this rank's slice alone",
        ),
        Wrong(
            3,
            "gather",
            GATHER,
            "    pieces = [torch.empty_like(shard) for _ in range(dist.get_world_size())]\n"
            "    dist.all_gather(pieces, shard)",
            "is as it was: the slices went to other memory",
        ),
        Wrong(
            3,
            "gather",
            GATHER,
            GATHER.replace("size())), shard", "size()))[::-1], shard"),
            "in another order than that of ranks",
        ),
        Wrong(
            3,
            "gather",
            GATHER,
            "    values.zero_()\n"
            "    values.chunk(dist.get_world_size())[dist.get_rank()].copy_(shard)\n"
            "    dist.all_reduce(values)",
            "16,384 bytes sent, 8,192 are needed: all-reduce (line 48) where all-gather would do",
        ),
        Wrong(
            3,
            "gather",
            GATHER,
            "    values.copy_(shard.repeat(dist.get_world_size()))",
            "has this rank's slice in every place",
        ),
        Wrong(4, "held", ADAM, "torch.optim.Adam(model.parameters(), lr=lr)", "are those of all"),
        Wrong(4, "held", f"{SHARD}\n", f"{SHARD[:-1]}.clone())\n", "has memory of its own"),
        Wrong(4, "gradient", SHARD, "nn.Parameter(self.flat.values)", "of size '[34764]'"),
        Wrong(4, "held", SHARD, "nn.Parameter(self.flat.values[:size])", "begins at element 0"),
        Wrong(4, "held", ADAM, "torch.optim.SGD([self.shard], lr=lr)", "Adam has no moments"),
        Wrong(4, "bits", ADAM, ADAM.replace("lr=lr, ", ""), "it moved 0.10"),
        Wrong(5, "bits", BACK, "", "is as before: gather all slices"),
        Wrong(5, "bits", STEP + BACK, BACK + STEP, "is as before: gather all slices, after"),
        Wrong(5, "gradient", ZERO, "", "still has that of the step before in it"),
        Wrong(
            5,
            "gradient",
            MEAN,
            "        self.shard.grad = self.flat.grads.chunk(dist.get_world_size())"
            "[dist.get_rank()].clone()\n",
            "is of this rank's batch alone",
        ),
        Wrong(5, "gradient", MEAN, ZERO + MEAN, "is all zeros"),
        Wrong(
            5, "gradient", MEAN, MEAN[:-1] + " * dist.get_world_size()\n", "is the sum over ranks"
        ),
        Wrong(5, "held", "        self.shard.grad = None\n", "", "shard still has its gradient"),
        Wrong(
            5,
            "sent",
            MEAN,
            "        dist.all_reduce(self.flat.grads.clone())\n" + MEAN,
            "bytes sent in a step, 185,408 expected",
        ),
    ],
    timed_rows=("peak of the step",),
)
ANSWERS = {1: LAB1, 3: LAB3}

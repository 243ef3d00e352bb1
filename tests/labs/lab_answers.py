"""Right and typical wrong answers of labs 1 to 5 and 10."""

from wrong_answers import Answers

HEART = "    zero1 = numel * (param + grad + adam / dp)"
ZERO2 = "    zero2 = numel * (param + (grad + adam) / dp)"
ZERO3 = "    zero3 = numel * (param + grad + adam) / dp"
STORAGES = "{t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}"
HELD = "    return sum(storages.values())"
PEAK = "    return slices + 12 * max(unit_numels)"
STAGE = "        if held <= device_bytes:\n            return stage"
MIXED = '"adam": 4 + 4 + 4}'
LAB1 = Answers(
    19,
    "SW001",
    ("stage", "zero1"),
    {"of ranks": False, "faster": False, "fp32": True},
    {
        (1, "mixed"): [
            (MIXED, '"adam": 8}', "8 bytes, 12 expected: an fp32 master and two fp32"),
            (MIXED, '"adam": 4}', "4 bytes, 12 expected"),
            ('{"param": 2', '{"param": 4', '"param" is 4 bytes, 2 expected'),
            ('"grad": 2', '"grad": 4', '"grad" is 4 bytes, 2 expected'),
            (MIXED, '"moments": 12}', '"adam" is None bytes, 12 expected'),
        ],
        (2, "formula"): [
            (HEART, HEART.replace(" / dp", ""), "Adam's state is not divided"),
            (HEART, HEART.replace("grad + adam / dp", "(grad + adam) / dp"), "gradients stay"),
            (ZERO2, HEART.replace("zero1", "zero2"), "gradients are not divided: this is zero1"),
            (ZERO2, ZERO3.replace("zero3", "zero2"), "parameters are divided too"),
            (ZERO3, ZERO2.replace("zero2", "zero3"), "parameters are not divided"),
            (ZERO3, ZERO3.replace(" / dp", ""), "nothing is divided"),
        ],
        (3, "stage"): [
            (STAGE, STAGE.replace("<=", ">"), "expected"),
            (STAGE, STAGE.replace("<= device_bytes", "<= device_bytes / 2"), "a lower stage fits"),
            (STAGE, STAGE.replace("return stage", 'return "zero3"'), "a lower stage fits"),
            ("    return None", '    return "zero3"', "where nothing fits: None is"),
            (STAGE, STAGE.replace("held", "held / 2"), "that does not fit"),
        ],
        (4, "held"): [
            (HELD, "    return len(storages)", "460 expected"),
            (STORAGES, "{i: t.numel() for i, t in enumerate(tensors)}", "elements are"),
            (STORAGES, "{i: t.nbytes for i, t in enumerate(tensors)}", "460 expected"),
            (
                STORAGES,
                "{i: t.untyped_storage().nbytes() for i, t in enumerate(tensors)}",
                "once for each view",
            ),
            (HELD, "    print(storages)", "is None: does it return?"),
        ],
        (5, "peak"): [
            (PEAK, "    return slices", "without the unit that is full"),
            (PEAK, PEAK.replace("12", "4"), "three are needed"),
            (PEAK, PEAK.replace("12", "8"), "packed copy of the gradients is missing"),
            (PEAK, PEAK.replace("max", "sum"), "all units are full at once"),
            (PEAK, PEAK.replace("max", "min"), "this is the smallest unit"),
            (PEAK, PEAK.replace("12", "3"), "elements are counted, not bytes"),
        ],
    },
    rough_columns=(2, 3),
)

EXCHANGE = """    received = torch.empty_like(tensor)
    sending = dist.isend(tensor, right)
    dist.recv(received, left)
    sending.wait()
    return received
"""
BEGIN = "    total = slices[(rank - 1) % num_ranks]\n"
PARTIAL = "        total = exchange(total) + slices[(rank - 2 - step) % num_ranks]\n"
OWN_PLACE = "    slices[rank].copy_(mine)\n"
PASS_ON = "        piece = exchange(piece)\n"
PLACE = "        slices[(rank - 1 - step) % num_ranks].copy_(piece)\n"
BOTH = "    return all_gather(reduce_scatter(values))"
SECONDS = "    return 2 * (num_ranks - 1) / num_ranks * num_bytes / bytes_per_second"
LAB2 = Answers(
    13,
    "SW010",
    ("GB/s", 25),
    {"per rank": False, "one process": False, "many bytes": True},
    {
        (1, "exchange"): [
            (EXCHANGE, "    return tensor\n", "is what this rank sent"),
            (
                "    return received\n",
                "    tensor.copy_(received)\n    return tensor\n",
                "exchange changed the tensor that it sends",
            ),
            (
                "    dist.recv(received, left)\n",
                "    dist.recv(received, left)\n    again = dist.isend(tensor, right)\n"
                "    dist.recv(received, left)\n    again.wait()\n",
                "24,576 bytes sent, 12,288 expected: it was sent twice",
            ),
            (
                EXCHANGE,
                "    pieces = [torch.empty_like(tensor) for _ in range(num_ranks)]\n"
                "    dist.all_gather(pieces, tensor)\n    return pieces[left]\n",
                "line 31 calls all-gather: this lab builds it from isend and recv",
            ),
            ("tensor,", "torch.zeros_like(tensor),", "is all zeros"),
        ],
        (2, "scatter"): [
            (PARTIAL, "        total = exchange(total)\n", "add in each step"),
            (
                BEGIN + "    for step in range(num_ranks - 1):\n",
                BEGIN + "    for step in range(num_ranks):\n",
                "what reduce_scatter returns on rank 0",
            ),
            (BEGIN, BEGIN.replace("rank - 1", "rank"), "what reduce_scatter returns"),
            ("    return total\n", "    return total / num_ranks\n", "is the mean"),
            (
                BEGIN + "    for step in range(num_ranks - 1):\n" + PARTIAL + "    return total\n",
                "    total = piece = values\n    for _ in range(num_ranks - 1):\n"
                "        piece = exchange(piece)\n        total = total + piece\n"
                "    return total.chunk(num_ranks)[rank]\n",
                "24,576 bytes sent, 8,192 expected: all slices go around, one is enough",
            ),
            (
                BEGIN + "    for step in range(num_ranks - 1):\n" + PARTIAL,
                BEGIN.replace("rank - 1", "rank")
                + "    for step in range(num_ranks - 1):\n"
                + PARTIAL.replace("rank - 2", "rank - 1"),
                "is the sum of slice 1",
            ),
        ],
        (3, "gather"): [
            (OWN_PLACE, "", "the place of slice 0 is all zeros"),
            (PLACE, PLACE.replace("- step", "+ step"), "the place of slice"),
            (PASS_ON, "        piece = exchange(mine)\n", "is what rank 2 has"),
            (PLACE, PLACE.replace("rank - 1", "rank"), "is what rank"),
            (PLACE, "", "the place of slice 1 is all zeros"),
        ],
        (4, "reduce"): [
            (BOTH, "    return reduce_scatter(values)", "1024 elements, 3072 expected"),
            (
                BOTH,
                "    return all_gather(values.chunk(dist.get_world_size())[dist.get_rank()])",
                "has slices of single ranks: nothing was added",
            ),
            (BOTH, BOTH + " / dist.get_world_size()", "is the mean"),
            (
                BOTH,
                "    total = piece = values\n    for _ in range(dist.get_world_size() - 1):\n"
                "        piece = exchange(piece)\n        total = total + piece\n    return total",
                "24,576 bytes sent, 16,384 expected: everything goes to everyone",
            ),
            (
                BOTH,
                "    dist.all_reduce(values)\n    return values",
                "calls all-reduce: this lab builds it",
            ),
        ],
        (5, "seconds"): [
            (SECONDS, "    return num_bytes / bytes_per_second", "not all of them"),
            (SECONDS, SECONDS.replace("2 * ", ""), "an all-reduce is two"),
            (
                SECONDS,
                "    return (num_ranks - 1) * num_bytes / bytes_per_second",
                "this is everything to everyone",
            ),
            (SECONDS, SECONDS.replace(" / num_ranks", ""), "each of 1 / N"),
            (SECONDS, SECONDS.replace("(num_ranks - 1) / num_ranks * ", ""), "keeps"),
        ],
    },
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
BACK = "        gather_slices(self.flat.values, self.shard.data)\n"
ZERO = "        self.flat.grads.zero_()\n"
LAB3 = Answers(
    18,
    "SW006",
    ("fewest ranks", 16),
    {"gathers": False, "parameters": True, "only": False},
    {
        (1, "pad"): [
            (PADDED, "    return numel // num_ranks * num_ranks", "rounded down"),
            (PADDED, "    return numel", "is 10, 12 expected: no multiple of 4"),
            (PADDED, "    return numel + num_ranks", "padded(10, 4) is 14, 12"),
            (
                PADDED,
                "    return (numel // num_ranks + 1) * num_ranks",
                "padded(12, 4) is 16, 12 expected: a multiple stays as it is",
            ),
            (PADDED, "    return -(-numel // num_ranks)", "this is one slice"),
        ],
        (2, "mean"): [
            ("    mine /= num_ranks\n", "", "is the sum, the mean was asked for: exactly 3.000 x"),
            (
                REDUCE,
                "    dist.all_reduce(grads)\n"
                "    return grads.chunk(num_ranks)[dist.get_rank()] / num_ranks",
                "16,384 bytes sent, "
                "8,192 are needed: all-reduce (line 37) where reduce-scatter would",
            ),
            (
                REDUCE,
                "    return grads.chunk(num_ranks)[dist.get_rank()].clone()",
                "is the slice of this rank's own values",
            ),
            (
                "list(grads.chunk(num_ranks)))",
                "list(grads.chunk(num_ranks))[::-1])",
                "is rank 2's slice",
            ),
            ("    mine /= num_ranks\n", "    mine /= num_ranks**2\n", "divided twice"),
            (
                "list(grads.chunk(num_ranks)))\n    mine /= num_ranks",
                "list((grads / num_ranks).chunk(num_ranks)))",
                "divided before the sum",
            ),
        ],
        (3, "gather"): [
            (
                GATHER,
                "    values.chunk(dist.get_world_size())[dist.get_rank()].copy_(shard)",
                "has this rank's slice alone",
            ),
            (
                GATHER,
                "    pieces = [torch.empty_like(shard) for _ in range(dist.get_world_size())]\n"
                "    dist.all_gather(pieces, shard)",
                "is as it was: the slices went to other memory",
            ),
            (
                GATHER,
                GATHER.replace("size())), shard", "size()))[::-1], shard"),
                "in another order than that of ranks",
            ),
            (
                GATHER,
                "    values.zero_()\n"
                "    values.chunk(dist.get_world_size())[dist.get_rank()].copy_(shard)\n"
                "    dist.all_reduce(values)",
                "16,384 bytes sent, "
                "8,192 are needed: all-reduce (line 48) where all-gather would do",
            ),
            (
                GATHER,
                "    values.copy_(shard.repeat(dist.get_world_size()))",
                "has this rank's slice in every place",
            ),
        ],
        (4, "held"): [
            (ADAM, "torch.optim.Adam(model.parameters(), lr=lr)", "are those of all"),
            (f"{SHARD}\n", f"{SHARD[:-1]}.clone())\n", "has memory of its own"),
            (SHARD, "nn.Parameter(self.flat.values[:size])", "begins at element 0"),
            (ADAM, "torch.optim.SGD([self.shard], lr=lr)", "Adam has no moments"),
        ],
        (4, "bits"): [
            (ADAM, ADAM.replace("lr=lr, ", ""), "it moved 0.10"),
        ],
        (5, "bits"): [
            (BACK, "", "is as before: gather all slices"),
        ],
        (5, "gradient"): [
            (ZERO, "", "still has that of the step before in it"),
            (
                MEAN,
                "        self.shard.grad = self.flat.grads.chunk(dist.get_world_size())"
                "[dist.get_rank()].clone()\n",
                "is of this rank's batch alone",
            ),
            (MEAN, ZERO + MEAN, "is all zeros"),
            (MEAN, MEAN[:-1] + " * dist.get_world_size()\n", "is the sum over ranks"),
        ],
        (5, "held"): [
            ("        self.shard.grad = None\n", "", "shard still has its gradient"),
        ],
        (5, "sent"): [
            (
                MEAN,
                "        dist.all_reduce(self.flat.grads.clone())\n" + MEAN,
                "bytes sent in a step, 185,408 expected",
            ),
        ],
    },
)
HOOKS = """        for p in self.parameters:
            p.register_post_accumulate_grad_hook(lambda _p: self.count_gradient())
"""
COUNT = """        self.num_missing -= 1
        if self.num_missing == 0:
            self.reduce()
"""
FULL = """        full = torch.zeros(self.values.numel())
        for p, span in self.spans():
            if p.grad is not None:
                full[span] = p.grad.flatten()
            p.grad = None
"""
ADDS = "mean if self.shard.grad is None else self.shard.grad + mean"
WAITING = """        for unit in self.units:
            if unit.num_missing > 0:
                unit.reduce()
"""
STEP2 = """        self.optimizer.step()
        self.optimizer.zero_grad()
"""
ZERO_GRAD = "        self.optimizer.zero_grad()\n"
GATHERS = """        for unit in self.units:
            gather_slices(unit.values, unit.shard.data)
"""
LAB4 = Answers(
    11,
    "SW011",
    ("stage", "zero1"),
    {"a unit": False, "ZeRO-1 sends": True, "is ZeRO-2": False},
    {
        (1, "hooks"): [
            (HOOKS, "", "count_gradient was called 0 times"),
            (HOOKS, HOOKS.replace("post_accumulate_grad_", ""), "before the gradient is in p.grad"),
            (HOOKS, HOOKS.replace("eters:", "eters[:1]:"), "was called 1 time"),
            (
                HOOKS,
                HOOKS.replace("lambda _p: self.count_gradient()", "self.count_gradient"),
                "gives the parameter to count_gradient, which takes none",
            ),
            (
                HOOKS,
                "        module.register_full_backward_hook(lambda *_: self.count_gradient())\n",
                "was called 1 time",
            ),
        ],
        (2, "count"): [
            (COUNT, COUNT.replace("-= 1", "-= 0"), "was not called after the third"),
            (COUNT, "        self.reduce()\n", "after gradient 1 and 2 and 3 of 3"),
            (COUNT, COUNT.replace("== 0", "== 1"), "after gradient 2 of 3"),
            (COUNT, COUNT.replace("-= 1", "+= 1"), "was not called after the third"),
            (COUNT, COUNT.replace("== 0", "<= 1"), "after gradient 2 and 3 of 3"),
        ],
        (3, "reduce"): [
            (ADDS, "mean", "is that of the last micro-batch alone: add to it"),
            (FULL, FULL.replace("            p.grad = None\n", ""), "is still in"),
            (
                FULL,
                """        parts = [p.grad.flatten() for p in self.parameters if p.grad is not None]
        full = torch.cat(parts)
        full = torch.cat([full, torch.zeros(self.values.numel() - full.numel())])
        for p in self.parameters:
            p.grad = None
""",
                "a parameter without one counts as zero",
            ),
            (
                "mean_slice(full)",
                "mean_slice(full) * dist.get_world_size()",
                "is the sum, the mean was asked for: exactly 2.000 x",
            ),
            (
                FULL,
                "        if any(p.grad is None for p in self.parameters):\n            return\n"
                + FULL,
                "reduce left `shard.grad` as None",
            ),
            (
                "        mean = mean_slice(full)\n",
                "        mean = mean_slice(full)\n        dist.all_reduce(full)\n",
                "49,248 bytes sent, 16,416 are needed: reduce-scatter, all-reduce",
            ),
        ],
        (4, "gradient"): [
            (WAITING, "", "unit 'once', is all zeros"),
            (WAITING, WAITING.replace("> 0", "== 0"), "unit 'once', is all zeros"),
            ("unit.reduce()", "unit.num_missing = 0", "unit 'once', is all zeros"),
            (
                WAITING,
                WAITING.replace("unit.reduce()", "unit.shard.grad = torch.zeros_like(unit.shard)"),
                "unit 'once', is all zeros",
            ),
        ],
        (4, "sent"): [
            (WAITING, WAITING.replace("> 0", ">= 0"), "is reduced twice"),
        ],
        (5, "bits"): [
            (GATHERS, "", "is as before: gather all slices"),
            (GATHERS, GATHERS.replace("units:", "units[:1]:"), "of unit 'twice', which is as"),
        ],
        (5, "gradient"): [
            (ZERO_GRAD, "", "still has that of the step before in it"),
            (STEP2, ZERO_GRAD + STEP2, "unit 'first', is all zeros"),
        ],
        (5, "sent"): [
            (GATHERS, GATHERS + GATHERS, "or gathered twice"),
        ],
    },
)
SHARD3 = "        self.shard.data = self.values[self.mine].clone()\n"
FREED = "        self.free()\n"
AGAIN = """        if self.is_full:
            return
"""
MEMORY = "        self.values.untyped_storage().resize_(self.values.numel() * 4)\n"
FILL = "        gather_slices(self.values, self.shard.data)\n"
FREE = "        self.values.untyped_storage().resize_(0)\n"
AFTER = """        self.free()
        if output.requires_grad:
            output.register_hook(lambda _grad: self.gather())
"""
REDUCE3 = """        super().reduce()
        self.free()
"""
LAB5 = Answers(
    11,
    "SW004",
    ("fewest ranks", 8),
    {"ZeRO-1": False, "peak": True, "per step": False},
    {
        (1, "shard"): [
            (SHARD3, SHARD3.replace(".clone()", ""), "still a view of the full values"),
            (SHARD3 + FREED, SHARD3, "bytes of full values after __init__"),
            (SHARD3, SHARD3.replace("clone()", "zero_().clone()"), "is all zeros"),
            ("self.mine", ": self.shard.numel()", "the shard on rank 1 is rank 0's slice"),
            (
                SHARD3,
                SHARD3.replace("[self.mine].clone()", ".clone()[self.mine]"),
                "8,320 bytes of memory behind the shard, 4,160 expected",
            ),
        ],
        (2, "gather"): [
            (AGAIN, "", "a second gather sends 4,160 bytes"),
            (FILL + "        self.is_full = True\n", FILL, "a second gather sends"),
            (MEMORY, "", "out of bounds for storage"),
            (
                MEMORY,
                "        self.values = torch.empty(self.values.numel())\n",
                "not views of `self.values` any more",
            ),
            (FILL, "        self.values.zero_()\n", "the gathered values is all zeros"),
        ],
        (3, "shard"): [
            (FREE, "        self.values.zero_()\n", "full values after __init__"),
            (FREE, "        self.values = None\n", "free its memory only"),
            (FREE, "        self.values.resize_(0)\n", "free its memory only"),
            (FREE, "        self.values.data = torch.empty(0)\n", "free its memory only"),
        ],
        (3, "gather"): [
            (FREE + "        self.is_full = False\n", FREE, "have 0 bytes of memory"),
        ],
        (4, "forward"): [
            (AFTER, FREED, "gather them when the gradient of its output is known"),
            (AFTER, AFTER[len(FREED) :], "after forward the unit still has 8,320"),
            (AFTER, FREED + "        self.gather()\n", "after forward the unit still"),
            (AFTER, AFTER.replace("gather", "free"), "its full values are not there"),
            (
                AFTER,
                AFTER.replace("        if output.requires_grad:\n    ", ""),
                "cannot register a hook on a tensor that doesn't require gradient",
            ),
        ],
        (5, "reduce"): [
            (REDUCE3, "        super().reduce()\n", "after backward the unit still has"),
            (REDUCE3, FREED, "`shard.grad` is None"),
            (REDUCE3, REDUCE3 + "        self.gather()\n", "after backward the unit still"),
            (
                REDUCE3,
                "        super().reduce()\n" + REDUCE3,
                "16,640 bytes sent, 12,480 are needed",
            ),
            (
                REDUCE3,
                REDUCE3 + "        self.shard.grad *= torch.distributed.get_world_size()\n",
                "is the sum, the mean was asked for: exactly 2.000 x",
            ),
        ],
        (6, "gradient"): [
            (ZERO_GRAD, "", "still has that of the step before in it"),
            (STEP2, ZERO_GRAD + STEP2, "unit 'first', is all zeros"),
            (STEP2, ZERO_GRAD, "the optimizer made 0 steps in 1"),
            (
                STEP2,
                STEP2.replace(
                    "self.optimizer.step()", "[self.optimizer.step() for _ in self.units]"
                ),
                "the optimizer made 4 steps in 1",
            ),
        ],
        (6, "held"): [
            (
                STEP2,
                STEP2 + "        for unit in self.units:\n            unit.gather()\n",
                "full parameters are still there",
            ),
        ],
    },
)
LOOP = """    for size in reversed(unit_bytes):
        held += size
        if held >= bucket_bytes:
            count, held = count + 1, 0
"""
SMALL = "num_reductions(unit_bytes, bucket_bytes) >= 2 * num_reductions(unit_bytes, usual_bytes)"
LARGE = "bucket_bytes >= sum(unit_bytes)"
MOST = "max(unit_bytes) > sum(unit_bytes) / 2"
YOUNG = "    return (2 * save_s * failure_s) ** 0.5"
SLOWDOWN = "    return max(step_s, moved_bytes / bytes_per_second) / step_s"
FULL10 = "    is_full = state_bytes + other_bytes >= 0.85 * device_bytes\n"
MOST10 = "is_full and other_bytes > state_bytes"
RATES10 = "{axis: sent[axis] / seconds[axis] for axis in sent if sent[axis] and seconds[axis]}"
SLOW10 = "rate < 0.3 * max(rates.values())"
SLOWEST10 = "    return min(slow, key=rates.__getitem__) if slow else None\n"
BUCKET10 = '{"bucket_bytes": 1 << 20}'
UNITS10 = '{"units": [1] * sum(settings["units"])}'
OFFLOAD10 = '{"offload": None}'
SAVES10 = '{"save_every": 10}'
LAB10 = Answers(
    14,
    "SW004",
    ("minutes", 60),
    {"latency": False, "small ones": True, "as before": True},
    {
        (1, "count"): [
            ("    return count + (held > 0)", "    return count", "3 in the run, 2"),
            ("    return count + (held > 0)", "    return count + 1", "6 in the run, 7"),
            (LOOP, LOOP.replace(">=", ">"), "units [40, 10, 10], buckets of 20: 1 red"),
            (LOOP, LOOP.replace("reversed(unit_bytes)", "unit_bytes"), "3 red"),
            (LOOP, "    count = len(unit_bytes)\n", "3 in the run, 6 by your rule"),
        ],
        (2, "buckets"): [
            (SMALL, SMALL.replace("2 * ", ""), "a healthy run is blamed"),
            (LARGE, "bucket_bytes > 2 * usual_bytes and False", "SW011 expected"),
            (LARGE, "bucket_bytes >= max(unit_bytes)", "[60, 60, 60, 60], 130, 100) is SW011"),
            (f"bucket_bytes > usual_bytes and {LARGE}", LARGE, "[20, 20, 20], 100, 100) is SW011"),
            (f"if {SMALL}", "if bucket_bytes > usual_bytes", "tiny buckets: None"),
        ],
        (3, "wrapping"): [
            (MOST, "max(unit_bytes) > sum(unit_bytes)", "SW004 expected"),
            (MOST, "max(unit_bytes) > min(unit_bytes)", "a healthy run is blamed"),
            (MOST, "max(unit_bytes) > sum(unit_bytes) / 3", "([40, 30, 30]) is SW004, None"),
            ("if len(unit_bytes) == 1", "if len(unit_bytes) < 4", "SW002, SW004"),
            ("if len(unit_bytes) == 1", "if not unit_bytes", "one unit: SW004, SW002"),
        ],
        (4, "saves"): [
            (YOUNG, "    return (save_s * failure_s) ** 0.5", "1,039 s lose 4.33 %"),
            (YOUNG, "    return 2 * (save_s * failure_s) ** 0.5", "1,470 s lose 4.08 %"),
            (YOUNG, "    return failure_s / 2", "18,000 s lose 25.17 %"),
            (YOUNG, "    return 10 * save_s", "300 s lose 10.42 %"),
            (YOUNG, "    return (2 * save_s / failure_s) ** 0.5", "lose"),
        ],
        (5, "offload"): [
            (
                SLOWDOWN,
                "    return 1 + moved_bytes / bytes_per_second / step_s",
                "copies run beside the step, not after it",
            ),
            (
                SLOWDOWN,
                "    return moved_bytes / bytes_per_second / step_s",
                "is not faster than before",
            ),
            (SLOWDOWN, SLOWDOWN[: -len(" / step_s")], "this is the time of the step"),
            (
                SLOWDOWN,
                "    return max(0.0, moved_bytes / bytes_per_second - step_s)",
                "this is the time that it waits",
            ),
            (SLOWDOWN, "    return 1.0", "1 x, 2 x expected"),
        ],
        (6, "activations"): [
            (MOST10, "is_full", "the device is full of state: SW030, None"),
            (MOST10, "other_bytes > state_bytes", "again: SW030, None expected"),
            (FULL10, FULL10.replace(">=", ">"), "85 of 100, most of it"),
            (
                FULL10,
                FULL10.replace("state_bytes + ", ""),
                "activations are kept: None, SW030 expected",
            ),
            (MOST10, "is_full and state_bytes > other_bytes", "are kept: None"),
        ],
        (7, "axis"): [
            (RATES10, "{axis: -seconds[axis] for axis in sent}", "expected"),
            (RATES10, RATES10.split(" if ")[0] + "}", "float division by zero"),
            (SLOW10, SLOW10.replace("0.3", "0.5"), "0.4 as fast is not much slower"),
            (SLOWEST10, "    return slow[-1] if slow else None\n", "two are slow"),
            (SLOWEST10, "    return min(slow, key=rates.__getitem__)\n", "empty"),
            (RATES10, "dict(sent)", "one axis sends more"),
        ],
        (8, "mend"): [
            (BUCKET10, "{}", "and now SW010"),
            (BUCKET10, BUCKET10.replace("20", "30"), "and now SW011"),
            (UNITS10, "{}", "and now SW004"),
            (UNITS10, UNITS10.replace("sum", "len"), "the model has 24"),
            (UNITS10, UNITS10[:-1] + ', "bucket_bytes": 1 << 21}', "'bucket_bytes' was right"),
            (OFFLOAD10, "{}", "and now SW032"),
            (SAVES10, '{"save_every": 20}', "no saves: the doctor found SW051, and now SW051"),
            (f"settings | {SAVES10}", "None", "mend returns None; settings with units,"),
        ],
    },
    rough_columns=(1,),
)
ANSWERS = {1: LAB1, 2: LAB2, 3: LAB3, 4: LAB4, 5: LAB5, 10: LAB10}

"""Right and typical wrong answers of labs 0 and 6 to 9."""

from wrong_answers import Answers

MOST0 = "    return (device_bytes - activation_bytes) // 16"
EACH0 = """            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
"""
ONE0 = "    dist.all_reduce(flat)\n"
MEAN0 = "    flat /= dist.get_world_size()\n"
BACK0 = "        grad.copy_(mean.view_as(grad))\n"
FLAT0 = "torch.cat([grad.flatten() for grad in grads])"
SEND0 = "            dist.broadcast(p.data, src=0)\n"
ADAM0 = "torch.optim.Adam(self.parameters, lr=lr, foreach=False)"
LAB0 = Answers(
    14,
    "SW010",
    ("stage", "replicated"),
    {"train faster": False, "half of the model": False, "data parallelism": True},
    {
        (1, "fits"): [
            (MOST0, MOST0.replace("16", "12"), "gradients are missing"),
            (MOST0, MOST0.replace("16", "8"), "Adam's two moments are missing"),
            (MOST0, MOST0.replace("16", "4"), "only parameters are counted"),
            (MOST0, "    return device_bytes // 16", "activations need memory"),
            (MOST0, MOST0.replace(" // 16", ""), "these are bytes"),
            (MOST0, MOST0.replace(" - ", " + "), "activations are added"),
        ],
        (2, "each"): [
            (EACH0, EACH0.split("\n")[0] + "\n", "is the sum, the mean was asked for"),
            (EACH0, EACH0.replace("size()", "size() ** 2"), "is divided twice"),
            (EACH0, "            p.grad /= dist.get_world_size()\n", "alone, divided"),
            (EACH0, "            dist.all_reduce(p.grad.clone())\n", "is as it was"),
            (
                "        if p.grad is not None:\n" + EACH0,
                "        if p.grad is None:\n            p.grad = torch.zeros_like(p)\n"
                + EACH0.replace("            ", "        "),
                "None stays None",
            ),
        ],
        (3, "flat"): [
            (ONE0, "", "alone, divided"),
            (MEAN0, "", "is the sum, the mean was asked for"),
            (BACK0, "        pass\n", "is as it was, this rank's alone"),
            (FLAT0, FLAT0.replace("in grads", "in grads[::-1]"), "has its parts in other places"),
            (
                ONE0,
                "    for part in flat.split(1):\n        dist.all_reduce(part)\n",
                "37 messages, 1 expected",
            ),
        ],
        (4, "start"): [
            (SEND0, "            pass\n", "ranks begin apart and stay apart"),
            (SEND0, SEND0.replace("src=0", "src=1"), "is rank 1's"),
            (SEND0, "            dist.all_reduce(p.data)\n", "is the sum of all"),
            (
                SEND0,
                "            dist.all_reduce(p.data)\n"
                "            p.data /= dist.get_world_size()\n",
                "is the mean of all ranks' values",
            ),
            (ADAM0, ADAM0.replace("parameters", "parameters[:2]"), "lacks 2 of 4"),
        ],
        (5, "passes"): [
            ('"replicated": 2', '"replicated": 1', "is 1, 2 expected"),
            ('"zero1": 2', '"zero1": micro_batches + 1', "is 3, 2 expected"),
            ('"zero2": micro_batches + 1', '"zero2": 2', "is 2, 3 expected"),
            ("3 * micro_batches", "micro_batches + 2", "is 4, 6 expected"),
            ("3 * micro_batches", "2 * micro_batches", "is 2, 3 expected"),
        ],
    },
    rough_rows=(),
)
BLOCKS8 = "    return [(begin, min(begin + size, numel)) for begin in range(0, numel, size)]"
READ8 = "        moments = store.read(begin, end)\n"
FIRST8 = "        coming = pool.submit(store.read, *cuts[0])\n"
LOOP_AHEAD8 = "        for number, (begin, end) in enumerate(cuts):\n"
TAKE8 = "            moments = coming.result()\n"
MORE8 = """            if number + 1 < len(cuts):
                coming = pool.submit(store.read, *cuts[number + 1])
"""
ADAM8 = "adam(values[begin:end], grad[begin:end], moments, step, lr)\n"
WRITE8 = "store.write(begin, moments)\n"
PLAIN8 = READ8 + "        " + ADAM8 + "        " + WRITE8
AHEAD8 = MORE8 + "            " + ADAM8 + "            " + WRITE8
COUNT8 = "        self.num_steps += 1\n"
MEAN8 = "        grad = mean_slice(self.flat.grads)\n"
STEP8 = (
    "        step_ahead(self.shard.data, grad, self.store, self.num_steps, self.lr, self.size)\n"
)
BACK8 = "        gather_slices(self.flat.values, self.shard.data)\n"
TOKENS8 = "    return 16 / num_ranks / bytes_per_second * flops / 6"
LAB8 = Answers(
    20,
    "SW033",
    ("moments", "keep"),
    {"number of ranks": False, "fewer bytes": False, "of the copies": True},
    {
        (1, "blocks"): [
            ("min(begin + size, numel)", "begin + size", "ends at 12, and there are 10 elements"),
            ("numel,", "numel // size * size,", "the last elements are in no block"),
            ("numel,", "numel + 1,", "the last block is empty"),
            ("begin + size, numel", "size, numel - begin", "and not how long it is"),
            (
                BLOCKS8,
                BLOCKS8.replace("min(begin + size, numel)", "min(begin + size, numel) - 1"),
                "an end is the element after the last one",
            ),
        ],
        (2, "step"): [
            (PLAIN8, READ8 + "        " + ADAM8, "at 0 is written nowhere"),
            (
                PLAIN8,
                READ8 + "        " + WRITE8 + "        " + ADAM8,
                "is written before its step",
            ),
            (
                PLAIN8,
                PLAIN8.replace("values[begin:end]", "values[begin:end].clone()"),
                "is stepped nowhere",
            ),
            (
                PLAIN8,
                READ8 + "        moments = [m.clone() for m in moments]\n" + PLAIN8,
                "a block is read twice",
            ),
            (
                PLAIN8,
                PLAIN8.replace("moments, step, lr)", "moments, 1, lr)"),
                "after step 2 the slice",
            ),
            (
                PLAIN8,
                PLAIN8.replace("grad[begin:end]", "grad[: end - begin]"),
                "after step 1 the slice",
            ),
        ],
        (3, "ahead"): [
            (
                FIRST8 + LOOP_AHEAD8 + TAKE8 + MORE8,
                LOOP_AHEAD8 + "            moments = store.read(begin, end)\n",
                "the read of the next one has not begun",
            ),
            (MORE8, MORE8.replace("number + 1]", "number]"), "tensor a (1000)"),
            (MORE8, MORE8.split("\n")[1].replace("    ", "", 1) + "\n", "list index out of range"),
            (AHEAD8, MORE8 + "            " + ADAM8, "is written nowhere"),
            (
                FIRST8,
                "        everything = [store.read(*cut) for cut in cuts]\n" + FIRST8,
                "a block is read twice",
            ),
            (
                MORE8,
                MORE8 + "                coming.result()\n",
                "is waited for before this block's step",
            ),
            (
                FIRST8 + LOOP_AHEAD8 + TAKE8 + MORE8,
                "        futures = [pool.submit(store.read, *cut) for cut in cuts]\n"
                + LOOP_AHEAD8
                + "            moments = futures[number].result()\n",
                "3 blocks in memory at once",
            ),
        ],
        (4, "bits"): [
            (COUNT8, "", "your code raised"),
            (BACK8, "", "is as before"),
            (STEP8, STEP8.replace("step_ahead", "step_by_blocks"), "called step_ahead 0 times"),
            ("        self.flat.grads.zero_()\n", "", "are gradients set to zero"),
        ],
        (4, "held"): [
            (MEAN8, MEAN8 + "        self.shard.grad = grad\n", "of the slice is kept"),
            (
                STEP8,
                "        self.shard.grad = grad\n        self.optimizer.step()\n"
                "        self.shard.grad = None\n",
                "the moments are in memory, too",
            ),
        ],
        (4, "moved"): [
            (STEP8, STEP8 + "        self.store.read(0, 17382)\n", "bytes read and"),
        ],
        (5, "tokens"): [
            (TOKENS8, TOKENS8.replace("16", "8"), "moments are read AND written"),
            (TOKENS8, TOKENS8.replace(" / num_ranks", ""), "its slice only"),
            (TOKENS8, TOKENS8.replace(" / 6", ""), "6 operations per parameter"),
            (TOKENS8, TOKENS8.replace("/ 6", "/ 2"), "forward is 2 of them"),
            (TOKENS8, TOKENS8.replace("/ num", "* num"), "so they divide the tokens"),
        ],
    },
    rough_rows=(),
)
ULP = "    return torch.ldexp(torch.ones_like(weights), exponent - 9)"
MASTER = "nn.Parameter(values.chunk(num_ranks)[rank].clone())"
ADAM9 = "torch.optim.Adam([self.master], lr=lr, foreach=False)"
MEAN9 = "        self.master.grad = mean_slice(self.flat.grads.float())\n"
SEND9 = "        gather_slices(self.flat.values, self.master.data.bfloat16())\n"
FLAG = "    bad = (~grad.isfinite().all()).float()\n"
TELL = "        dist.all_reduce(bad)\n"
SKIP = "        return None if bad else grad / self.scale"
GROWN = "        elif self.good_steps == self.growth_steps:\n"
GROW = "            self.scale, self.good_steps = self.scale * 2, 0\n"
LAB9 = Answers(
    18,
    "SW042",
    ("precision", "masters"),
    {"fp32 masters": False, "round away": True, "step alone": False},
    {
        (1, "ulp"): [
            (ULP, ULP.replace("9", "8"), "is a whole step; half of it is where"),
            (ULP, ULP.replace("9", "10"), "is a quarter of a step"),
            (ULP, ULP.replace("9", "12"), "is that of fp16"),
            (ULP, "    return weights * 2**-8", "is the same share of each weight"),
            (
                ULP,
                "    return torch.full_like(weights, 2**-8)",
                "is the same for all weights; steps grow with the exponent",
            ),
            (ULP, ULP.replace("9", "25"), "is that of fp32"),
        ],
        (2, "bits"): [
            (MASTER, MASTER.replace("values", "values.bfloat16().float()"), "is round"),
            (MASTER, MASTER.replace("[rank]", "[0]"), "is one slice in every place"),
        ],
        (2, "held"): [
            (MASTER, MASTER.replace(".clone()", ""), "a view of all fp32 values"),
            (ADAM9, "torch.optim.SGD([self.master], lr=lr)", "Adam has no moments"),
            (ADAM9, "torch.optim.Adam(parameters, lr=lr)", "other parameters than the master"),
            (MASTER, MASTER.replace("clone()", "bfloat16()"), "is torch.bfloat16, and fp32 is"),
        ],
        (3, "gradient"): [
            (MEAN9, MEAN9[:-1] + " * 2\n", "is the sum, the mean was asked for"),
            (MEAN9, MEAN9[:-1] + ".bfloat16().float()\n", "is rounded to bf16 after the sum"),
            ("        self.flat.grads.zero_()\n", "", "of the step before in it"),
            ("        self.master.grad = None\n", "", "the master still has its grad"),
        ],
        (3, "bits"): [
            (SEND9, "", "is as before: gather the masters after"),
            (
                SEND9,
                SEND9 + "        self.master.data.copy_(self.master.data.bfloat16())\n",
                "what rounding drops is not kept",
            ),
        ],
        (3, "sent"): [
            (
                SEND9,
                "        full = torch.empty(len(self.flat.values))\n"
                "        gather_slices(full, self.master.data)\n"
                "        self.flat.values.copy_(full)\n",
                "values are sent in fp32",
            ),
        ],
        (4, "skip"): [
            (TELL, "", "only that rank sees it: tell the others"),
            (SKIP, SKIP.replace("/", "*"), "is multiplied by the scale"),
            (SKIP, "        self.update(bool(bad))\n" + SKIP, "unscale changes the scale"),
            (SKIP, SKIP.replace(" / self.scale", ""), "still has the scale in it"),
            (FLAG, "    bad = grad.isinf().any().float()\n", "nan in the gradient"),
            (FLAG, "    bad = grad.isnan().any().float()\n", "inf in the gradient"),
            (
                TELL,
                "        everyone = grad.clone()\n        dist.all_reduce(everyone)\n"
                "        bad = (~everyone.isfinite().all()).float()\n",
                "4,000 bytes sent, 4 are needed",
            ),
        ],
        (5, "scale"): [
            ("            self.scale /= 2\n", "            pass\n", "8, 4 expected"),
            ("            self.scale /= 2\n", "            self.scale *= 2\n", "16, 4"),
            (GROW, GROW.replace(", 0", ", self.good_steps"), "8, 16 expected"),
            (GROWN, GROWN.replace(" == self.growth_steps", " > 0"), "16, 8 expected"),
            (GROW, "            self.good_steps = 0\n", "4, 8 expected"),
        ],
    },
    rough_rows=("moved", "lost", "fp16 gradients"),
)
SHARE6 = "    share = -(-num_rows // num_ranks)\n"
ROWS6 = "    return min(rank * share, num_rows), min((rank + 1) * share, num_rows)\n"
OURS6 = '        if event == "call" and name in STATIONS and is_ours:\n'
ANY6 = "any(id(value) in own for value in frame.f_locals.values())"
END6 = "    sys.setprofile(None)\n"
FORWARD6 = '    forward += ["Engine.after_forward", "Storage.free"]\n'
BACKWARD6 = '    backward += ["Backward.on_unit_end", "Reductions.add", "Storage.free"]\n'
BEGIN6 = (
    '    forward = ["Storage.prepare_gather", "Engine.before_forward", "Unit.finish_unshard"]\n'
)
HOOK6 = (
    "    hook = module.register_forward_hook(lambda m, *_: found.update(forward=held(m.weight)))\n"
)
SENT6 = "    return 2 * sum(own) - own[-1], sum(others) + 4 * num_tensors\n"
LAB6 = Answers(
    22,
    "SW002",
    ("message", "none"),
    {"the optimizer": False, "forward begins": False, "stays full": True},
    {
        (1, "rows"): [
            (SHARE6, "    share = num_rows // num_ranks\n", "rounded down"),
            (ROWS6, "    return rank * share, (rank + 1) * share\n", "there are 7 rows only"),
            (ROWS6, ROWS6.replace("(rank + 1) * share", "(rank + 1) * share - 1"), "aft"),
            (ROWS6, "    return rank * share, share\n", "is a row, and not how many"),
            (ROWS6, "    print(share)\n", "rank 0 has None"),
        ],
        (2, "record"): [
            (OURS6, OURS6.replace('event == "call" and ', ""), "recorded too?"),
            (OURS6, OURS6.replace(" and is_ours", ""), "those of other units"),
            (ANY6, 'id(frame.f_locals.get("self")) in own', "the ids of ALL its arguments"),
            (ANY6, "id(unit) in map(id, frame.f_locals.values())", "Storage.prepare_gather is"),
            (END6, "", "the profile goes on after the step"),
            (
                "    step()\n" + END6 + "    return found\n",
                END6 + "    step()\n    return found\n",
                "nothing was recorded",
            ),
            (
                END6 + "    return found\n",
                END6 + "    return sorted(set(found))\n",
                "they are wanted as they came",
            ),
        ],
        (3, "path"): [
            (
                BEGIN6,
                BEGIN6.replace(
                    '"Storage.prepare_gather", "Engine.before_forward"',
                    '"Engine.before_forward", "Storage.prepare_gather"',
                ),
                "memory comes first, while another unit computes",
            ),
            (
                FORWARD6,
                '    forward += ["Storage.free", "Engine.after_forward"]\n',
                "the unit is freed after that",
            ),
            (FORWARD6, FORWARD6.replace(', "Storage.free"', ""), "nothing reads the"),
            (
                BEGIN6,
                BEGIN6.replace(
                    '"Engine.before_forward", "Unit.finish_unshard"',
                    '"Unit.finish_unshard", "Engine.before_forward"',
                ),
                "the wait is inside of what needs the values",
            ),
            ("    return forward + backward\n", "    return forward\n", "5 stations, 11"),
            (
                BACKWARD6,
                '    backward += ["Backward.on_unit_end", "Storage.free", "Reductions.add"]\n',
                "station 10 is Reductions.add, and not Storage.free: the unit is freed after that",
            ),
        ],
        (4, "forms"): [
            (HOOK6, HOOK6.replace("forward=", "before="), '"forward" is missing'),
            (
                "    hook.remove()\n",
                "    hook.remove()\n    found.update(forward=held(module.weight))\n",
                "look while the unit is full",
            ),
            ("    hook.remove()\n", "", "the hook is still there after the step"),
            ('found["grad"] = held(module.weight.grad)', "pass", '"grad" is missing'),
            ("held(module.weight.grad)", "held(module.weight)", "look at weight.grad"),
            (
                '    found["grad"] = held(module.weight.grad)\n',
                '    found["grad"] = found["forward"]\n',
                "that is the full parameter in forward",
            ),
        ],
        (5, "sent"): [
            (SENT6, SENT6.replace(" - own[-1]", ""), "the last unit stays full"),
            (SENT6, SENT6.replace("2 * sum(own) - own[-1]", "sum(own)"), "again for"),
            (SENT6, SENT6.replace("own[-1]", "own[0]"), "the FIRST unit is counted once"),
            (SENT6, SENT6.replace(" + 4 * num_tensors", ""), "ranks with a gradient are counted"),
            ("own) - own[-1], sum(others", "others) - others[-1], sum(own", "bytes in"),
        ],
    },
    rough_rows=(),
)
GUARD7 = "        if self.is_full or self.work is not None:\n            return\n"
ROOM7 = "        self.values.untyped_storage().resize_(self.values.numel() * 4)\n"
START7 = "        self.work = dist.all_gather(slices, self.shard.data, async_op=True)\n"
WAIT7 = "            self.work.wait()\n"
DONE7 = "            self.work, self.is_full = None, True\n"
BEGIN7 = "        self.start_gather()\n        if self.work is not None:\n" + WAIT7 + DONE7
NEXT7 = "        self.trainer.prefetch(self.index)\n"
AHEAD7 = "        for distance in range(1, self.ahead + 1):\n"
INDEX7 = "            following = index + self.direction * distance\n"
BOUND7 = "            if 0 <= following < len(self.units):\n"
INPUTS7 = "[torch.cat([full.chunk(num_ranks)[r] for full in fulls]) for r in range(num_ranks)]"
REDUCE7 = "        return dist.reduce_scatter(mine, inputs, async_op=True), mine\n"
OLDEST7 = "            work, mine, units = self.in_flight.pop(0)\n"
PARTS7 = "            parts = mine.split([unit.shard.numel() for unit in units])\n"
GRAD7 = "part if unit.shard.grad is None else unit.shard.grad + part"
LAB7 = Answers(
    15,
    "SW011",
    ("ahead", 1),
    {"no fewer bytes": True, "no memory": False, "waited for": False},
    {
        (1, "start"): [
            (GUARD7, "        if self.is_full:\n            return\n", "a second gather"),
            ("is_full or self.", "", "gathers a unit that is full"),
            (START7, START7.replace(", async_op=True", ""), "does not wait"),
            (START7, START7.replace("self.work = ", ""), "`work` is None after"),
            (START7, START7 + "        self.is_full = True\n", "calls itself full"),
            (ROOM7, "", "out of bounds for storage"),
        ],
        (2, "gather"): [
            (WAIT7, "", "returns before its message has come"),
            (DONE7, "            self.is_full = True\n", "`work` is still set"),
            (DONE7, "            self.work = None\n", "does not know that it is full"),
            (NEXT7, "", "calls trainer.prefetch with nothing"),
            (WAIT7 + DONE7 + NEXT7, WAIT7 + DONE7 + "    " + NEXT7, "prefetch on every call"),
            (NEXT7, NEXT7.replace("index", "index + 1"), "with [1], [0] expected"),
            (BEGIN7, "        super().gather()\n", "begins another message"),
        ],
        (3, "order"): [
            (BOUND7, "            if following < len(self.units):\n", "unit 5 is full"),
            (BOUND7, "            if True:\n", "list index out of range"),
            (INDEX7, "            following = index\n", "0 of 12 gathers run beside"),
            (AHEAD7, "        for distance in (1,):\n", "with ahead=0 10 gathers begin"),
        ],
        (3, "full"): [
            (AHEAD7, AHEAD7.replace("+ 1", "+ 2 * (self.ahead > 0)"), "units full"),
        ],
        (4, "bucket"): [
            (INPUTS7, "list(torch.cat(fulls).chunk(num_ranks))", "is cut without regard to units"),
            (REDUCE7, REDUCE7.replace(", async_op=True", ""), "has ended when"),
            (REDUCE7, REDUCE7.replace(", mine\n", "\n"), "return (work, output)"),
            (INPUTS7, INPUTS7 + "[::-1]", "is another rank's"),
            (INPUTS7, INPUTS7.replace("in fulls", "in fulls[::-1]"), "another order"),
            (INPUTS7, INPUTS7.replace("[r] for", "[r] / num_ranks for"), "is the mean already"),
            (
                REDUCE7,
                "        for full in fulls:\n"
                "            work = dist.all_reduce(full, async_op=True)\n"
                "        return work, mine\n",
                "3 collectives for one bucket",
            ),
        ],
        (5, "finish"): [
            (OLDEST7, OLDEST7.replace("(0)", "()"), "waited for: newest, second"),
            ("            work.wait()\n", "", "waited for: none"),
            ("            mine /= dist.get_world_size()\n", "", "is the sum, the"),
            (GRAD7, "part", "is that of the last reduction alone"),
            (" > allowed:", " > 0:", "nothing overlaps"),
            (
                PARTS7,
                "            parts = mine.split(units[0].shard.numel())\n",
                "The size of tensor a (1040)",
            ),
        ],
    },
    rough_rows=("peak",),
)
ANSWERS = {0: LAB0, 6: LAB6, 7: LAB7, 8: LAB8, 9: LAB9}

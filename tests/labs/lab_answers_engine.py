"""Right and typical wrong answers of labs 11 and 12."""

from wrong_answers import Answers

REST11 = "    rest, part = divmod(rank, tp)\n    stage, replica = divmod(rest, dp)\n"
PLACE11 = "    return stage, replica, part\n"
CLONE11 = "        total = grad.clone()\n"
COPY11 = "        dist.all_reduce(total, group=ctx.group)\n        return total, None\n"
SUM11 = "        total = x.clone()\n        dist.all_reduce(total, group=group)\n"
MEAN11 = """            dist.all_reduce(p.grad, group=group)
            p.grad /= dist.get_world_size(group)
"""
RECV11 = "            dist.recv(x, before)\n"
LEAF11 = "            x.requires_grad_()\n"
LOSS11 = "            y = loss_of(y, target) / len(micro)\n"
BACK11 = "            y.backward(grad)\n"
ENDS11 = "    for x, y in ends:\n"
SEND11 = "            dist.send(x.grad, before)\n"
LAB11 = Answers(
    19,
    "SW014",
    ("take", "zero3"),
    {"over all ranks": False, "with the batch": True, "data parallelism": False},
    {
        (1, "places"): [
            (PLACE11, "    return part, replica, stage\n", "the stage runs fastest here"),
            (
                REST11,
                "    rest, stage = divmod(rank, pp)\n    part, replica = divmod(rest, dp)\n",
                "the stage runs fastest here",
            ),
            (
                REST11,
                "    rest, replica = divmod(rank, dp)\n    stage, part = divmod(rest, tp)\n",
                "(0, 1, 0), (0, 0, 1) expected",
            ),
            (
                REST11,
                "    stage, replica, part = rank // (dp * tp), rank // tp, rank % tp\n",
                "the replica goes on past dp",
            ),
            (PLACE11, "    return rest, part\n", "three numbers are expected"),
        ],
        (2, "copy"): [
            (COPY11, "        return total, None\n", "this rank's part alone"),
            (COPY11, COPY11.replace("total, None", "total / 2, None"), "is the mean"),
            (COPY11, COPY11.replace(", group=ctx.group", ""), "over all ranks, not"),
            (CLONE11, "        total = grad\n", "changes the gradient that it was given"),
            (COPY11, COPY11.replace("total, None", "total"), "incorrect number of grad"),
        ],
        (3, "sum"): [
            (SUM11, "        total = x.clone()\n", "is this rank's summand alone"),
            (SUM11, SUM11 + "        total /= 2\n", "is the mean over the group"),
            (SUM11, SUM11.replace(", group=group", ""), "over all ranks, not over the"),
            (SUM11, SUM11.replace("x.clone()", "x.detach()"), "Sum changes its input"),
            ("        return total\n", "        print()\n", "Sum returns no tensor"),
        ],
        (4, "mean"): [
            (MEAN11, MEAN11.split("\n")[0] + "\n", "is the sum, the mean was asked for"),
            (
                MEAN11,
                MEAN11.replace("size(group)", "size()"),
                "is exactly 0.500 x: divide by the ranks with other batches only",
            ),
            (
                MEAN11,
                MEAN11.replace(", group=group", "").replace("size(group)", "size()"),
                "parts of a tensor are not averaged",
            ),
            (MEAN11, "            pass\n", "is this rank's alone"),
            ("grad, group=group", "grad", "is the sum over all ranks, divided by dp"),
        ],
        (5, "pipeline"): [
            (LOSS11, LOSS11.replace(" / len(micro)", ""), "divide each micro-batch's"),
            (RECV11, "            pass\n", "0 inputs received from rank 0"),
            (LEAF11, "", "does its input require a gradient?"),
            (
                BACK11,
                "            y.backward(torch.ones_like(y))\n",
                "does not use the gradient that came",
            ),
            (ENDS11, "    for x, y in ends[::-1]:\n", "came in another order"),
            (SEND11, SEND11.replace("x.grad", "2 * x.grad"), "is exactly 2.000 x"),
            (ENDS11, "    for x, y in ends[-1:]:\n", "1 gradients received from"),
        ],
    },
    rough_rows=(),
)
MAKE12 = "    growing.mkdir(exist_ok=True)\n"
OPEN12 = '    with open(growing / f"rank{rank}.pt", "wb") as file:\n'
SYNC12 = """        file.flush()
        os.fsync(file.fileno())
"""
COMMIT12 = """    dist.barrier()
    if rank == 0:
        growing.rename(whole)
    dist.barrier()
"""
GLOB12 = '    found = sorted(folder.glob("step-*"))\n'
LAST12 = "    return found[-1] if found else None\n"
RANDOM12 = '        "random": torch.get_rng_state(),\n'
FIRST12 = '        "first": adam["exp_avg"],\n'
FLAT12 = "    flat = torch.zeros(padded(numel, num_ranks))\n"
FILL12 = "    flat[:numel] = torch.cat(slices)[:numel]\n"
CUT12 = "    return flat.chunk(num_ranks)[rank].clone()\n"
COPY12 = '    trainer.shard.data.copy_(mine["values"])\n'
BACK12 = "    gather_slices(trainer.flat.values, trainer.shard.data)\n"
SET12 = '        torch.set_rng_state(states[rank]["random"])\n'
NOT_AS_BEFORE = "the values or the random generator are not as they were"
LAB12 = Answers(
    21,
    "SW051",
    ("minutes", 20),
    {"same losses": False, "can be used": False, "saved it": True},
    {
        (1, "torn"): [
            (COMMIT12, COMMIT12[len("    dist.barrier()\n") :], "rename when all ranks"),
        ],
        (1, "save"): [
            (SYNC12, "", "the file is not synced"),
            (COMMIT12, "    dist.barrier()\n", "checkpoints after step 5: []"),
            (COMMIT12, COMMIT12[: -len("    dist.barrier()\n")], "before rank 0 had renamed"),
            (OPEN12, OPEN12.replace("{rank}", ""), "has ['rank.pt']"),
            (
                "        growing.rename(whole)\n",
                "        import shutil\n\n        shutil.copytree(growing, whole)\n",
                "rename the folder, do not copy it",
            ),
            (MAKE12, "    growing.mkdir()\n", "File exists"),
        ],
        (2, "newest"): [
            ("step-*", "*", "step-001000 is the highest: that is no checkpoint"),
            (LAST12, "    return found[0] if found else None\n", "step-000020"),
            (LAST12, "    return found[-1]\n", "list index out of range"),
            (
                GLOB12,
                '    found = sorted(folder.glob("step-*"), key=lambda p: p.stat().st_mtime)\n',
                "and not the time of the file",
            ),
            (
                GLOB12,
                '    found = sorted(folder.glob("*-*"), key=lambda path: path.name[-6:])\n',
                "a save that did not end is no checkpoint",
            ),
        ],
        (3, "state"): [
            (FIRST12, "", '"first" is missing in the state'),
            (RANDOM12, "", '"random" is missing in the state'),
            ('adam["exp_avg"]', 'adam["exp_avg_sq"]', "are the same"),
            (
                FIRST12 + '        "second": adam["exp_avg_sq"],\n',
                '        "first": adam["exp_avg_sq"],\n        "second": adam["exp_avg"],\n',
                "is it the first moment?",
            ),
            ("shard.data.clone()", "flat.values", "34764 elements, 17382 expected"),
            ("trainer.shard.data.clone()", "trainer.shard.data", "torch.save writes them all"),
            ('"count": adam["step"]', '"count": adam["step"] + 1', "is 5 after 4 steps"),
        ],
        (4, "recut"): [
            (FILL12, "    flat = torch.cat(slices)\n", "only made the old slices"),
            (CUT12, CUT12.replace("[rank]", "[0]"), "is that of rank 0"),
            (CUT12, CUT12.replace(".clone()", ""), "is a view of all elements"),
            (CUT12, "    return slices[rank].clone()\n", "has 3 elements, 4 expected"),
            (FLAT12, FLAT12.replace("padded(numel, num_ranks)", "numel"), "elements"),
        ],
        (5, "losses"): [
            (COPY12, "", NOT_AS_BEFORE),
            (BACK12, "", NOT_AS_BEFORE),
            (SET12, "        pass\n", NOT_AS_BEFORE),
            (SET12, SET12.replace("[rank]", "[0]"), "rank 1, step 5: the loss is"),
            (
                '"exp_avg": mine["first"]',
                '"exp_avg": torch.zeros_like(mine["first"])',
                "the moments, or their count are not as they were",
            ),
        ],
        (5, "ranks"): [
            (
                '        "exp_avg": mine["first"],\n',
                '        "exp_avg": states[rank % len(states)]["first"],\n',
                "17382 elements, 11588 expected",
            ),
        ],
    },
    rough_rows=(),
)
ANSWERS = {11: LAB11, 12: LAB12}

"""Right and typical wrong answers of labs 11 and 12."""

from wrong_answers import Answers, Wrong

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
COUNT12 = '        "step": states[0]["count"],\n'
SET12 = '        torch.set_rng_state(states[rank]["random"])\n'
NOT_AS_BEFORE = "the values or the random generator are not as they were"
LAB12 = Answers(
    {
        '"line": None': '"line": 21',
        '"finding": None': '"finding": "SW051"',
        '"minutes": None': '"minutes": 20',
        'same losses": None': 'same losses": False',
        'can be used": None': 'can be used": False',
        'saved it": None': 'saved it": False',
    },
    [
        Wrong(
            1, "torn", COMMIT12, COMMIT12[len("    dist.barrier()\n") :], "rename when all ranks"
        ),
        Wrong(1, "save", SYNC12, "", "the file is not synced"),
        Wrong(1, "save", COMMIT12, "    dist.barrier()\n", "checkpoints after step 5: []"),
        Wrong(1, "save", OPEN12, OPEN12.replace("{rank}", ""), "has ['rank.pt']"),
        Wrong(
            1,
            "save",
            "        growing.rename(whole)\n",
            "        import shutil\n\n        shutil.copytree(growing, whole)\n",
            "rename the folder, do not copy it",
        ),
        Wrong(1, "save", MAKE12, "    growing.mkdir()\n", "File exists"),
        Wrong(
            2,
            "newest",
            GLOB12,
            '    found = sorted(folder.glob("*"))\n',
            "step-001000 is the highest: that is no checkpoint",
        ),
        Wrong(2, "newest", LAST12, "    return found[0] if found else None\n", "step-000020"),
        Wrong(2, "newest", LAST12, "    return found[-1]\n", "list index out of range"),
        Wrong(
            2,
            "newest",
            GLOB12,
            '    found = sorted(folder.glob("step-*"), key=lambda path: path.stat().st_mtime)\n',
            "and not the time of the file",
        ),
        Wrong(
            2,
            "newest",
            GLOB12,
            '    found = sorted(folder.glob("*-*"), key=lambda path: path.name[-6:])\n',
            "a save that did not end is no checkpoint",
        ),
        Wrong(3, "state", FIRST12, "", '"first" is missing in the state'),
        Wrong(3, "state", RANDOM12, "", '"random" is missing in the state'),
        Wrong(3, "state", 'adam["exp_avg"]', 'adam["exp_avg_sq"]', "are the same"),
        Wrong(
            3,
            "state",
            FIRST12 + '        "second": adam["exp_avg_sq"],\n',
            '        "first": adam["exp_avg_sq"],\n        "second": adam["exp_avg"],\n',
            "is it the first moment?",
        ),
        Wrong(
            3,
            "state",
            '"values": trainer.shard.data,',
            '"values": trainer.flat.values,',
            "34764 elements, 17382 expected",
        ),
        Wrong(
            3, "state", '"count": adam["step"]', '"count": adam["step"] + 1', "is 5 after 4 steps"
        ),
        Wrong(4, "recut", FILL12, "    flat = torch.cat(slices)\n", "only made the old slices"),
        Wrong(4, "recut", CUT12, CUT12.replace("[rank]", "[0]"), "is that of rank 0"),
        Wrong(4, "recut", CUT12, CUT12.replace(".clone()", ""), "is a view of all elements"),
        Wrong(4, "recut", CUT12, "    return slices[rank].clone()\n", "has 3 elements, 4 expected"),
        Wrong(4, "recut", FLAT12, FLAT12.replace("padded(numel, num_ranks)", "numel"), "elements"),
        Wrong(
            4,
            "recut",
            FLAT12 + FILL12,
            "    flat = torch.cat(slices)[: padded(numel, num_ranks)]\n",
            "that only made the old slices equal",
        ),
        Wrong(5, "losses", COPY12, "", NOT_AS_BEFORE),
        Wrong(5, "losses", BACK12, "", NOT_AS_BEFORE),
        Wrong(5, "losses", SET12, "        pass\n", NOT_AS_BEFORE),
        Wrong(5, "losses", COUNT12, '        "step": torch.tensor(0.0),\n', "step 6: the loss is"),
        Wrong(
            5,
            "losses",
            '"exp_avg": mine["first"]',
            '"exp_avg": torch.zeros_like(mine["first"])',
            "the moments, or their count are not as they were",
        ),
        Wrong(
            5,
            "ranks",
            '        "exp_avg": mine["first"],\n',
            '        "exp_avg": states[rank % len(states)]["first"],\n',
            "17382 elements, 11588 expected",
        ),
    ],
    rough_rows=(),
)
ANSWERS = {12: LAB12}

"""Trials of the campaigns `damage` and `reshard`: real ranks save, others load and count."""

import pickle
import shutil
import tempfile
from pathlib import Path

import shardwise
import test_damage
from stamped import build, count, stamp
from worlds import World, in_a_world

LAYOUTS = ("rows", "flat")
WAYS = (*["bit"] * 12, *test_damage.OTHER_WAYS)


class Damages:
    """Damage after damage in a world of two ranks for each layout, checked as in the tests."""

    def __init__(self, folder):
        self._folder = folder
        self._worlds = {}

    def run(self, number, rng):
        """Return how it was found; raise if it was not."""
        layout, way, seed = rng.choice(LAYOUTS), rng.choice(WAYS), rng.randrange(1 << 32)
        world = self._worlds.pop(layout, None) or self._open(layout)
        try:
            world.go(f"{way} {seed}")
            world.wait("row")
            rows = [pickle.loads(bytes.fromhex(m["row"])) for m in world.all_of("row")]
            for said in world.said:
                said.clear()
            test_damage.check_all([[row] for row in rows])
        except BaseException as error:
            error.add_note(f"{layout}: {way}, seed {seed}")
            world.close()
            raise
        self._worlds[layout] = world
        return "harmless to a load" if rows[0]["damage"].harmless else f"{way}: found and named"

    def _open(self, layout):
        folder = Path(tempfile.mkdtemp(dir=self._folder))

        def body(rank, say, hear):
            patient = test_damage.Patient(rank, folder, layout)
            while True:
                way, seed = hear().split()
                say("row", row=pickle.dumps(patient.meet(way, int(seed))).hex())

        return World(2, body)

    def close(self):
        """End the worlds."""
        for world in self._worlds.values():
            world.close()


class Reshards:
    """Save with some stage, layout and number of ranks, load with others; count the elements."""

    def __init__(self, folder):
        self._folder = folder / "run"

    def run(self, number, rng):
        """Return from how many ranks to how many it went; raise if an element is wrong."""
        ways = [(rng.randint(0, 3), rng.choice(("rows", "flat")), rng.randint(1, 4)) for _ in "ab"]
        width, depth = rng.randint(1, 40), rng.randint(1, 3)
        folder = self._folder

        def body(way, saving):
            def of_rank(rank, say, hear):
                model, optimizer = build(way[0], way[1], width, depth)
                stamp(model, optimizer, "A" if saving else "Z")
                if saving:
                    shardwise.save(folder, model, optimizer, step=1, extra={"rank": rank})
                    return say("done")
                loaded = shardwise.load(folder, model, optimizer)
                assert loaded.step == 1 and loaded.num_ranks_saved == ways[0][2]
                say("done", found=sorted(count(model, optimizer)), extra=loaded.extra["rank"])

            return of_rank

        try:
            in_a_world(ways[0][2], body(ways[0], saving=True))
            answers = in_a_world(ways[1][2], body(ways[1], saving=False))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        for rank, answer in enumerate(answers):
            assert answer["found"] == ["A"] and answer["extra"] == rank % ways[0][2], (
                ways,
                answers,
            )
        return f"{ways[0][2]} -> {ways[1][2]} ranks, right"

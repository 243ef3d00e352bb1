"""Kill runs that keep copies in memory, damage what they left, start them again; a program.

    python tests/campaigns/memory_copies.py --trials 45            # kills
    python tests/campaigns/memory_copies.py --trials 24 --damage   # kills, then damage
    python tests/campaigns/memory_copies.py --damage --only 17     # one trial again

Two ranks train, copy every step to memory and save one step to disk. All are killed at a moment
drawn from the trial's number. With --damage something then stands in the place of one or two files
or folders in memory: another folder, an empty or truncated file, a link, a socket, a flipped bit,
or nothing. The run is started again. It must load the newest state that is whole, to the bit, and
warn of every newer one with its reason. Verdicts are counted; a violation makes the status 1.
"""

import argparse
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [
    str(HERE.parents[1] / "src"),
    str(HERE.parent),
    str(HERE.parent / "checkpoint"),
    str(HERE),
]

import test_memory as memory  # noqa: E402
from ranks import HANG_S, run_ranks, start_ranks  # noqa: E402
from saving import differences, take_step, truth_of, until  # noqa: E402
from shardwise.checkpoint.files import Files  # noqa: E402
from shardwise.checkpoint.folder import step_name  # noqa: E402
from shardwise.checkpoint.verify import verify  # noqa: E402

STEPS, SAVED = 12, 2


def train(rank, num_ranks, root, says=True):
    """Train; copy each step, and note which copies this rank knew to be whole."""
    truths, noted = [], root / f"whole{rank}"
    with suppress(memory.Crash), memory.run_of(rank, root) as (run, checkpoints):
        for step in range(1, STEPS + 1):
            take_step(run, step, norm=False)
            truths.append(truth_of(run))
            if step == SAVED:
                checkpoints.save(step, extra=run.extra, wait=True)
            else:
                saving = checkpoints.copy_to_memory(step, extra=run.extra)
                checkpoints.finish()
                assert saving is not None and saving.error is None
            if says:
                with noted.open("a") as out:
                    print(step, file=out)
        while says:  # until it is killed
            time.sleep(0.1)
        raise memory.Crash
    return truths


def resume(rank, num_ranks, root):
    """Load in a new run; return the step, whether from memory, the state, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = memory.resume(rank, num_ranks, root)
    return *found, [str(each.message) for each in caught]


def whole_in_memory(root):
    """Return the steps of copies in memory whose every byte is right."""
    folders = memory.files_of(root, 0, "step-*")
    return {int(path.name[5:13]) for path in folders if path.is_dir() and is_whole(path)}


def is_whole(path):
    with suppress(Exception):
        return verify(Files(), path).ok
    return False


def stand(path, kind, draw):
    """Put something in the place of a file or a folder."""
    if kind in ("truncated", "flipped") and path.is_file() and path.stat().st_size > 9:
        data = bytearray(path.read_bytes())
        at = draw.randrange(len(data))
        data[at] ^= 1 << draw.randrange(8)
        path.write_bytes(data[:at] if kind == "truncated" else data)
        return
    away = path.with_name(f"away-{path.name}")
    path.rename(away)
    if kind == "folder":
        path.mkdir()
        if draw.random() < 0.5:
            (path / "notes.txt").write_text("mine")
    elif kind == "link":
        path.symlink_to(away)
        return
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # its name may not be long
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(path.name)
        finally:
            os.chdir(here)
    elif kind != "nothing":
        path.write_bytes(b"")
    shutil.rmtree(away) if away.is_dir() else away.unlink()


KINDS = ("folder", "empty", "truncated", "flipped", "link", "socket", "nothing")


def trial(number, options, folder, truths):
    """Return a verdict. **Raises** AssertionError for a violation."""
    draw = random.Random(f"{options.seed}/{number}")
    root = folder / str(number)
    root.mkdir()
    last = draw.randint(1, STEPS - 1)
    killed = start_ranks(train, 2, root)
    until(lambda: noted_by(root) >= last)
    time.sleep(draw.uniform(0, options.window_ms / 1e3))
    killed.signal_all(signal.SIGKILL)
    killed.wait(HANG_S)
    what, noted = "", noted_by(root)
    if options.damage:
        paths = memory.files_of(root, 0, "step-*")
        paths += [path for each in paths for path in sorted(each.iterdir())]
        for path in draw.sample(paths, min(len(paths), draw.randint(1, 2))):
            if path.exists() and path.parent.is_dir():
                kind = draw.choice(KINDS)
                what += f" {kind} {path.relative_to(path.parents[1])}"
                stand(path, kind, draw)
    whole = whole_in_memory(root)
    on_disk = {SAVED} if (root / "run" / step_name(SAVED) / "manifest.json").exists() else set()
    in_memory = sorted(path.name for path in memory.files_of(root, 0, "*step-*"))
    about = f"noted {noted}, whole {sorted(whole)}, in memory {in_memory},{what}"
    try:
        results = run_ranks(resume, 2, root)
    except Exception as error:
        if not whole | on_disk:
            assert "no checkpoint can be used" in str(error), (about, str(error)[-600:])
            return "no state was whole, and the load says so"
        error.add_note(about)
        raise
    step, was_memory, _, told = results[0]
    for rank, (found, _, truth, _) in enumerate(results):
        assert found == step and (found or not (whole | on_disk)), (about, found, told)
        if found is not None:
            assert not differences(truth, truths[rank][found - 1]), (about, found)
    newest = max(whole | on_disk, default=None)
    assert step == newest, f"{about}: loaded {step}, told {told}"
    left = [int(name.split("step-")[1][:8]) for name in in_memory]
    newer = {each for each in [*left, noted] if each > (step or 0)}
    for each in newer:
        assert any(str(each) in text for text in told), f"{about}: loaded {step}, told {told}"
    if step is None:
        return "nothing was whole yet"
    where = "memory" if was_memory else "disk"
    if step < noted:
        return f"an older one from {where}, told"
    return f"the last that was noted, or a newer one, from {where}" + (", told" * bool(newer))


def noted_by(root):
    """Return the last step that every rank knew to be safe."""
    steps = [0]
    for rank in range(2):
        with suppress(OSError):
            steps.append(len((root / f"whole{rank}").read_text().splitlines()))
    return min(steps[1:], default=0) if len(steps) == 3 else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=45)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this one trial again")
    parser.add_argument("--damage", action="store_true", help="damage memory after the kill")
    parser.add_argument("--window-ms", type=float, default=120, help="of the moment of the kill")
    options = parser.parse_args()
    verdicts = Counter()
    memory_root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory_root) as name:
        folder = Path(name)
        (folder / "quiet").mkdir()
        truths = run_ranks(train, 2, folder / "quiet", says=False)
        for number in range(options.trials) if options.only is None else [options.only]:
            try:
                verdicts[trial(number, options, folder, truths)] += 1
            except Exception as error:
                verdicts["VIOLATION"] += 1
                print(f"--seed {options.seed} --only {number}:", file=sys.stderr)
                print("".join(traceback.format_exception(error))[-3000:], file=sys.stderr)
            shutil.rmtree(folder / str(number), ignore_errors=True)
    for verdict, count in verdicts.most_common():
        print(f"{count:4} {verdict}")
    return 1 if verdicts["VIOLATION"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""Time the planning of a save and of a load for ten thousand ranks; a program, not a test.

    python tests/campaigns/planning.py [--ranks 10000] [--layout rows|flat] [--readers 7000]

It prints the CPU seconds of each part; nothing is asserted, since machines differ. The goal is two
seconds for all that one rank does before it moves bytes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import TypeVar

HERE = Path(__file__).parent.parent
sys.path[:0] = [str(HERE), str(HERE / "checkpoint")]

from scaling import llama_shapes, manifest_of, part_of, wanted_by  # noqa: E402 - see above
from shardwise.checkpoint.files import Entry, Files  # noqa: E402
from shardwise.checkpoint.manifest import (  # noqa: E402  # noqa: E402
    MANIFEST,
    IndexRow,
    file_name,
    index_name,
    parse_manifest,
    seal,
)
from shardwise.checkpoint.read import Checkpoint  # noqa: E402
from shardwise.checkpoint.verify import check_quickly  # noqa: E402
from shardwise.checkpoint.write import index_row, write_rank  # noqa: E402

T = TypeVar("T")


class Listed(Files):
    """A folder that lists the files of all ranks, though only a few of them are there."""

    def __init__(self, manifest):
        self._entries = []
        for rank, row in enumerate(manifest.ranks):
            names = [(index_name(rank), row.index_bytes)]
            names += [
                (file_name(rank, n), row.file_bytes if n == 0 else 0) for n in range(row.num_files)
            ]
            self._entries += [Entry(name, "file", size) for name, size in names]
        self._entries.append(Entry(MANIFEST, "file", 1))

    def list(self, path):
        return self._entries


def timed(what, work):
    started_s = time.process_time()
    result = work()
    print(f"  {what:52} {time.process_time() - started_s:7.3f} s", flush=True)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=10_000)
    parser.add_argument("--readers", type=int, default=7_000)
    parser.add_argument("--layout", default="rows")
    asked = parser.parse_args()
    units = llama_shapes()
    print(f"{asked.ranks} ranks, {sum(map(len, units))} parameters, {asked.layout}; save:")
    manifest = timed("describe all tensors", lambda: manifest_of(units, asked.ranks, asked.layout))
    timed("compare with other ranks", lambda: manifest.model_dump_json(exclude={"ranks"}))
    boxes = timed("cut this rank's boxes", lambda: list(manifest.all_boxes(asked.ranks // 2)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        readers = asked.readers
        reader = readers // 2
        rows = [
            IndexRow(index_bytes=1, digest="0" * 32, num_files=3, file_bytes=10**9)
        ] * asked.ranks
        whole = manifest.model_copy(update={"ranks": tuple(rows)})
        data = timed("write the manifest (rank 0)", lambda: seal(whole))
        print(f"  {len(boxes)} boxes, manifest {len(data) / 2**20:.2f} MiB; load:")
        owners = owners_for(manifest, reader, readers)
        for rank in owners:  # only what the reader needs is there
            part = part_of(rank)
            zeros = memoryview(bytes(1 << 28))
            part = type(part)(rank, lambda _, box, z=zeros: z[: 4 * (box.hi - box.lo)], (), {})
            rows[rank] = index_row(write_rank(Files(), folder, manifest, part))
        whole = manifest.model_copy(update={"ranks": tuple(rows)})
        (folder / MANIFEST).write_bytes(seal(whole))
        timed("check all sizes (rank 0)", lambda: check_quickly(Listed(whole), folder))
        data = (folder / MANIFEST).read_bytes()
        back = timed("read the manifest", lambda: parse_manifest(data, "manifest"))
        checkpoint = timed("number its tensors", lambda: Checkpoint(Files(), folder, back))
        timed("read the indexes it needs", lambda: list(map(checkpoint.extents_of, owners)))
        wanted = list(wanted_by(manifest, reader, readers))
        memory = memoryview(bytearray(1 << 28))
        chunks = timed("plan what is read", lambda: plan(checkpoint, wanted, memory))
        print(f"  {chunks} chunks in the files of {len(owners)} ranks: {owners}")


def owners_for(manifest, reader, readers):
    """Return the ranks of which a reading rank reads, and rank 0."""
    from shardwise.layout.boxes import owners_of

    found = {0}
    for number, _, lo, hi in wanted_by(manifest, reader, readers):
        row = manifest.tensors[number]
        if row.layout is not None:
            layout = manifest.built_layouts[row.layout]
            found |= {
                manifest.writer_of(number, o.rank)
                for o in owners_of(layout, row.index or 0, lo, hi)
            }
    return sorted(found)


def plan(checkpoint, wanted, memory):
    return sum(
        len(checkpoint.chunks(info, lo, hi, memory[: 4 * (hi - lo)])) for _, info, lo, hi in wanted
    )


if __name__ == "__main__":
    main()

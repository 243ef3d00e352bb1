"""Models whose ranks hold pieces over several meshes, made by hand: their tables, and the truth.

A world is a number of ranks and some units. A unit's two tensors are cut into one grid; each cell
of it is held by the ranks of a mesh of its own, some cells by a second mesh too. Each element is a
random one, so that nothing passes for anything else.
"""

from dataclasses import dataclass, field
from itertools import accumulate, pairwise, product

import torch
from hypothesis import strategies as st
from torch import Tensor

from disk import Lockstep
from shardwise.checkpoint.assemble import assemble
from shardwise.checkpoint.container import dtype_name
from shardwise.checkpoint.manifest import LayoutRow, OptimizerRow, TensorRow
from shardwise.checkpoint.source import TensorInfo
from shardwise.checkpoint.state import Item, Ranks, Table
from shardwise.checkpoint.write import write_checkpoint
from shardwise.layout.boxes import Region
from shardwise.layout.segments import build_layout

DTYPES = (torch.float32, torch.int64, torch.bfloat16, torch.uint8, torch.bool, torch.complex64)


@dataclass(frozen=True)
class Unit:
    """Two tensors of one shape, in one grid: each cell with the meshes that hold it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    cells: tuple[tuple[Region, tuple[Ranks, ...]], ...]


@dataclass(frozen=True)
class World:
    """Some units over some ranks; ``whole`` are ranks that have a plain tensor of their own."""

    num_ranks: int
    units: tuple[Unit, ...]
    whole: tuple[int, ...] = ()
    seed: int = 0
    truth: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self):
        """Make all elements."""
        random = torch.Generator().manual_seed(self.seed)
        for number, unit in enumerate(self.units):
            for key in (f"u{number}.a", f"u{number}.b"):
                for name in (key, f"optim.state.{key}.exp_avg", f"{key}.buffer"):
                    width = unit.dtype.itemsize
                    high = 2 if unit.dtype == torch.bool else 256
                    size = (torch.Size(unit.shape).numel() * width,)
                    made = torch.randint(high, size, generator=random, dtype=torch.uint8)
                    self.truth[name] = made.view(unit.dtype).view(unit.shape)

    def table_of(self, rank):
        """Return what one rank has."""
        meshes = [((rank,),)]
        layouts = []
        sharded = []
        whole = []
        for number, unit in enumerate(self.units):
            for region, held in unit.cells:
                for mesh in held:
                    if any(rank in row for row in mesh):
                        if mesh not in meshes:
                            meshes.append(mesh)
                        layout = LayoutRow(
                            kind=unit.kind,
                            shapes=(region.shape, region.shape),
                            mesh=meshes.index(mesh),
                        )
                        layouts.append(layout)
                        sharded += self._items(number, region, mesh, rank, len(layouts) - 1)
                        if len(unit.cells) > 1:
                            name = f"u{number}.a"
                            data = self.truth[f"{name}.buffer"][slices(region)]
                            info = self._info("buffer", f"{name}.buffer")
                            whole.append(
                                Item(
                                    TensorRow.of_piece(info, region), data.contiguous().reshape(-1)
                                )
                            )
        for n, who in enumerate(self.whole):
            if who == rank or n % 2:
                made = torch.arange(5) + (10 * rank if n % 3 == 0 else 0)
                row = TensorRow(kind="buffer", name=f"w{n}", dtype="I64", shape=(5,))
                whole.append(Item(row, made))
        names = [i.info.name for i in sharded if i.info.kind == "param"]
        groups = [{"params": names, "lr": 0.5}]
        optimizer = OptimizerRow(class_name="Adam", groups=groups, state={})
        return Table(
            3,
            tuple(meshes),
            tuple(layouts),
            tuple(sharded),
            tuple(whole),
            {},
            optimizer,
            (),
            {"extra": {"rank": rank}},
            is_uniform=False,
        )

    def _items(self, number, region, mesh, rank, layout):
        unit = self.units[number]
        (shard,) = {row.index(rank) for row in mesh if rank in row}
        cut = build_layout(unit.kind, [region.shape] * 2, len(mesh[0]))
        for state, (index, letter) in product(("", "exp_avg"), enumerate("ab")):
            info = self._info("optimizer" if state else "param", f"u{number}.{letter}", state)
            held = cut.piece(index, shard)
            data = self.truth[info.key][slices(region)].contiguous().reshape(-1)[held.lo : held.hi]
            yield Item(TensorRow.of_piece(info, region, layout, index), data, held.lo)

    def _info(self, kind, name, state=""):
        key = f"optim.state.{name}.{state}" if state else name
        tensor = self.truth[key]
        return TensorInfo(kind, name, dtype_name(tensor.dtype, key), tuple(tensor.shape), state)

    def expected(self):
        """Return all tensors that a reader of rank 0's own state must find."""
        cut = {f"u{n}.a.buffer" for n, unit in enumerate(self.units) if len(unit.cells) > 1}
        found = {k: t for k, t in self.truth.items() if not k.endswith("buffer") or k in cut}
        for n, who in enumerate(self.whole):
            first = 0 if n % 2 else who
            found[f"w{n}"] = torch.arange(5) + (10 * first if n % 3 == 0 else 0)
        return found


def slices(region):
    return tuple(slice(a, a + n) for a, n in zip(*region, strict=True))


def grid(shape, cuts):
    """Return the cells between these cuts of each dim, the ends left out."""
    sides = []
    for size, inner in zip(shape, cuts, strict=True):
        ends = [0, *sorted(inner), size]
        sides.append([(lo, hi - lo) for lo, hi in pairwise(ends)])
    return [
        Region(tuple(lo for lo, _ in cell), tuple(n for _, n in cell)) for cell in product(*sides)
    ]


@st.composite
def regions(draw, shape):
    """Return any box of a tensor."""
    at = tuple(draw(st.integers(0, size)) for size in shape)
    return Region(at, tuple(draw(st.integers(0, n - a)) for a, n in zip(at, shape, strict=True)))


@st.composite
def worlds(draw, max_ranks=8):
    num_ranks = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 8) if n <= max_ranks]))
    units = []
    for _ in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
        if draw(st.integers(0, 9)) == 0:
            shape = (*shape[:-1], 0)
        cut = draw(st.lists(st.integers(0, len(shape) - 1), max_size=2, unique=True))
        cuts = [
            draw(st.lists(st.integers(0, n), min_size=1, max_size=2)) if d in cut else []
            for d, n in enumerate(shape)
        ]
        cells = grid(shape, cuts)
        if len(cells) > num_ranks:
            cells = grid(shape, [[] for _ in shape])
        ranks = draw(st.permutations(range(num_ranks)))
        begins = list(accumulate(_sizes(draw, len(cells), num_ranks), initial=0))
        held = []
        for cell, (lo, hi) in zip(cells, pairwise(begins), strict=True):
            held.append((cell, (_mesh(draw, ranks[lo:hi]),)))
        rest = ranks[begins[-1] :]
        if rest and draw(st.booleans()):
            held[0] = (held[0][0], (*held[0][1], _mesh(draw, rest)))
        dtype = draw(st.sampled_from(DTYPES))
        units.append(Unit(shape, dtype, draw(st.sampled_from(["rows", "flat"])), tuple(held)))
    whole = draw(st.lists(st.integers(0, num_ranks - 1), max_size=4))
    return World(num_ranks, tuple(units), tuple(whole), draw(st.integers(0, 99)))


def _sizes(draw, cells, num_ranks):
    """Return how many ranks hold each cell."""
    sizes, left = [], num_ranks
    for behind in range(cells - 1, -1, -1):
        sizes.append(draw(st.integers(1, min(6, left - behind))))
        left -= sizes[-1]
    return sizes


def _mesh(draw, ranks):
    """Return a mesh of these ranks: all shards, all replicas, or two replicas."""
    rows = draw(st.sampled_from([n for n in (1, 2, len(ranks)) if len(ranks) % n == 0]))
    size = len(ranks) // rows
    return tuple(tuple(ranks[r * size : (r + 1) * size]) for r in range(rows))


def save_world(files, folder, tables):
    """Save as many ranks, in turns; return what each of them returned or raised."""

    def body(control):
        manifest, part = assemble(control, tables[control.rank], "run", 3)
        return write_checkpoint(files, control, folder, bytes(4), manifest, part)

    return Lockstep().run(len(tables), body)

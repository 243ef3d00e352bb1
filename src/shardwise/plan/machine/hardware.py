"""Accelerators, links, hosts, nodes and clusters; the catalogue finds them by name.

Bandwidths are one way and decimal (1 GB/s = 1e9 bytes per second), as datasheets print them;
memory is in bytes. Figures that are not known are absent, not guessed.

``find_accelerator("h100")``, ``find_link("NVLink 4")``, and ``make_cluster("H100", 64)``, which
fills in what such machines are usually built with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache, cached_property
from typing import TypeVar

from shardwise.errors import ConfigError
from shardwise.plan.sizes import read_table
from shardwise.quantities import check_whole

MAX_RANKS = 1 << 20


@dataclass(frozen=True)
class Accelerator:
    """One device. Its driver reports ``memory_bytes``; it is sold as ``nominal_memory_bytes``.

    ``peak`` is the datasheet's dense FLOP/s by dtype (and ``tf32``), ``matmul`` the best that a
    matmul of any shape was measured at, by dtype. ``family`` groups variants of one chip.
    ``asynchronous``: the host issues operations ahead of the device. ``link``, ``host_link`` and
    ``host`` name the catalogue's defaults.
    """

    name: str
    family: str
    memory_bytes: int
    nominal_memory_bytes: int
    peak: Mapping[str, float] = field(hash=False)
    memory_bytes_per_s: float
    source: str
    matmul: Mapping[str, float] = field(default_factory=dict, hash=False)
    asynchronous: bool = True
    link: str = "pcie4"
    host_link: str = "pcie4"
    host: str = "server-ddr4"

    def peak_flops(self, dtype: str) -> float | None:
        """Return the dense peak in FLOP/s for a dtype; None if it has none."""
        return self.peak.get(dtype)

    def flops_per_s(self, dtype: str) -> float:
        """Return the peak at which matmuls of a dtype run.

        A device without units for a 16-bit type computes it in float32 (bfloat16 on a V100).

        **Raises** ConfigError for another dtype that the device has no figure for.
        """
        is_half = dtype in ("float16", "bfloat16")
        name = "float32" if is_half and dtype not in self.peak else dtype
        if name not in self.peak:
            raise ConfigError(
                f"dtype {dtype!r}: {self.name} has no unit for it; it has {', '.join(self.peak)}"
            )
        return self.peak[name]


@dataclass(frozen=True)
class Link:
    """A link between ranks, one way. See Note [Ring and tree] in ``pricing`` for its use.

    ``latency_s`` is a step of a small message, ``bulk_latency_s`` one of the protocol that reaches
    full bandwidth; ``efficiency`` the share of ``bandwidth_bytes_per_s`` that large collectives
    reach. ``curve`` is (message bytes, bus bytes per second) of an all-reduce as published, over
    ``curve_ranks`` = (ranks per node, nodes); ``curve_inner_latency_s`` the step inside its nodes.
    """

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float
    bulk_latency_s: float
    efficiency: float
    source: str
    curve: tuple[tuple[float, float], ...] = ()
    curve_ranks: tuple[int, int] = (8, 1)
    curve_inner_latency_s: float = 0.0

    def scaled(self, factor: float) -> Link:
        """Return the link with so many times the bandwidth.

        A message of ``factor`` times the bytes then takes the time that it took before.
        """
        return replace(
            self,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s * factor,
            curve=tuple((size * factor, rate * factor) for size, rate in self.curve),
        )

    @cached_property
    def achieved_bytes_per_s(self) -> float:
        """Return the bandwidth of large messages."""
        return self.curve[-1][1] if self.curve else self.bandwidth_bytes_per_s * self.efficiency


@dataclass(frozen=True)
class Host:
    """The host of a node, with all its sockets: memory, drives, and each device's link.

    ``nvme_bytes`` is the space of the drives, None where it is not known.
    ``dram_bytes_per_s`` counts both directions, as memory controllers do. ``device_link`` is that
    of one device; the drives' bandwidth is shared by all ranks of the node.
    """

    name: str
    memory_bytes: int
    dram_bytes_per_s: float
    device_link: Link
    nvme_read_bytes_per_s: float
    nvme_write_bytes_per_s: float
    source: str
    nvme_bytes: int | None = None


@dataclass(frozen=True)
class Node:
    """Accelerators behind one host: ``intra`` is one rank's link to the others of its node.

    ``inter`` is one NIC; ``num_nics`` of them serve the node's ranks in equal shares, and together
    where a collective has all ranks of the node in it.
    """

    name: str
    accelerator: Accelerator
    num_accelerators: int
    intra: Link
    inter: Link
    num_nics: int
    host: Host
    source: str

    @property
    def nics_per_rank(self) -> float:
        """NICs that one rank has for itself when all ranks of the node send."""
        return self.num_nics / self.num_accelerators


@dataclass(frozen=True)
class Cluster:
    """So many nodes of one kind."""

    node: Node
    num_nodes: int = 1

    @property
    def num_ranks(self) -> int:
        """Number of accelerators in all."""
        return self.num_nodes * self.node.num_accelerators


def unknown(what: str, name: object, known: Mapping[str, str]) -> ConfigError:
    """Return the error for a name that is not in a table, with the nearest ones that are.

    ``known`` has the name for each spelling of it.
    """
    near = get_close_matches(str(name).lower(), list(known), n=3, cutoff=0.5)
    names = dict.fromkeys(known[spelling] for spelling in near or known)
    begin = "the nearest are" if near else "expected one of"
    return ConfigError(f"{what} {name!r} is not in the catalogue; {begin} {', '.join(names)}")


_NOISE = re.compile(r"nvidia|tesla|geforce|quadro|amd|instinct|google|sxm\d?|hbm\d?e?|\d+w|gpu")
_Row = TypeVar("_Row")
_MIB, _GIB = 1 << 20, 1 << 30
_HBM_SHARE = 0.9894  # of the memory, left by the driver: data/accelerators.toml has the reports


@cache
def accelerators() -> Mapping[str, Accelerator]:
    """Return the catalogue's accelerators by name."""
    by_name = {}
    for name, row in read_table("accelerators").items():
        values = {"name": name, "matmul": {}, **row}
        nominal, share = values.pop("memory_gib"), values.pop("driver_share", _HBM_SHARE)
        values["memory_bytes"] = int(values.pop("reported_gib", nominal * share) * _GIB)
        values["nominal_memory_bytes"] = int(nominal * _GIB)
        for kind in ("peak", "matmul"):
            values[kind] = {dtype: rate * 1e12 for dtype, rate in values[kind].items()}
        by_name[name] = Accelerator(**values)
    return by_name


@cache
def links() -> Mapping[str, Link]:
    """Return the catalogue's links by name."""
    by_name: dict[str, Link] = {}
    for name, row in read_table("links").items():
        # If a row has no efficiency, its curve contains it.
        values = {"name": name, "efficiency": 1.0, "curve_ranks": (8, 1), **row}
        curve = tuple((mib * _MIB, rate * 1e9) for mib, rate in values.get("curve", ()))
        if (of := values.pop("curve_of", None)) is not None:
            ends_at = values.pop("curve_ends_at", None)
            factor = values["bandwidth_bytes_per_s"] / by_name[of].bandwidth_bytes_per_s
            factor = ends_at / by_name[of].achieved_bytes_per_s if ends_at else factor
            curve = by_name[of].scaled(factor).curve
        for key in [key for key in values if key.endswith("_us")]:
            values[key.removesuffix("us") + "s"] = values.pop(key) * 1e-6
        ranks = tuple(values.pop("curve_ranks"))
        by_name[name] = Link(**values | {"curve": curve, "curve_ranks": ranks})
    return by_name


@cache
def hosts() -> Mapping[str, Host]:
    """Return the catalogue's hosts by name."""
    by_name = {}
    for name, row in read_table("hosts").items():
        values = {"name": name, **row, "device_link": links()[row["device_link"]]}
        by_name[name] = Host(memory_bytes=values.pop("memory_gib") * _GIB, **values)
    return by_name


def find_accelerator(name: str) -> Accelerator:
    """Return an accelerator by a name such as ``H100-80GB``, ``a100_80gb`` or ``A100``.

    **Raises** ConfigError with the nearest names.
    """
    base, size, pcie = _parse(name)
    defaults = read_table("nodes")["default_variants"]
    same = [chip for chip in accelerators().values() if _parse(chip.name)[0] == base]
    same = [chip for chip in same if size in (None, chip.nominal_memory_bytes >> 30)]
    same = [chip for chip in same if _parse(chip.name)[2] == pcie] or (same if pcie else [])
    if not same:
        full_names = {known.lower(): known for known in accelerators()}
        short_names = {_parse(known)[0]: known for known in (*accelerators(), *defaults)}
        raise unknown("accelerator", name, full_names | short_names)
    return next((chip for chip in same if chip.name in defaults), same[0])


def find_link(name: str) -> Link:
    """Return a link by a name such as ``nvlink4``, ``HDR``, ``pcie 5`` or ``10GbE``.

    **Raises** ConfigError with the nearest names.
    """
    return _find_row("link", name, links(), read_table("nodes")["aliases"])


def _find_row(
    what: str, name: str, table: Mapping[str, _Row], aliases: Mapping[str, str] | None = None
) -> _Row:
    """Return the row of a table with this name, however it is spelt."""
    key, known = _squeezed(name), {_squeezed(row): row for row in table} | dict(aliases or {})
    if key not in known:
        raise unknown(what, name, known)
    return table[known[key]]


def make_cluster(
    gpu: str,
    num_gpus: int,
    gpus_per_node: int | None = None,
    link: str | None = None,
    network: str | None = None,
    num_nics: int | None = None,
    host: str | None = None,
) -> Cluster:
    """Put a cluster together; parts that are not given are as usual for such machines.

    ``link`` joins the GPUs of a node, ``network`` is one NIC, ``num_nics`` are those of one node.

    **Raises** ConfigError for unknown names, for counts out of range, and where the GPUs do not
    fill the nodes.
    """
    accelerator = find_accelerator(gpu)
    table = read_table("nodes")["usual"]
    family = "nvl72" if accelerator.host == "nvl72" else accelerator.family
    usual = table.get(family, table["else"])
    check_whole(num_gpus, "num_gpus", MAX_RANKS)
    per_node = min(usual["per_node"], num_gpus) if gpus_per_node is None else gpus_per_node
    check_whole(per_node, "gpus_per_node", 1024)
    per_node = min(per_node, num_gpus)
    if num_gpus % per_node:
        raise ConfigError(
            f"num_gpus={num_gpus}: expected a multiple of gpus_per_node={per_node}; set "
            "gpus_per_node to a divisor of it"
        )
    if num_nics is None:  # as many per GPU as usual, and at least one
        num_nics = max(1, usual["nics"] * per_node // usual["per_node"])
    check_whole(num_nics, "num_nics", 1024)
    host_row = _find_row("host", host or accelerator.host, hosts())
    ends = host_row.device_link, links()[accelerator.host_link]
    slower = min(ends, key=lambda link: link.bandwidth_bytes_per_s)
    node = Node(
        name=f"{per_node} x {accelerator.name}",
        accelerator=accelerator,
        num_accelerators=per_node,
        intra=find_link(link or accelerator.link),
        inter=find_link(network or usual["network"]),
        num_nics=num_nics,
        host=replace(host_row, device_link=slower),
        source="put together from the catalogue: each part has its source",
    )
    return Cluster(node, num_gpus // per_node)


def _parse(name: str) -> tuple[str, int | None, bool]:
    """Split a name into the chip, the size of its memory in GB if given, and whether it is PCIe."""
    tokens = [_NOISE.sub("", t) for t in re.split(r"[^a-z0-9]+", name.lower())]
    size = next((int(t[:-2]) for t in tokens if re.fullmatch(r"\d+gb", t)), None)
    rest = [t for t in tokens if not re.fullmatch(r"\d+gi?b|pcie\d?", t)]
    base = "".join(rest).replace("rtx", "").replace("tpu", "")
    return base, size, any(t.startswith("pcie") for t in tokens)


def _squeezed(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "", name.lower())

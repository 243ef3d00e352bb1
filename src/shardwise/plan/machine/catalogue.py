"""Finds hardware by name, forgivingly, and puts clusters together from it.

``find_accelerator("h100")``, ``find_link("NVLink 4")``, ``find_node("dgx-a100")``, and
``make_cluster("H100", 64)``, which fills in what such machines are usually built with.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

from shardwise.errors import ConfigError
from shardwise.plan.machine.hardware import (
    MAX_RANKS,
    Accelerator,
    Cluster,
    Host,
    Link,
    Node,
    canonical_dtype,
    unknown,
)
from shardwise.plan.tables import make_row, read_table
from shardwise.quantities import check_whole

_NOISE = re.compile(r"nvidia|tesla|geforce|quadro|amd|instinct|google|sxm\d?|hbm\d?e?|\d+w|gpu")
_Row = TypeVar("_Row")
_MIB, _GIB = 1 << 20, 1 << 30
_US = 1e-6
_HBM_SHARE = 0.9894  # of the memory, left by the driver: data/accelerators.toml has the reports


@dataclass(frozen=True)
class _Usual:
    """How machines with one family of accelerators are usually built."""

    network: str
    per_node: int = 8
    nics: int = 8


@cache
def accelerators() -> Mapping[str, Accelerator]:
    """Return the catalogue's accelerators by name."""
    found = {}
    for name, row in read_table("accelerators").items():
        nominal, share = row["memory_gib"], row.get("driver_share", _HBM_SHARE)
        rates = {
            kind: {canonical_dtype(dtype): rate * 1e12 for dtype, rate in row[kind].items()}
            for kind in ("peak", "matmul")
            if kind in row
        }
        found[name] = _made(
            Accelerator,
            name,
            row,
            without=("memory_gib", "reported_gib", "driver_share"),
            memory_bytes=int(row.get("reported_gib", nominal * share) * _GIB),
            nominal_memory_bytes=int(nominal * _GIB),
            **rates,
        )
    return found


@cache
def links() -> Mapping[str, Link]:
    """Return the catalogue's links by name."""
    found: dict[str, Link] = {}
    for name, row in read_table("links").items():
        curve = tuple((mib * _MIB, rate * 1e9) for mib, rate in row.get("curve", ()))
        if "curve_of" in row:
            other, ends_at = found[row["curve_of"]], row.get("curve_ends_at")
            factor = row["bandwidth_bytes_per_s"] / other.bandwidth_bytes_per_s
            factor = ends_at / other.achieved_bytes_per_s if ends_at else factor
            curve = other.scaled(factor).curve
        latencies = {n: row[n] * _US for n in row if n.endswith("latency_us")}
        found[name] = _made(
            Link,
            name,
            row,
            without=("curve_of", "curve_ends_at", *latencies),
            efficiency=row.get("efficiency", 1.0),  # else it is in the curve
            curve=curve,
            curve_ranks=tuple(row.get("curve_ranks", (8, 1))),
            **{n.removesuffix("us") + "s": seconds for n, seconds in latencies.items()},
        )
    return found


@cache
def hosts() -> Mapping[str, Host]:
    """Return the catalogue's hosts by name."""
    return {
        name: _made(
            Host,
            name,
            row,
            without=("memory_gib",),
            memory_bytes=row["memory_gib"] * _GIB,
            device_link=links()[row["device_link"]],
        )
        for name, row in read_table("hosts").items()
    }


def standard_nodes() -> Mapping[str, Mapping[str, Any]]:
    """Return ``settings`` of ``make_cluster`` and ``source`` of each standard node."""
    nodes: Mapping[str, Mapping[str, Any]] = read_table("nodes")["nodes"]
    return nodes


def _made(
    kind: type[_Row], name: str, row: Mapping[str, Any], without: Sequence[str], **values: Any
) -> _Row:
    kept = {key: value for key, value in row.items() if key not in without}
    return make_row(kind, f"{kind.__name__} {name}", {"name": name, **kept, **values})


def find_accelerator(name: str) -> Accelerator:
    """Return an accelerator by a name such as ``H100-80GB``, ``a100_80gb`` or ``A100``.

    **Raises** ConfigError with the nearest names.
    """
    base, size, pcie = _parse(name)
    defaults = read_table("nodes")["default_variants"]
    same = [each for each in accelerators().values() if _parse(each.name)[0] == base]
    same = [each for each in same if size in (None, each.nominal_memory_bytes >> 30)]
    same = [each for each in same if _parse(each.name)[2] == pcie] or (same if pcie else [])
    if not same:
        ways = {each.lower(): each for each in accelerators()}
        usual = {_parse(each)[0]: each for each in (*accelerators(), *defaults)}
        raise unknown("accelerator", name, ways | usual)
    return next((each for each in same if each.name in defaults), same[0])


def find_link(name: str) -> Link:
    """Return a link by a name such as ``nvlink4``, ``HDR``, ``pcie 5`` or ``10GbE``.

    **Raises** ConfigError with the nearest names.
    """
    return links()[_find("link", name, links(), read_table("nodes")["aliases"])]


def _find(
    what: str, name: str, table: Mapping[str, object], aliases: Mapping[str, str] | None = None
) -> str:
    """Return a name of a table, however it is spelt."""
    key, known = _squeezed(name), {_squeezed(each): each for each in table} | dict(aliases or {})
    if key not in known:
        raise unknown(what, name, known)
    return known[key]


def find_host(name: str) -> Host:
    """Return a host by name. **Raises** ConfigError with the nearest names."""
    return hosts()[_find("host", name, hosts())]


def find_node(name: str) -> Node:
    """Return a standard node, such as ``dgx-a100``. **Raises** ConfigError with the nearest."""
    found = _find("node", name, standard_nodes())
    row = standard_nodes()[found]
    return replace(make_cluster(**row["settings"]).node, name=found, source=row["source"])


def make_cluster(
    gpu: str,
    num_gpus: int,
    gpus_per_node: int | None = None,
    link: str | None = None,
    network: str | None = None,
    num_nics: int | None = None,
    host: str | None = None,
) -> Cluster:
    """Put a cluster together; what is not given is as such machines are usually built.

    ``link`` joins the GPUs of a node, ``network`` is one NIC, ``num_nics`` are those of one node.

    **Raises** ConfigError for unknown names, for counts out of range, and where the GPUs do not
    fill the nodes.
    """
    accelerator = find_accelerator(gpu)
    table = read_table("nodes")["usual"]
    family = "nvl72" if accelerator.host == "nvl72" else accelerator.family
    usual = make_row(_Usual, f"nodes.toml: usual {family}", table.get(family, table["else"]))
    check_whole(num_gpus, "num_gpus", MAX_RANKS)
    per_node = min(usual.per_node, num_gpus) if gpus_per_node is None else gpus_per_node
    check_whole(per_node, "gpus_per_node", 1024)
    per_node = min(per_node, num_gpus)
    if num_gpus % per_node:
        raise ConfigError(
            f"num_gpus={num_gpus}: expected a multiple of gpus_per_node={per_node}; set "
            "gpus_per_node to a divisor of it"
        )
    if num_nics is None:  # as many per GPU as usual, and at least one
        num_nics = max(1, usual.nics * per_node // usual.per_node)
    check_whole(num_nics, "num_nics", 1024)
    intra = find_link(link or accelerator.link)
    inter = find_link(network or usual.network)
    node = Node(
        name=f"{per_node} x {accelerator.name}",
        accelerator=accelerator,
        num_accelerators=per_node,
        intra=intra,
        inter=inter,
        num_nics=num_nics,
        host=_host_of(accelerator, host),
        source="put together from the catalogue: each part has its source",
    )
    return Cluster(node, num_gpus // per_node)


def _host_of(accelerator: Accelerator, host: str | None) -> Host:
    """Return the host; the link to a device is the slower of what the host and it have."""
    found = find_host(host or accelerator.host)
    ours = links()[accelerator.host_link]
    if ours.bandwidth_bytes_per_s < found.device_link.bandwidth_bytes_per_s:
        return replace(found, device_link=ours)
    return found


def _parse(name: str) -> tuple[str, int | None, bool]:
    """Split a name into the chip, the size of its memory in GB if said, and whether it is PCIe."""
    tokens = [_NOISE.sub("", t) for t in re.split(r"[^a-z0-9]+", name.lower())]
    size = next((int(t[:-2]) for t in tokens if re.fullmatch(r"\d+gb", t)), None)
    rest = [t for t in tokens if not re.fullmatch(r"\d+gi?b|pcie\d?", t)]
    base = "".join(rest).replace("rtx", "").replace("tpu", "")
    return base, size, any(t.startswith("pcie") for t in tokens)


def _squeezed(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "", name.lower())

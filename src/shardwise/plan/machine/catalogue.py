"""Finds hardware by name, forgivingly, and puts clusters together from it.

``find_accelerator("h100")``, ``find_link("NVLink 4")``, ``find_node("dgx-a100")``, and
``make_cluster("H100", 64)``, which fills in what such machines are usually built with.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwise.errors import ConfigError
from shardwise.plan.machine.catalogue_accelerators import ACCELERATORS
from shardwise.plan.machine.catalogue_links import HOSTS, LINKS
from shardwise.plan.machine.hardware import (
    MAX_RANKS,
    Accelerator,
    Cluster,
    Host,
    Link,
    Node,
    unknown,
)
from shardwise.quantities import check_whole

_NOISE = re.compile(r"nvidia|tesla|geforce|quadro|amd|instinct|google|sxm\d?|hbm\d?e?|\d+w|gpu")
_DEFAULTS = ("V100-32GB", "A100-80GB", "A100-80GB-PCIe", "H100-80GB", "GH200-96GB")
"""Which variant is meant where the size of the memory is not said."""

_LINK_ALIASES: Mapping[str, str] = {
    "ib": "infiniband-ndr",
    "infiniband": "infiniband-ndr",
    "edr": "infiniband-edr",
    "hdr": "infiniband-hdr",
    "ndr": "infiniband-ndr",
    "xdr": "infiniband-xdr",
    "roce": "roce-400",
    "efa": "efa-v2",
    "ethernet": "ethernet-25",
    "1gbe": "ethernet-1",
    "10gbe": "ethernet-10",
    "25gbe": "ethernet-25",
    "100gbe": "ethernet-100",
    "c2c": "nvlink-c2c",
    "gloo": "loopback",
}


@dataclass(frozen=True)
class _Usual:
    """How machines with one family of accelerators are usually built."""

    network: str
    per_node: int = 8
    nics: int = 8


_USUAL: Mapping[str, _Usual] = {
    "V100": _Usual("infiniband-edr"),
    "A100": _Usual("infiniband-hdr"),
    "H100": _Usual("infiniband-ndr"),
    "GH200": _Usual("infiniband-ndr", 1, 1),
    "B200": _Usual("infiniband-ndr"),
    "MI300X": _Usual("roce-400"),
    "TPUv5p": _Usual("ici-v5p", 4, 4),
    "cpu": _Usual("ethernet-10", 1024, 1),
}
_USUAL_ELSE = _Usual("ethernet-25", 8, 1)
_NVL72 = _Usual("infiniband-ndr", 72, 72)


def find_accelerator(name: str) -> Accelerator:
    """Return an accelerator by a name such as ``H100-80GB``, ``a100_80gb`` or ``A100``.

    **Raises** ConfigError with the nearest names.
    """
    base, size, pcie = _parse(name)
    same = [each for each in ACCELERATORS.values() if _parse(each.name)[0] == base]
    same = [each for each in same if size in (None, each.nominal_memory_bytes >> 30)]
    same = [each for each in same if _parse(each.name)[2] == pcie] or (same if pcie else [])
    if not same:
        ways = {each.lower(): each for each in ACCELERATORS}
        usual = {_parse(each)[0]: each for each in (*ACCELERATORS, *_DEFAULTS)}
        raise unknown("accelerator", name, ways | usual)
    return next((each for each in same if each.name in _DEFAULTS), same[0])


def find_link(name: str) -> Link:
    """Return a link by a name such as ``nvlink4``, ``HDR``, ``pcie 5`` or ``10GbE``.

    **Raises** ConfigError with the nearest names.
    """
    return LINKS[_find("link", name, LINKS, _LINK_ALIASES)]


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
    return HOSTS[_find("host", name, HOSTS)]


def find_node(name: str) -> Node:
    """Return a standard node, such as ``dgx-a100``. **Raises** ConfigError with the nearest."""
    found = _find("node", name, STANDARD_NODES)
    settings, source = STANDARD_NODES[found]
    node = make_cluster(**settings).node
    return replace(node, name=found, source=source)


STANDARD_NODES: Mapping[str, tuple[dict[str, Any], str]] = {
    "dgx-2": (
        {"gpu": "V100-32GB", "num_gpus": 16, "gpus_per_node": 16, "num_nics": 8, "host": "dgx2"},
        "NVIDIA DGX-2 datasheet: 16 V100, NVSwitch, 8 EDR ports",
    ),
    "dgx-a100": (
        {"gpu": "A100-80GB", "num_gpus": 8, "network": "infiniband-hdr", "host": "dgx-a100"},
        "NVIDIA DGX A100 datasheet: 8 A100, NVLink 3, 8 HDR ports for the compute network",
    ),
    "dgx-h100": (
        {"gpu": "H100-80GB", "num_gpus": 8, "network": "infiniband-ndr", "host": "dgx-h100"},
        "NVIDIA DGX H100 user guide: 8 H100, NVLink 4, 8 NDR ports",
    ),
    "hgx-h200": (
        {"gpu": "H200", "num_gpus": 8, "network": "infiniband-ndr", "host": "dgx-h100"},
        "NVIDIA H200 datasheet (HGX, 8 boards), with a DGX H100's host and 8 NDR ports",
    ),
    "p4d": (
        {"gpu": "A100-40GB", "num_gpus": 8, "network": "efa-v1", "num_nics": 4, "host": "p4d"},
        "AWS EC2 P4d page: 8 A100-40GB, 4 x 100 Gb/s EFA",
    ),
    "p5": (
        {"gpu": "H100-80GB", "num_gpus": 8, "network": "efa-v2", "num_nics": 32},
        "AWS EC2 P5 page: 8 H100, 32 x 100 Gb/s EFA; host: as a DGX H100's",
    ),
    "p6-b200": (
        {"gpu": "B200", "num_gpus": 8, "network": "efa-v4", "num_nics": 8},
        "stas network/README.md: P6-B200, 8 x 400 Gb/s EFA",
    ),
    "gb200-nvl72": (
        {"gpu": "GB200", "num_gpus": 72, "gpus_per_node": 72, "num_nics": 72, "host": "nvl72"},
        "NVIDIA GB200 NVL72: 72 GPUs in one NVLink domain, one NDR port each",
    ),
    "single-4090": (
        {"gpu": "RTX4090", "num_gpus": 1, "network": "ethernet-10", "host": "desktop"},
        "a desktop with one RTX 4090",
    ),
    "cpu": (
        {"gpu": "cpu", "num_gpus": 2, "host": "cpu"},
        "a small machine, one rank per core: measure with `shardwise bench --calibrate`",
    ),
}
"""Standard nodes: the settings of ``make_cluster`` for one, and the source."""


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
    usual = _USUAL.get(accelerator.family, _USUAL_ELSE)
    if accelerator.host == "nvl72":
        usual = _NVL72
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
    ours = LINKS[accelerator.host_link]
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

"""The catalogue's links and hosts: what ranks send over, and what stands behind the accelerators.

Note [Sources of the catalogue]
``stas`` is github:stas00/ml-engineering at 744d01e1 (chapters and tables are named), whose tables
cite the vendors' pages; ``vTrain`` is github:VIA-Research/vTrain at f8dda847; ``NCCL tuning`` is
github:NVIDIA/nccl at 5067397c, src/graph/tuning.cc, table hwLatencies, row ring, columns LL (small
messages) and Simple (bulk). Issues are cited as owner/name#number. A vendor's datasheet, guide or
whitepaper that is named without a repository was quoted from memory, not read again.
"""

from collections.abc import Mapping

from shardwise.plan.machine.hardware import Host, Link

_MIB = 1 << 20
_GIB = 1 << 30
_US = 1e-6

_NVLINK_STEPS = (0.6 * _US, 3.4 * _US)
_PCIE_STEPS = (1.0 * _US, 5.7 * _US)
_NET_STEPS = (2.7 * _US, 14.0 * _US)
_STEPS = "latencies: NCCL tuning"
_BANDWIDTH = "bandwidth: stas network/README.md,"
_AS_CURVE = 1.0  # the efficiency is in the curve


def _curve(*points: tuple[int, float]) -> tuple[tuple[float, float], ...]:
    """Return (bytes, bytes per second) of (MiB, GB/s)."""
    return tuple((mib * _MIB, gigabytes * 1e9) for mib, gigabytes in points)


# All-reduce on 8 GPUs of one node, second (in-place) column.
_A100_CURVE = _curve(
    (1, 19.91), (2, 39.47), (4, 78.06), (8, 113.07), (16, 127.08), (32, 165.10), (64, 202.61),
    (128, 201.44), (256, 217.68), (512, 224.36), (1024, 229.25),
)  # fmt: skip
_V100_CURVE = _curve(
    (1, 23.34), (2, 36.33), (4, 48.55), (8, 61.86), (16, 107.26), (32, 122.34), (64, 128.74),
    (128, 131.97), (256, 133.11), (512, 133.98), (1024, 134.38),
)  # fmt: skip
# All-reduce on one node and on four of 8 B200; smaller and (one node) larger rows are left out:
# the former include the warm-up, the latter an all-reduce in the switch. So is 8 MiB on one node,
# which took longer than 16 MiB.
_B200_CURVE = _curve(
    (1, 36.06), (2, 63.09), (4, 76.48), (16, 254.96), (32, 325.97), (64, 400.60),
    (128, 568.38), (256, 646.11), (512, 688.99), (1024, 723.34), (4096, 740.64),
)  # fmt: skip
_EFA_CURVE = _curve(
    (1, 5.37), (2, 10.38), (4, 18.90), (8, 35.12), (16, 64.43), (32, 91.19), (64, 156.74),
    (128, 197.94), (256, 229.09), (512, 326.90), (1024, 361.99), (4096, 377.34),
)  # fmt: skip

NVLINK3 = Link(
    "nvlink3", 300e9, *_NVLINK_STEPS, _AS_CURVE,
    f"{_BANDWIDTH} table NVLink; {_STEPS}; curve: vTrain trace/a100/AR_GPU8_1M_1024M_LUT",
    _A100_CURVE,
)  # fmt: skip


def _nvlink4() -> Link:
    """Return NVLink 4: the A100's curve, scaled to the bandwidth that a ring reaches on 8 H200."""
    scaled = NVLINK3.scaled(361.4e9 / NVLINK3.achieved_bytes_per_s)
    source = (
        f"{_BANDWIDTH} table NVLink; {_STEPS}; no curve was found: NVLink 3's, scaled to "
        "the 361.4 GB/s of an all-gather of 16 GiB on 8 H200 (stas network/README.md, SHARP)"
    )
    return Link("nvlink4", 450e9, *_NVLINK_STEPS, _AS_CURVE, source, scaled.curve)


_ALL_LINKS = (
    Link("nvlink2", 150e9, *_NVLINK_STEPS, _AS_CURVE,
        f"{_BANDWIDTH} table NVLink; {_STEPS}; curve: vTrain trace/v100/AR_GPU8_1M_1024M_LUT "
        "(groups of 2 and 4 of these boards reach 17 and 64 % of it, which is not modelled)",
        _V100_CURVE),
    NVLINK3,
    Link("nvlink3-a800", 200e9, *_NVLINK_STEPS, _AS_CURVE,
        "A800 datasheet: NVLink 400 GB/s both ways; curve: NVLink 3's, scaled",
        NVLINK3.scaled(200 / 300).curve),
    _nvlink4(),
    Link("nvlink4-h800", 200e9, *_NVLINK_STEPS, _AS_CURVE,
        "arXiv:2505.09343, section 4.1: 400 GB/s both ways, where the H100 has 900; curve: "
        "NVLink 4's, scaled",
        _nvlink4().scaled(200 / 450).curve),
    Link("nvlink5", 900e9, *_NVLINK_STEPS, _AS_CURVE,
        f"{_BANDWIDTH} table NVLink; {_STEPS}; curve: same chapter, table of all_reduce on 1 and 4 "
        "P6-B200 nodes, column 1 node",
        _B200_CURVE),
    Link("xgmi", 448e9, *_NVLINK_STEPS, 312.912 / 448,
        f"{_BANDWIDTH} table XGMI, and its all_reduce of 4 GiB on 8 MI300X, 312.9 GB/s; latencies: "
        "as NVLink's. Pairs reach 64 GB/s only, which is not modelled"),
    Link("ici-v5p", 540e9, *_NVLINK_STEPS, 0.8,
        "github:jax-ml/scaling-book at 0819a7d8, tpus.md: 90 GB/s one way per link, 6 links; "
        "latencies and efficiency: as NVLink's (stas: about 80 % of the one-way figure)"),
    *(
        Link(name, rate, *_PCIE_STEPS, 0.88,
            f"{_BANDWIDTH} table PCIe; {_STEPS}; efficiency: 55.4 of 63 GB/s, same chapter "
            "(8 H200, host to device)")
        for name, rate in (("pcie4", 31e9), ("pcie5", 63e9), ("pcie6", 121e9))
    ),
    Link("pcie3", 15.75e9, *_PCIE_STEPS, 12 / 15.75,
        "PCI Express 3.0: 8 GT/s x 16 lanes x 128/130; efficiency: 12 GB/s per GPU, arXiv "
        f"2104.07857 slides; {_STEPS}"),
    Link("nvlink-c2c", 450e9, *_PCIE_STEPS, 359.05 / 450,
        f"{_BANDWIDTH} NVLink-C2C, measured 359 of 450 GB/s there; latencies: as PCIe's"),
    *(
        Link(name, rate, *_NET_STEPS, 0.92,
            f"InfiniBand: {speed} Gb/s per port; {_STEPS}; efficiency: 46 to 48 of 50 GB/s per NIC "
            "(NVIDIA/nccl-tests#290), 91 of 100 GB/s (NVIDIA/nccl-tests#100)")
        for name, rate, speed in (
            ("infiniband-edr", 12.5e9, 100), ("infiniband-hdr", 25e9, 200),
            ("infiniband-ndr", 50e9, 400), ("infiniband-xdr", 100e9, 800),
        )
    ),
    *(
        Link(name, rate, *_NET_STEPS, 0.8,
            f"RoCE: {speed} Gb/s per port; {_STEPS}; efficiency: about 80 % of the advertised "
            "speed (stas network/README.md, Multiple node training)")
        for name, rate, speed in (
            ("roce-100", 12.5e9, 100), ("roce-200", 25e9, 200), ("roce-400", 50e9, 400),
        )
    ),
    Link("efa-v1", 12.5e9, *_NET_STEPS, 340 / 400,
        f"{_BANDWIDTH} EFA: P4d, 4 x 100 Gb/s, 340 of 400 in all_reduce; {_STEPS}"),
    Link("efa-v2", 12.5e9, *_NET_STEPS, 340 / 400,
        f"{_BANDWIDTH} EFA: P5, 32 x 100 Gb/s; efficiency: as EFA v1's; {_STEPS}"),
    Link("efa-v3", 25e9, *_NET_STEPS, 364.87 / 400,
        f"{_BANDWIDTH} EFA: P5en, 16 x 200 Gb/s; efficiency: 364.87 of 400 GB/s on 4 nodes of 8 "
        f"H200, same chapter; {_STEPS}"),
    Link("efa-v4", 50e9, *_NET_STEPS, _AS_CURVE,
        f"{_BANDWIDTH} EFA: P6-B200, 8 x 400 Gb/s; {_STEPS}; curve: same chapter, table of "
        "all_reduce on 1 and 4 P6-B200 nodes, column 4 nodes",
        _EFA_CURVE, (8, 4), _NVLINK_STEPS[0]),
    *(
        Link(f"ethernet-{speed}", speed / 8 * 1e9, 55 * _US, 55 * _US, 0.8,
            f"Ethernet with TCP: {speed} Gb/s; latency: half of a round trip of 110 us "
            "(serverfault.com, question 791539); efficiency: as RoCE's")
        for speed in (1, 10, 25, 100)
    ),
    Link("loopback", 2e9, 55 * _US, 55 * _US, 0.8,
        "a place-holder for processes on one host: measure with `shardwise bench --calibrate`; "
        "latency and efficiency: as Ethernet's"),
)  # fmt: skip

LINKS: Mapping[str, Link] = {link.name: link for link in _ALL_LINKS}

_NVME = "NVMe: 10 GB/s read, 5 GB/s write per node (DeepSpeed at edaa7221, blogs/deepnvme)"
_DRIVE_BYTES = 3_840_000_000_000  # of a node that is sold with its drives
_DRAM = "DRAM: channels x transfers/s x 8 bytes of"


def _host(
    name: str,
    memory_gib: int,
    dram: float,
    cores: int,
    link: str,
    nvme: tuple[float, float],
    source: str,
    drives: int = 0,
) -> Host:
    read, write = nvme
    memory, space = memory_gib * _GIB, drives * _DRIVE_BYTES or None
    return Host(name, memory, dram, cores, LINKS[link], read, write, source, space)


HOSTS: Mapping[str, Host] = {
    host.name: host
    for host in (
        _host("dgx2", 1536, 256.0e9, 48, "pcie3", (28e9, 28e9), f"NVIDIA DGX-2 datasheet (2 Xeon "
              f"8168, 1.5 TB, 8 drives of 3.84 TB); {_DRAM} 2 x 6 DDR4-2666; NVMe: 28 GB/s per "
              "node, arXiv 2104.07857", 8),
        _host("dgx-a100", 2048, 409.6e9, 128, "pcie4", (10e9, 5e9), f"NVIDIA DGX A100 datasheet "
              f"(2 EPYC 7742, up to 2 TB, 4 drives of 3.84 TB or more); {_DRAM} 2 x 8 DDR4-3200; "
              f"{_NVME}", 4),
        _host("dgx-h100", 2048, 614.4e9, 112, "pcie5", (10e9, 5e9), f"NVIDIA DGX H100 user guide "
              f"(2 Xeon 8480C, 2 TB, 8 drives of 3.84 TB); {_DRAM} 2 x 8 DDR5-4800; {_NVME}", 8),
        _host("p4d", 1152, 281.6e9, 48, "pcie4", (16e9, 5e9), f"AWS EC2 P4d page (1152 GiB, 8 x 1 "
              f"TB NVMe, 16 GB/s read); {_DRAM} 2 x 6 DDR4-2933 (Xeon 8275CL); write: {_NVME}"),
        _host("grace", 480, 500e9, 72, "nvlink-c2c", (10e9, 5e9), "NVIDIA Grace Hopper datasheet: "
              f"up to 480 GB LPDDR5X at up to 500 GB/s, 72 cores; {_NVME}"),
        _host("nvl72", 36 * 480, 36 * 500e9, 36 * 72, "nvlink-c2c", (18 * 10e9, 18 * 5e9),
              "NVIDIA GB200 NVL72: 18 trays, 36 Grace processors, each as the host grace"),
        _host("server-ddr4", 512, 409.6e9, 64, "pcie4", (10e9, 5e9), f"a server with two sockets, "
              f"512 GiB and 64 cores assumed; {_DRAM} 2 x 8 DDR4-3200; {_NVME}"),
        _host("server-ddr5", 2048, 921.6e9, 128, "pcie5", (10e9, 5e9), f"a server with two sockets,"
              f" 2 TiB and 128 cores assumed; {_DRAM} 2 x 12 DDR5-4800; {_NVME}"),
        _host("desktop", 128, 89.6e9, 16, "pcie4", (7.0e9, 5.1e9), f"a desktop, 128 GiB and 16 "
              f"cores assumed; {_DRAM} 2 DDR5-5600; NVMe: Samsung 980 PRO datasheet"),
        _host("cpu", 16, 40e9, 2, "loopback", (2e9, 1e9), "a place-holder for a small machine: "
              "measure with `shardwise bench --calibrate`"),
    )
}  # fmt: skip

"""The catalogue: every figure has a source, names are found forgivingly, nonsense is refused."""

import pytest

from shardwise.errors import ConfigError
from shardwise.plan.machine.hardware import (
    accelerators,
    find_accelerator,
    find_link,
    hosts,
    links,
    make_cluster,
)
from shardwise.plan.machine.pricing import efficiencies_of
from shardwise.plan.sizes import OPTIMIZERS, PRECISIONS

GIB = 1 << 30


def test_every_figure_of_the_catalogue_has_a_source():
    tables = accelerators(), links(), hosts(), PRECISIONS, OPTIMIZERS
    entries = [row for table in tables for row in table.values()]
    for family in {each.family for each in accelerators().values()}:
        entries += efficiencies_of(family).values()
    assert all(len(each.source) > 10 for each in entries)


def test_the_accelerators_of_the_published_runs_are_there():
    """The names as benchmarks/data prints them."""
    names = """A100-40GB A100-80GB A10G A6000 A800-80GB B200 GB200 GB300 GH200-96GB H100-80GB
    H100-96GB-HBM2e-500W H200-141GB MI300X RTX3090-24GB RTX4070Ti-SUPER-16GB RTX4090 RTX4090-24GB
    TitanRTX-24GB V100-32GB a100_40gb a100_80gb h100_80gb"""
    for name in names.split():
        found = find_accelerator(name)
        size = next((int(part[:-2]) for part in name.lower().replace("_", "-").split("-")
                     if part.endswith("gb") and part[:-2].isdigit()), None)  # fmt: skip
        assert size in (None, found.nominal_memory_bytes // GIB), name


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("A100", "A100-80GB"),
        ("h100", "H100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA H800", "H800-80GB"),
        ("A100 PCIe", "A100-80GB-PCIe"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("GeForce RTX 4090", "RTX4090"),
        ("4090", "RTX4090"),
        ("tpu v5p", "TPUv5p"),
    ],
)
def test_an_accelerator_is_found_however_it_is_written(written, meant):
    assert find_accelerator(written).name == meant


def test_every_part_is_found_by_its_own_name():
    assert all(find_link(name) is links()[name] for name in links())
    for name, each in accelerators().items():
        assert find_accelerator(name) is find_accelerator(name.lower()) is each
    assert find_link("NVLink 4").name == "nvlink4"
    assert find_link("10GbE").name == "ethernet-10"
    assert find_link("HDR").name == "infiniband-hdr"


@pytest.mark.parametrize(
    ("find", "written", "nearest"),
    [
        (find_accelerator, "H101", "H100"),
        (find_accelerator, "A100-60GB", "A100-40GB"),
        (find_link, "nvlink9", "nvlink5"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(find, written, nearest):
    with pytest.raises(ConfigError, match=f"{written}.*{nearest}"):
        find(written)


def test_figures_are_those_that_were_published():
    h100, a100 = find_accelerator("H100"), find_accelerator("A100")
    assert (h100.peak_flops("bfloat16"), h100.matmul["bfloat16"]) == (989e12, 794.5e12)
    assert (a100.peak_flops("bfloat16"), a100.matmul["bfloat16"]) == (312e12, 271.2e12)
    assert find_accelerator("H200").matmul["float8"] == 1453.4e12
    assert find_accelerator("GH200").matmul["bfloat16"] == 828.6e12
    assert find_accelerator("B200").matmul["bfloat16"] == 1745e12
    torchtitan = find_accelerator("H100-96GB-HBM2e")
    assert torchtitan.memory_bytes_per_s == 2.4e12
    assert find_link("nvlink3").bandwidth_bytes_per_s == 300e9


def test_a_dtype_without_units_runs_in_float32_or_is_refused():
    v100 = find_accelerator("V100")
    assert v100.peak_flops("bfloat16") is None
    assert v100.flops_per_s("bfloat16") == v100.flops_per_s("float32")
    with pytest.raises(ConfigError, match=r"float8.*V100"):
        v100.flops_per_s("float8")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_gpus": 0}, "num_gpus=0"),
        ({"num_gpus": -8}, "num_gpus=-8"),
        ({"num_gpus": 8.0}, "num_gpus=8.0"),
        ({"num_gpus": 10**9}, "num_gpus=1000000000"),
        ({"num_gpus": 12}, "multiple of gpus_per_node=8"),
        ({"num_gpus": 8, "gpus_per_node": 0}, "gpus_per_node=0"),
        ({"num_gpus": 8, "num_nics": -1}, "num_nics=-1"),
        ({"num_gpus": 8, "link": "string"}, "link 'string'"),
        ({"num_gpus": 8, "network": "pigeon"}, "link 'pigeon'"),
        ({"num_gpus": 8, "host": "dgx-a101"}, "host 'dgx-a101'.*dgx-a100"),
    ],
)
def test_a_cluster_of_nonsense_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        make_cluster("H100", **settings)


def test_the_figures_of_the_catalogue_can_be():
    for each in (*accelerators().values(), *links().values(), *hosts().values()):
        for name, figure in vars(each).items():
            if type(figure) in (float, int) and not name.endswith("latency_s"):
                assert 0 < figure < 1e18, (each.name, name)
    for chip in accelerators().values():
        assert all(0 < rate < 1e18 for rate in (*chip.peak.values(), *chip.matmul.values()))
        assert all(0.5 < rate / chip.peak[dtype] < 1 for dtype, rate in chip.matmul.items())
        assert 0.9 <= chip.memory_bytes / chip.nominal_memory_bytes <= 1  # the driver's, the card's
    for link in links().values():
        assert link.efficiency <= 1
        times = [size / rate for size, rate in link.curve]
        assert times == sorted(times), link.name


def test_what_is_not_given_is_as_such_machines_are_built():
    cluster = make_cluster("H100", 64)
    assert (cluster.num_nodes, cluster.num_ranks) == (8, 64)
    assert cluster.node.intra.name == "nvlink4"
    assert (cluster.node.inter.name, cluster.node.nics_per_rank) == ("infiniband-ndr", 1)
    assert make_cluster("H100", 2).num_nodes == 1
    desktops = make_cluster("RTX 4090", 4, gpus_per_node=2)
    assert (desktops.num_nodes, desktops.node.num_nics) == (2, 1)
    assert make_cluster("GB200", 144).node.num_accelerators == 72
    assert make_cluster("V100", 8).node.host.device_link.name == "pcie3"
    named = make_cluster("A100", 16, 8, link="pcie4", network="10GbE", num_nics=1, host="desktop")
    assert (named.node.intra.name, named.node.inter.name) == ("pcie4", "ethernet-10")

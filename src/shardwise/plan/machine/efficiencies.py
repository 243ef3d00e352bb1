"""The one table of efficiencies: what share of a datasheet's figure a training step reaches.

Note [Refining the table]
Values are few and belong to no row of a benchmark: the first table holds for all accelerators, the
second for the family of one. Whoever fits one says so in its ``source``, with the rows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.errors import ConfigError
from shardwise.plan.machine.hardware import Accelerator, unknown


@dataclass(frozen=True)
class Efficiency:
    """A share of a datasheet's figure, or seconds (names in ``_s``), with meaning and source."""

    value: float
    meaning: str
    source: str


_STAS = "github:stas00/ml-engineering at 744d01e1, compute/accelerator/README.md"

EFFICIENCIES: Mapping[str, Efficiency] = {
    "matmul_best": Efficiency(0.80,
        "best shape of a matmul over the peak, where it was not measured on the accelerator",
        f"{_STAS}, MAMF table: median of the NVIDIA rows in bf16 (72.9 to 86.9 %)"),
    "matmul_sustained": Efficiency(0.82, "large matmuls of ordinary shapes over the best shape",
        "pytorch/ao#2427: 1.42 to 1.45 PFLOP/s for 4096 to 8192 cubed on a B200, best 1.745"),
    "attention": Efficiency(0.60, "fused attention, forward and backward, over the peak",
        "arXiv 2307.08691, abstract: 50 to 73 % on an A100; the middle"),
    "memory": Efficiency(0.84, "elementwise operations over the memory's bandwidth",
        "mikamirai.com, GPU Memory Bandwidth: 2.8 of 3.35 TB/s, coalesced, on an H100"),
    "kernel_ramp_s": Efficiency(3e-6, "what a kernel takes beyond its work at full rate",
        "pytorch/ao#2427: 1024, 1536 and 2048 cubed on a B200 take 3.6, 2.9 and 3.3 us more than "
        "at 1.45 PFLOP/s"),
    "host_launch_s": Efficiency(5e-6, "the host's time to issue one operation",
        "jiahuanglin.xyz, GPU kernel serving, lesson 18: 5 to 25 us per operation; the low end, as "
        "most of a step is issued by autograd's C++"),
    "host_memory": Efficiency(0.80, "a fused optimizer on the host over the bandwidth of its DRAM",
        "no published figure was found: the aim of the optimizer, to be measured with "
        "`shardwise bench --calibrate`"),
    "disk": Efficiency(1.0, "large parallel reads and writes over the drives' bandwidth",
        "the catalogue's figures of drives are measured ones"),
}  # fmt: skip
"""What holds for every accelerator that has no entry of its own."""

_HOPPER_ATTENTION = Efficiency(
    0.35,
    EFFICIENCIES["attention"].meaning,
    "arXiv 2407.08608, abstract: FlashAttention-2 on an H100",
)
_AZURE = "github:Azure/AI-benchmarking-guide, Azure_Results"
_B200_ATTENTION = Efficiency(
    0.15,
    EFFICIENCIES["attention"].meaning,
    f"{_AZURE}, ND GB200 v6: FlashAttention-2 at 374 TFLOP/s, heads of 128, 8,192 tokens",
)
_MI300X_MATMUL = Efficiency(
    0.44,
    EFFICIENCIES["matmul_best"].meaning,
    f"{_AZURE}, ND MI300X v5: 1,160 TFLOP/s in fp8 by hipBLASLt",
)
_MI300X_ATTENTION = Efficiency(
    0.25,
    EFFICIENCIES["attention"].meaning,
    f"{_AZURE}, ND MI300X v5: FlashAttention-2 at 329 TFLOP/s, heads of 64, 8,192 tokens",
)
_MI300X_MEMORY = Efficiency(
    0.78, EFFICIENCIES["memory"].meaning, f"{_AZURE}, ND MI300X v5: 4.1 TB/s by copies"
)
_HOPPER_MATMUL = Efficiency(
    0.72,
    EFFICIENCIES["matmul_sustained"].meaning,
    "meta-pytorch/float8_experimental#100: 551 to 591 TFLOP/s for bf16 matmuls of four shapes of "
    "a 70B model with tensor parallelism on an H100, best 794.5",
)

BY_FAMILY: Mapping[str, Mapping[str, Efficiency]] = {
    "H100": {"matmul_sustained": _HOPPER_MATMUL, "attention": _HOPPER_ATTENTION},
    "GH200": {"matmul_sustained": _HOPPER_MATMUL, "attention": _HOPPER_ATTENTION},
    "B200": {"attention": _B200_ATTENTION},
    "MI300X": {
        "matmul_best": _MI300X_MATMUL,
        "attention": _MI300X_ATTENTION,
        "memory": _MI300X_MEMORY,
    },
}
"""What differs for a family of accelerators; see Note [Refining the table]."""


def _fit(rows: str, **values: float) -> dict[str, Efficiency]:
    source = f"fitted on published step times by benchmarks/published.py: {rows}"
    return {n: Efficiency(v, EFFICIENCIES[n].meaning, source) for n, v in values.items()}


FITTED: Mapping[str, Mapping[str, Efficiency]] = {
    "A100": _fit("369 rows", matmul_sustained=0.85, attention=0.32, host_launch_s=25e-6),
    "V100": _fit("R520 R522 (launches: as the A100)", matmul_sustained=0.71, host_launch_s=25e-6),
    "H100": _fit("79 rows", matmul_sustained=0.80, attention=0.19, host_launch_s=25e-6),
}
"""What whole steps of a family's published runs come to; it goes before single measurements."""


def efficiencies_of(
    accelerator: Accelerator, overrides: Mapping[str, Efficiency]
) -> Mapping[str, Efficiency]:
    """Return the table for an accelerator, overrides last.

    **Raises** ConfigError for an unknown name, and for a share that is not in (0, 1].
    """
    for name, each in overrides.items():
        if name not in EFFICIENCIES:
            raise unknown("efficiency", name, {known: known for known in EFFICIENCIES})
        largest = math.inf if name.endswith("_s") else 1.0
        if not 0 < each.value <= largest or math.isinf(each.value):
            raise ConfigError(
                f"efficiency {name}={each.value}: expected more than 0"
                + ("" if largest > 1 else ", at most 1")
            )
    family = accelerator.family
    return {**EFFICIENCIES, **BY_FAMILY.get(family, {}), **FITTED.get(family, {}), **overrides}

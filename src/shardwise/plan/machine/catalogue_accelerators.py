"""The catalogue's accelerators, each figure with its source; see Note [Sources of the catalogue].

Note [Memory that the driver reports]
A driver keeps a part of the memory. Where a public report prints torch's "total capacity", that
is the figure; elsewhere it is the nominal capacity in GiB times the share of a card of its kind:
0.9894 for HBM (79.15 of 80 on an A100, 178.35 of 180 on a B200), 0.985 for GDDR6 (23.64 of 24 on
an RTX 4090), 0.925 where error correction takes a sixteenth of it (22.20 of 24 on an A10G).
"""

from collections.abc import Mapping

from shardwise.plan.machine.hardware import Accelerator, canonical_dtype

_GIB = 1 << 30
_TERA = 1e12
_HBM, _GDDR, _GDDR_ECC = 0.9894, 0.985, 0.925

_TFLOPS = "peak: stas compute/accelerator/README.md, TFLOPS comparison table"
_MAMF = "matmul: same chapter, Maximum Achievable Matmul FLOPS table"
_SPEED = "memory: same chapter, memory size and speed table"
_SHARE = "driver's share: Note [Memory that the driver reports]"


def _rates(**teraflops: float) -> dict[str, float]:
    return {canonical_dtype(name): rate * _TERA for name, rate in teraflops.items()}


def _gib(nominal: float, reported: float | None = None, share: float = _HBM) -> tuple[int, int]:
    """Return (bytes the driver reports, nominal bytes) of figures in GiB."""
    return int((reported or nominal * share) * _GIB), int(nominal * _GIB)


_V100 = _rates(fp32=15.7, fp16=125)
_A100 = _rates(fp32=19.5, tf32=156, bf16=312, fp16=312)
_A100_MATMUL = _rates(bf16=271.2, fp16=271.2)
_HOPPER = _rates(fp32=67, tf32=494.5, bf16=989, fp16=989, fp8=1979)
_H100_MATMUL = _rates(bf16=794.5, fp16=794.5, fp8=1402.6)
_H200_MATMUL = _rates(bf16=794.5, fp16=794.5, fp8=1453.4)
_B200 = _rates(fp32=80, tf32=1125, bf16=2250, fp16=2250, fp8=4500)
_GB200 = _rates(fp32=80, tf32=1250, bf16=2500, fp16=2500, fp8=5000)
_V100_SOURCE = f"NVIDIA V100 datasheet 1165301-r5 (SXM2: peak, 900 GB/s); {_SHARE}"
_A100_SOURCE = f"{_TFLOPS}; {_MAMF}; memory: NVIDIA A100 datasheet 1758950-r4"

_ALL = (
    Accelerator("V100-16GB", "V100", *_gib(16), _V100, 900e9, _V100_SOURCE,
                power_watts=300, link="nvlink2", host_link="pcie3", host="dgx2"),
    Accelerator("V100-32GB", "V100", *_gib(32, 31.74), _V100, 900e9,
                "NVIDIA V100 datasheet 1165301-r5 (SXM2: peak, 900 GB/s); driver: "
                "haotian-liu/LLaVA#812",
                power_watts=300, link="nvlink2", host_link="pcie3", host="dgx2"),
    Accelerator("A100-40GB", "A100", *_gib(40, 39.50), _A100, 1555e9,
                f"{_A100_SOURCE}; driver: TianheWu/CoSeR#10", _A100_MATMUL,
                power_watts=400, link="nvlink3", host="dgx-a100"),
    Accelerator("A100-80GB", "A100", *_gib(80, 79.15), _A100, 2039e9,
                f"{_A100_SOURCE}; driver: vllm-project/vllm#4408", _A100_MATMUL,
                power_watts=400, link="nvlink3", host="dgx-a100"),
    Accelerator("A800-80GB", "A100", *_gib(80, 79.33), _A100, 2039e9,
                "as the A100-80GB, with a slower NVLink; driver: hahnyuan/PB-LLM#3", _A100_MATMUL,
                power_watts=400, link="nvlink3-a800", host="dgx-a100"),
    Accelerator("A100-40GB-PCIe", "A100", *_gib(40, 39.50), _A100, 1555e9,
                f"{_A100_SOURCE}; driver: as the SXM card", _rates(bf16=252.9, fp16=252.9),
                power_watts=250, link="pcie4"),
    Accelerator("A100-80GB-PCIe", "A100", *_gib(80, 79.15), _A100, 1935e9,
                f"{_A100_SOURCE}; driver: as the SXM card", _rates(bf16=252.9, fp16=252.9),
                power_watts=300, link="pcie4"),
    Accelerator("H100-80GB", "H100", *_gib(80, 79.11), _HOPPER, 3350e9,
                f"{_TFLOPS}; {_MAMF}; {_SPEED}; driver: vllm-project/vllm#27508", _H100_MATMUL,
                power_watts=700, link="nvlink4", host_link="pcie5", host="dgx-h100"),
    Accelerator("H800-80GB", "H100", *_gib(80, 79.11), _HOPPER, 3350e9,
                "as the H100-80GB, with a slower NVLink; driver: as the H100-80GB", _H100_MATMUL,
                power_watts=700, link="nvlink4-h800", host_link="pcie5", host="dgx-h100"),
    Accelerator("H100-80GB-PCIe", "H100", *_gib(80, 79.11),
                _rates(fp32=51, tf32=378, bf16=756, fp16=756, fp8=1513), 2000e9,
                f"{_TFLOPS}; {_SPEED}; driver: as the SXM card",
                power_watts=350, link="pcie5", host_link="pcie5", host="server-ddr5"),
    Accelerator("H100-96GB-HBM2e", "H100", *_gib(96), _HOPPER, 2400e9,
                "github:pytorch/torchtitan at b5bcd76c, benchmarks/llama3_h100_202412_torchtitan.md"
                f" (96 GB HBM2e, 2.4 TB/s, limited to 500 W); peak: as the H100-80GB; {_SHARE}",
                power_watts=500, link="nvlink4", host_link="pcie5", host="dgx-h100"),
    Accelerator("H200", "H100", *_gib(141), _HOPPER, 4800e9,
                f"{_TFLOPS}; {_MAMF} (bf16: the H100's row); {_SPEED}; {_SHARE}", _H200_MATMUL,
                power_watts=700, link="nvlink4", host_link="pcie5", host="dgx-h100"),
    Accelerator("GH200-96GB", "GH200", *_gib(96), _HOPPER, 4000e9,
                f"{_TFLOPS}; {_MAMF} (the 141 GB version's); {_SPEED}; {_SHARE}",
                _rates(bf16=828.6, fp16=828.6, fp8=1535),
                power_watts=900, link="nvlink4", host_link="nvlink-c2c", host="grace"),
    Accelerator("GH200-141GB", "GH200", *_gib(141), _HOPPER, 4800e9,
                f"{_TFLOPS}; {_MAMF}; {_SPEED}; {_SHARE}",
                _rates(bf16=828.6, fp16=828.6, fp8=1535),
                power_watts=900, link="nvlink4", host_link="nvlink-c2c", host="grace"),
    Accelerator("B200", "B200", *_gib(180, 178.35), _B200, 7672e9,
                f"{_TFLOPS}; {_MAMF}; memory and driver: pytorch/ao#4002 (the datasheet says 8 "
                "TB/s)", _rates(bf16=1745, fp16=1745, fp8=3432.5),
                power_watts=1000, link="nvlink5", host_link="pcie5", host="server-ddr5"),
    Accelerator("GB200", "B200", *_gib(186), _GB200, 8000e9,
                f"{_TFLOPS}; {_MAMF}; {_SPEED}; {_SHARE}",
                _rates(bf16=1822, fp16=1822, fp8=3615.6),
                power_watts=1200, link="nvlink5", host_link="nvlink-c2c", host="nvl72"),
    Accelerator("GB300", "B200", *_gib(288, 288 * 15 / 16 * _HBM), _GB200, 8000e9,
                f"{_TFLOPS}; memory: the B300's, same chapter, of which a sixteenth is taken off "
                f"as on the B200 (180 of 192); {_SHARE}",
                power_watts=1400, link="nvlink5", host_link="nvlink-c2c", host="nvl72"),
    Accelerator("MI300X", "MI300X", *_gib(192),
                _rates(fp32=163.4, tf32=653.7, bf16=1307.4, fp16=1307.4, fp8=2614.9), 5300e9,
                f"{_TFLOPS} (unrounded: AMD MI300X datasheet); {_MAMF}; {_SPEED}; {_SHARE}",
                _rates(bf16=668.4, fp16=668.4),
                power_watts=750, link="xgmi", host_link="pcie5", host="server-ddr5"),
    Accelerator("L40S", "L40S", *_gib(48, 44.43),
                _rates(fp32=91.6, tf32=183, bf16=362, fp16=362, fp8=733), 864e9,
                f"{_TFLOPS}; memory: NVIDIA L40S datasheet; driver: DINGYANB/MTVCrafter#21 (an RTX "
                "6000 Ada, also 46,068 MiB)", power_watts=350, link="pcie4"),
    Accelerator("RTX4090", "RTX4090", *_gib(24, 23.64),
                _rates(fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2, fp8=330.3), 1008e9,
                "waredb.com, GeForce RTX 4090 (float32 accumulation, dense); driver: "
                "ali-vilab/VGen#104", power_watts=450, link="pcie4", host="desktop"),
    Accelerator("RTX4070Ti-SUPER", "RTX4090", *_gib(16, share=_GDDR),
                _rates(fp32=44.1, tf32=44.1, bf16=88.2, fp16=88.2, fp8=176.4), 672e9,
                "8,448 cores x 2.61 GHz x 2, others in the RTX 4090's ratios; memory: NVIDIA "
                f"product page, 256 bit x 21 Gb/s; {_SHARE}",
                power_watts=285, link="pcie4", host="desktop"),
    Accelerator("RTX3090", "RTX3090", *_gib(24, 23.70),
                _rates(fp32=35.6, tf32=35.6, bf16=71, fp16=71), 936e9,
                "NVIDIA Ampere GA102 whitepaper, appendix A (float32 accumulation, dense); driver: "
                "GaoLii/DSP#10", power_watts=350, link="pcie4", host="desktop"),
    Accelerator("A10G", "A10G", *_gib(24, 22.20), _rates(fp32=35, tf32=35, bf16=70, fp16=70), 600e9,
                "NVIDIA A10G datasheet (AWS G5; the A10, without G, has 31.2 and 125); driver: "
                "XavierXiao/Dreambooth-Stable-Diffusion#18", power_watts=300, link="pcie4"),
    Accelerator("A6000", "A6000", *_gib(48, share=_GDDR),
                _rates(fp32=38.7, tf32=77.4, bf16=154.8, fp16=154.8), 768e9,
                f"NVIDIA RTX A6000 datasheet (sparse figures halved); {_SHARE}",
                power_watts=300, link="pcie4"),
    Accelerator("TitanRTX", "TitanRTX", *_gib(24, share=_GDDR), _rates(fp32=16.3, fp16=130.5),
                672e9, f"NVIDIA Turing whitepaper, appendix A; {_SHARE}",
                power_watts=280, link="pcie3", host_link="pcie3", host="desktop"),
    Accelerator("TPUv5p", "TPUv5p", *_gib(95, 95), _rates(bf16=459), 2765e9,
                f"{_TFLOPS}; memory: Google Cloud TPU v5p documentation; what the runtime keeps "
                "was not found", link="ici-v5p", host="server-ddr4"),
    Accelerator("cpu", "cpu", *_gib(16, 16), _rates(fp32=50e-3, bf16=50e-3, fp16=50e-3), 10e9,
                "a place-holder for one rank on a small machine: measure with `shardwise bench "
                "--calibrate`", asynchronous=False, link="loopback", host_link="loopback",
                host="cpu"),
)  # fmt: skip

ACCELERATORS: Mapping[str, Accelerator] = {each.name: each for each in _ALL}

"""Cells of published rows are read by meaning: a cell written in another way says the same."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def flags() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import _published_flags

    yield _published_flags
    sys.path.remove(str(ROOT / "benchmarks"))


def _row(flags: ModuleType, **cells: str) -> object:
    return flags.Row({"id": "R1", **cells})


# For each meaning several ways to write it.
CHECKPOINTING = {
    "none": ["no", "none", "off", "False", "No AC", "w/o activation checkpointing", "disabled",
             "no recompute", "selective []", "without grad checkpointing"],
    "full": ["full", "yes", "Full AC", "full activation checkpointing", "grad checkpointing",
             "gradient checkpointing", "act ckpt", "recompute", "every layer", "full recompute",
             "activation-checkpointing: on", "transformer blocks"],
    "selective": ["selective", "selective AC", "core_attn", "selective recompute",
                  "selective core_attn", "partial", "selective activation recomputation"],
    "per_op": ["per-op SAC", "SAC", "selective op", "per op", "op-level", "selective (op)",
               "selective per-op AC"],
}  # fmt: skip
COMMENTS = [
    "", " (recipe default)", " (script default, verify)", " (per the config)", " [see notes]",
    " (8K stage)",
]  # fmt: skip
CASES = [str, str.upper, str.title, lambda text: text.replace(" ", "  "), lambda text: f" {text}."]


def test_a_way_of_checkpointing_is_known_however_it_is_written(flags) -> None:
    @given(
        st.sampled_from([(w, t) for w, texts in CHECKPOINTING.items() for t in texts]),
        st.sampled_from(COMMENTS),
        st.sampled_from(CASES),
    )
    def check(told: tuple[str, str], comment: str, written: object) -> None:
        way, text = told
        said, _, unknown = flags.checkpointing_of(written(text) + comment)
        assert said == way
        assert unknown == ()

    check()


EVERYTHING = (1.0, 1.0, 1.0, 0.0)
OFFLOAD = {
    (0.0, 0.0, 0.0, 0.0): ["", "no", "None", "off", "0% of optimizer->CPU", "no offload"],
    EVERYTHING: ["CPU offload", "FSDP CPU offload, fused optimizer", "full CPU offload", "all",
                 "params -> CPU", "params+optimizer->CPU (cpu_adam)", "everything on host",
                 "parameters, gradients and optimizer states to CPU RAM", "CPU (1.5 TB host)",
                 "offload to the CPU", "all states in host RAM"],
    (0.0, 0.0, 1.0, 0.0): ["optimizer->CPU", "Optimizer states to host", "optim to NVMe",
                           "optimizer → Grace CPU, speculative"],
    (0.0, 1.0, 1.0, 0.0): ["optimizer+grad->CPU", "gradients & optimizer to CPU"],
    (0.0, 0.0, 0.25, 0.0): ["25% of optimizer->CPU", "25 % of the optimizer states to CPU"],
    (0.0, 0.0, 1.0, 1.0): ["activations and optimizer in host memory where needed"],
}  # fmt: skip


def test_what_is_off_the_device_is_known_however_it_is_written(flags) -> None:
    @given(
        st.sampled_from([(w, t) for w, texts in OFFLOAD.items() for t in texts]),
        st.sampled_from([str, str.upper, str.title]),
    )
    def check(told: tuple[tuple[float, ...], str], written: object) -> None:
        parts, text = told
        away, unknown = flags.away_of(_row(flags, sharding="FSDP", offload=written(text)))
        assert (away.params, away.grads, away.optimizer, away.activations) == parts
        assert unknown == ()

    check()


def test_offload_under_stage_2_leaves_parameters_on_the_device(flags) -> None:
    away, _ = flags.away_of(_row(flags, sharding="DeepSpeed ZeRO-2", offload="CPU offload"))
    assert (away.params, away.optimizer) == (0, 1)
    away, _ = flags.away_of(_row(flags, sharding="ZeRO-2", system="DeepSpeed ZeRO-2, no offload"))
    assert not away.any


def test_stages_and_groups_are_known_however_they_are_written(flags) -> None:
    for stage, texts in {
        3: (
            "ZeRO-3",
            "zero3",
            "FSDP2(ZeRO-3)",
            "FSDP FULL_SHARD + CPU offload",
            "FSDP2+TP",
            "HSDP",
        ),
        2: ("ZeRO 2", "FSDP SHARD_GRAD_OP", "FSDP (ZeRO-2-like) + TP", "deepspeed stage 2"),
        1: ("ZeRO-1(dp2)+tp2+pp4", "distributed optimizer", "Dist-Opt", "sharded_ddp fp16"),
        0: ("DDP", "none", "FSDP NO_SHARD", "single GPU"),
        None: ("ZeRO stage not stated", "3D", "TP+PP, DP=1"),
    }.items():
        for text in texts:
            assert flags.stage_of(flags.plain(text)) == stage, text
    assert flags.group_of(flags.plain("ZeRO-1 within 8 GPUs (hybrid)")) == 8
    assert flags.group_of(flags.plain("FSDP group 64")) == 64
    assert flags.group_of(flags.plain("FSDP2")) is None


def test_a_ladder_has_all_that_comes_before_its_rung(flags) -> None:
    def rung(text: str) -> object:
        return flags.flags_of(_row(flags, system="torchtune", notes=f"cumulative ladder: {text}"))

    first, last = rung("+packed dataset"), rung("+8-bit AdamW")
    assert (first.checkpointing, first.compiled, first.loss) == ("none", None, None)
    assert (last.checkpointing, last.step_in_backward, last.optimizer) == ("full", True, "8bit")
    assert last.away.activations == 1
    lora, qlora = rung("LoRA"), rung("QLoRA")
    assert (lora.adapters, lora.checkpointing, lora.optimizer) == ("lora", "full", "")
    assert (qlora.adapters, qlora.away.activations, qlora.step_in_backward) == ("qlora", 1, False)


def test_a_system_named_after_an_adapter_does_not_overrule_its_row(flags) -> None:
    row = _row(flags, system="fsdp_qlora LoRA", notes="LoRA rank 64; no NVLink")
    assert (flags.flags_of(row).adapters, flags.flags_of(row).adapter_rank) == ("lora", 64)
    row = _row(flags, system="fsdp_qlora", model="Llama-2-7B LoRA", notes="PCIe")
    assert flags.flags_of(row).adapters == "lora"


def test_unknown_words_are_reported(flags) -> None:
    assert flags.checkpointing_of("selective frobnicate")[2] == ("frobnicate",)
    _, unknown = flags.away_of(_row(flags, sharding="FSDP", offload="CPU, gizmo"))
    assert unknown == ("gizmo",)


def test_any_text_is_read_without_failing(flags) -> None:
    @given(st.text(max_size=40), st.text(max_size=40))
    def check(one: str, other: str) -> None:
        names = ("sharding", "act_ckpt", "offload", "precision", "compile", "notes", "system")
        for name in names:
            flags.flags_of(_row(flags, **{name: one, names[0]: other}))

    check()

"""What a request says: keys, sizes, files, and how they decide batch, cluster and search."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cli.plan_setup import (
    assumed_notes,
    limits_of,
    padding_notes,
    set_up,
    space_of,
)
from shardwise.cli.run_settings import run_of, run_of_shape
from shardwise.errors import ConfigError
from shardwise.homes import Offload
from shardwise.keys import check_keys
from shardwise.plan.candidate import Candidate, planned_offload
from shardwise.plan.model.presets import find_preset, preset_names
from shardwise.plan.model.shaped import ShapedModel
from shardwise.plan.model.shapes import llama_shape
from shardwise.plan.planning import plan
from shardwise.plan.request import PlanRequest, SimulateRequest
from shardwise.quantities import parse_size
from shardwise.train.config import TrainConfig, dump_config, load_config
from shardwise.train.decoder import Decoder

TINY = "dim: 32\nlayers: 2\nheads: 2\nseq: 16\nvocab: 64\n"


def ask(**flags):
    return check_keys(PlanRequest, {}, flags, None, "plan")


def tiny(tmp_path, more=""):
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY + more)
    return str(path)


def set_up_tiny(tmp_path, more="", **flags):
    return set_up(tiny(tmp_path, more), ask(**flags))


# -- sizes and keys
@given(st.integers(0, 10**6), st.sampled_from(["", "K", "M", "G", "T"]), st.booleans())
def test_a_size_is_its_number_times_its_unit(number, unit, binary):
    power = " KMGT".index(unit or " ")
    factor = (1024 if binary and unit else 1000) ** power
    text = f"{number}{unit}{'i' if binary and unit else ''}B"
    assert parse_size(text) == parse_size(text.lower()) == number * factor


@pytest.mark.parametrize("text", ["", "x", "GiB", "nan", "inf", "1e999", "4 4GB", "1..2G"])
def test_what_is_no_size_is_told_with_an_example(text):
    with pytest.raises(ConfigError, match=r"--max-memory.*such as 40GiB"):
        ask(max_memory=text, search=True)


@pytest.mark.parametrize("flag", ["max_memory", "host_memory", "disk_space"])
def test_a_few_bytes_without_a_unit_are_refused_with_what_was_meant(flag):
    for value in ("40", 40, "512"):
        with pytest.raises(ConfigError, match=f"such as {value}GiB or {value}GB"):
            ask(search=True, **{flag: value})
    assert getattr(ask(search=True, **{flag: "80e9"}), flag) == 80 * 10**9
    assert getattr(ask(search=True, **{flag: "40B"}), flag) == 40


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"stage": 4}, ["--stage", "0, 1, 2 or 3", "got 4"]),
        ({"layout": "row"}, ["--layout", "did you mean 'rows'"]),
        ({"offload": "hots"}, ["--offload", "expected 'cpu'"]),
        ({"offload": "{optimiser: cpu}"}, ["'optimiser'", "optimizer"]),
        ({"activation_checkpointing": "ful"}, ["did you mean 'full'"]),
        ({"ranks": 0}, ["--ranks", "greater than 0"]),
        ({"ranks": 1 << 21}, ["--ranks", "less than or equal to"]),
        ({"seq": "nan"}, ["--seq", "whole number", "nan"]),
        ({"params": "nan"}, ["--params", "7e9"]),
        ({"tokens_per_step": "0"}, ["--tokens-per-step", "greater than 0"]),
        ({"max_memory": "0", "search": True}, ["--max-memory", "more than 0"]),
        ({"target_tokens_per_s": "inf", "search": True}, ["--target-tokens-per-s", "finite"]),
        ({"max_memory": "1GB"}, ["max_memory", "--search"]),
        ({"target_tokens_per_s": 3}, ["target_tokens_per_s", "--search"]),
        ({"params": "7e9", "search": True, "gpu": "h100"}, ["--gpu, --search"]),
        ({"accumulation": 2, "tokens_per_step": 8}, ["accumulation", "tokens_per_step"]),
        ({"deepspeed": "a", "accelerate": "b"}, ["not both"]),
        ({"micro_batch": 10**12}, ["--micro-batch", "1000000"]),
        ({"tokens_per_step": "4Ki4"}, ["--tokens-per-step"]),
        ({"stagee": 3}, ["'stagee'", "did you mean 'stage'"]),
    ],
)
def test_a_wrong_key_is_told_with_its_flag_and_what_is_allowed(flags, words):
    with pytest.raises(ConfigError) as error:
        ask(**flags)
    assert [word for word in words if word not in str(error.value)] == []


def test_tokens_may_be_counted_in_powers_of_two():
    for text, tokens in (("4Mi", 1 << 22), ("4M", 4 * 10**6), ("16ki", 1 << 14)):
        assert ask(tokens_per_step=text).tokens_per_step == tokens


def test_the_tokens_of_the_helps_example_make_a_step():
    setup = set_up("llama-3-8b", ask(ranks=64, tokens_per_step="4Mi"))
    assert setup.candidate.accumulation == 8
    with pytest.raises(ConfigError, match="take 4,194,304, or change"):
        set_up("llama-3-8b", ask(ranks=64, tokens_per_step="4M"))


def test_a_flag_goes_over_the_value_of_a_run(tmp_path):
    def found(more="", **flags):
        return set_up_tiny(tmp_path, more, **flags).candidate.offload

    assert (
        found("offload: cpu\n") == found(offload="cpu") == Offload("cpu", "cpu", "cpu", 1, "host")
    )
    assert found("offload: cpu\n", offload={}) == Offload()
    asked = "{optimizer: nvme, step_on: device}"
    assert found("offload: cpu\n", offload=asked) == Offload("device", "cpu", "nvme", 1, "device")


def test_ranks_that_do_not_fill_nodes_are_told_by_their_flag():
    with pytest.raises(ConfigError, match=r"--ranks=60: .*--gpus-per-node=8"):
        set_up("demo", ask(ranks=60))


def test_on_the_cpu_bytes_are_those_of_messages_between_two_ranks(tmp_path):
    for gpu, transport in (("cpu", "point_to_point"), ("h100", "coalesced")):
        assert set_up_tiny(tmp_path, ranks=2, gpu=gpu).candidate.transport == transport


@pytest.mark.parametrize(
    ("layout", "ranks", "is_told"), [("rows", 24, True), ("rows", 2, False), ("flat", 24, False)]
)
def test_padding_that_another_layout_saves_is_told(tmp_path, layout, ranks, is_told):
    setup = set_up_tiny(tmp_path, layout=layout, ranks=ranks)
    notes = padding_notes(plan(setup.model, setup.cluster, setup.candidate))
    assert [f"do not divide by {ranks} cost" in note for note in notes] == [True] * is_told


MIXTRAL = {
    **{"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336},
    **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000},
}


def test_the_layout_is_chosen_unless_it_was_given(tmp_path):
    """Rows of 8 experts over 64 ranks are padding for the most part."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTRAL))
    flags = {"ranks": 64, "seq": 4096, "activation_checkpointing": "full"}
    chosen, given = (set_up(str(path), ask(**flags, **more)) for more in ({}, {"layout": "rows"}))
    assert (chosen.candidate.layout, given.candidate.layout) == ("flat", "rows")
    assert any("layout flat is chosen" in note for note in chosen.notes)
    made, rows = (plan(s.model, s.cluster, s.candidate) for s in (chosen, given))
    assert made.verdict == "fits"
    assert rows.verdict == "will not fit"
    assert set_up("llama-3-8b", ask(ranks=8)).candidate.layout == "rows"  # which a run has
    assert set_up("llama-3-8b", ask(optimizer="muon")).candidate.layout == "matrices"
    assert set_up_tiny(tmp_path, ranks=24).candidate.layout == "rows"  # as the file's run has it
    path.write_text(json.dumps({**MIXTRAL, "model_type": "llama"}))
    with pytest.raises(ConfigError, match="leave --units out"):
        set_up(str(path), ask(units="LlamaDecoderLayer", kernels="compiled"))


def test_a_plan_names_the_kernels_that_it_assumes(tmp_path):
    told = {"kernels": "eager", "loss": "eager", "optimizer_kernel": "fused"}
    for name in told:
        flags = {key: value for key, value in told.items() if key != name}
        (note,) = assumed_notes(set_up("llama-3-8b", ask(ranks=8, **flags)))
        assert note.startswith(f"assumed: --{name.replace('_', '-')} {told[name]}; ")
    assert not assumed_notes(set_up("llama-3-8b", ask(ranks=8, **told)))
    assert not assumed_notes(set_up_tiny(tmp_path))


def test_a_simulation_has_no_keys_of_a_search():
    with pytest.raises(ConfigError, match="unknown key 'search'"):
        check_keys(SimulateRequest, {}, {"search": True}, None, "simulate")


# -- the batch
def test_the_batch_of_a_train_file_decides_accumulation(tmp_path):
    more = "ranks: 2\nmicro_batch: 4\nglobal_batch: 24\n"
    setup = set_up_tiny(tmp_path, more)
    assert (setup.candidate.micro_batch, setup.candidate.accumulation) == (4, 3)
    assert setup.tokens_per_step == 24 * 16
    assert setup.candidate.precision == "fp32"
    assert set_up_tiny(tmp_path, more, accumulation=5).candidate.accumulation == 5
    assert set_up_tiny(tmp_path, more, micro_batch=2).candidate.accumulation == 6
    assert set_up_tiny(tmp_path, more, tokens_per_step="4k").candidate.accumulation == 31
    own = "accumulation: 7\nranks: 2\nmicro_batch: 1\n"
    assert set_up_tiny(tmp_path, own, tokens_per_step=64).candidate.accumulation == 2
    longer = set_up_tiny(tmp_path, more, seq=32)
    assert longer.candidate.accumulation == 3
    assert longer.tokens_per_step == 24 * 32


def test_a_batch_that_ranks_do_not_divide_is_refused_by_its_name(tmp_path):
    with pytest.raises(ConfigError, match=r"global_batch: expected a multiple of 8 .*got 10"):
        set_up_tiny(tmp_path, "ranks: 2\nmicro_batch: 4\nglobal_batch: 10\n")
    with pytest.raises(ConfigError, match=r"tokens_per_step: expected a multiple of 128.*got 7"):
        set_up_tiny(tmp_path, ranks=8, tokens_per_step=7, micro_batch=1)


def test_a_file_whose_batch_does_not_agree_is_refused(tmp_path):
    more = "ranks: 2\nmicro_batch: 4\naccumulation: 2\nglobal_batch: 24\n"
    with pytest.raises(ConfigError, match=r"global_batch: 24 are not .*4 x accumulation 2 x 2"):
        set_up_tiny(tmp_path, more)
    assert set_up_tiny(tmp_path, more, accumulation=3).candidate.accumulation == 3


def test_a_search_with_the_batch_of_a_file_keeps_it(tmp_path):
    settings = tmp_path / "ds.json"
    settings.write_text(json.dumps({"train_batch_size": 32, "zero_optimization": {"stage": 2}}))
    request = ask(deepspeed=settings, search=True, ranks=8)
    setup = set_up(tiny(tmp_path), request)
    assert limits_of(setup).tokens_per_step == 32 * 16
    space = space_of(setup)
    assert tuple(space.stages) == (2,)
    assert tuple(space.micro_batches) == ()


def test_a_search_varies_what_a_train_file_leaves_out(tmp_path):
    space = space_of(set_up_tiny(tmp_path, "stage: 2\nranks: 4\n"))
    assert tuple(space.stages) == (2,)
    assert set(space.layouts) == {"rows", "flat"}
    assert tuple(space.micro_batches) == ()
    fixed = space_of(set_up_tiny(tmp_path, layout="flat", micro_batch=2, prefetch_bytes=0))
    assert tuple(fixed.layouts) == ("flat",)
    assert space_of(set_up_tiny(tmp_path, optimizer="muon")).layouts == ("matrices",)
    assert tuple(fixed.micro_batches) == (2,)
    assert tuple(fixed.prefetch_units) == (None,)
    assert {o.optimizer for o in space.offloads} == {"device", "cpu"}
    written = set_up_tiny(tmp_path, write=tmp_path / "planned.yaml")
    assert len(space_of(written).offloads) == 1


# -- files and names
def test_flags_win_over_files_and_what_a_file_says_in_vain_is_noted(tmp_path):
    settings = tmp_path / "ds.json"
    content = {
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 4,
    }
    settings.write_text(json.dumps(content))
    setup = set_up("demo", ask(deepspeed=settings, stage=1))
    assert (setup.candidate.stage, setup.candidate.precision) == (1, "bf16")
    assert setup.candidate.micro_batch == 4
    assert any("overlap_comm" in note for note in setup.notes)


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("lama-3-8b", {}, ["'llama-3-8b'"]),
        ("demo", {"gpu": "h10"}, ["'h10'", "H100"]),
        ("demo", {"link": "nvlnk4"}, ["'nvlnk4'", "nvlink4"]),
        ("demo", {"optimizer": "adamv"}, ["'adamv'", "'adam"]),
        ("demo", {"ranks": 8, "gpus_per_node": 3}, ["--gpus-per-node"]),
        ("demo", {"offload": "{params: cpu}"}, ["params='cpu'", "let optimizer= be 'cpu'"]),
        ("demo", {"offload": "{params: hots}"}, ["params='hots'", "'cpu' (host memory)"]),
        ("demo", {"dp_replicate": 3, "ranks": 8}, ["dp_replicate=3 does not divide 8 ranks"]),
        ("demo", {"tp": 3, "ranks": 8}, ["tp=3 does not divide 8 ranks", "make tp 1, 2, 4 or 8"]),
        ("none.yaml", {}, ["none.yaml", "No such file"]),
        ("none.py:make", {}, ["none.py", "no such file"]),
        ("none.py", {}, ["none.py:factory"]),
        ("some/model", {}, ["some/model", "Nothing is downloaded"]),
        (" ", {}, ["the name is empty"]),
        ("demo", {"deepspeed": "none.json"}, ["none.json"]),
        ("demo", {"calibration": "none.json"}, ["none.json"]),
        (None, {}, ["MODEL", "--params"]),
    ],
)
def test_a_name_that_is_not_there_is_told_with_what_is_near(name, flags, words):
    with pytest.raises(ConfigError) as error:
        setup = set_up(name, ask(**flags))
        setup.prices_of(setup.candidate)
        plan(setup.model, setup.cluster, setup.candidate)
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("dimm: 3\n", "tiny.yaml: unknown key 'dimm'; did you mean 'dim'"),
        (
            "accumulation: 3\naccumulation_order: breadth_first\n",
            "accumulation_order: plans have depth_first alone",
        ),
    ],
)
def test_a_train_file_that_has_no_plan_is_refused(more, told, tmp_path):
    with pytest.raises(ConfigError, match=told):
        set_up_tiny(tmp_path, more)


@pytest.mark.parametrize(
    "more",
    [
        "stage: 2\nlayout: flat\nbucket_bytes: 0\nreduce_every: step\n",
        "precision: bf16\ngather: int8\ngather_block: 32\nreduce: fp8-a2a\n",
        "offload: cpu\n",
        "offload: {optimizer: cpu, fraction: 0.5, step_on: device}\n",
        "offload: nvme:/ssd\nactivation_checkpointing: true\n",
        "optimizer_options: {moments: 8bit}\n",
        "optimizer_options: {moments: bf16}\n",
        "optimizer: sgd\noptimizer_options: {momentum: 0.9}\n",
        "pp: 2\npp_schedule: gpipe\naccumulation: 4\n",
        "tp: 2\ncp: 2\n",
        "cp: 2\ncp_method: heads\n",
        "dp_replicate: 2\nunits: Block\nprefetch_bytes: 0\n",
        "experts: 4\nep: 2\nglobal_batch: 64\n",
    ],
)
def test_a_plan_that_becomes_a_run_is_planned_as_the_same_again(more, tmp_path):
    first = set_up_tiny(tmp_path, f"{more}ranks: 4\n")
    assert first.config is not None
    path = tmp_path / "again.yaml"
    path.write_text(dump_config(run_of(first.candidate, first.config)))
    again = set_up(str(path), ask())
    assert again.candidate == first.candidate
    assert run_of(again.candidate, load_config(path, {})) == load_config(path, {})


# -- presets that `shardwise train` can train
def test_presets_of_the_decoders_kind_become_train_files_with_as_many_parameters():
    import torch

    found = []
    for name in preset_names():
        preset = find_preset(name)
        config = run_of_shape(preset.shape, preset.seq)
        if config is not None:
            found.append(name)
            assert config.vocab is not None
            with torch.device("meta"):
                decoder = Decoder(config.model_copy(update={"layers": 1}), config.vocab)
            shape = preset.shape
            expected = shape.num_params - (shape.layers - 1) * shape.layer_params()
            assert sum(p.numel() for p in decoder.parameters()) == expected
    assert {"demo", "llama-3-8b", "mistral-7b", "smollm-135m"} <= set(found)
    assert not {"gpt2", "qwen2.5-7b", "qwen3-8b", "gemma-7b", "mpt-7b"} & set(found)


@pytest.mark.parametrize(
    ("stage", "asked", "planned"),
    [
        (1, "cpu", Offload("device", None, "cpu")),
        (2, "nvme:/disk", Offload("cpu", None, "nvme:/disk")),
        (3, "cpu", Offload("device", None, "cpu")),
        (3, None, Offload(activations="cpu")),
        (1, "cpu", Offload("cpu", None, "cpu", 0.5, activations="cpu")),
        (3, {"activations": "cpu"}, Offload()),
    ],
)
def test_a_plan_of_another_stage_is_written_with_the_places_that_it_has(stage, asked, planned):
    candidate = Candidate(offload=planned)
    found = run_of(candidate, TrainConfig(stage=stage, offload=asked)).offload
    assert planned_offload(TrainConfig(stage=3, offload=found).offloaded) == candidate.offload


def test_a_width_that_the_decoder_cannot_have_is_no_train_file():
    assert run_of_shape(llama_shape(2, 64, 4, 2, 160, 100), 16) is not None
    assert run_of_shape(llama_shape(2, 64, 4, 2, 170, 100), 16) is None
    assert run_of_shape(llama_shape(2, 60, 4, 2, 160, 100), 16) is None


def test_a_search_that_traces_our_own_decoder_tries_finer_units(tmp_path):
    by_formulas = set_up_tiny(tmp_path, "ranks: 2\n", search=True)
    assert isinstance(by_formulas.model, ShapedModel)
    assert space_of(by_formulas).units == (None,)
    setup = set_up_tiny(tmp_path, "ranks: 2\ndropout: 0.1\n", search=True)
    choices = space_of(setup).units
    candidates = [replace(setup.candidate, units=units) for units in choices]
    names = [[u.name for u in setup.model.tape(c).units] for c in candidates]
    assert "blocks.0" in names[0]
    assert {"blocks.1.attention", "blocks.1.feed_forward"} <= {*names[1]}

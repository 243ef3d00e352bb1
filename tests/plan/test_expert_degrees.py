"""Expert parallelism in plans: held against runs of the built-in decoder, and what plans tell."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import call_command
from decoders import (
    SEQ,
    SHAPE,
    cluster_of_ranks,
    flops_of,
    make_model,
    make_plan,
    num_params_of,
)
from ranks import run_ranks
from shardwise.cli.plan_setup import padding_notes, set_up
from shardwise.cli.run_settings import run_of_shape
from shardwise.engine.schedule import Schedule
from shardwise.errors import ConfigError
from shardwise.plan.candidate import Candidate
from shardwise.plan.facts import plan_facts
from shardwise.plan.machine.hardware import make_cluster
from shardwise.plan.machine.pricing import Prices, RankGroup, all_to_all_seconds, send_seconds
from shardwise.plan.model.models import TracedModel, module_source
from shardwise.plan.model.shaped import ShapedModel
from shardwise.plan.model.shapes import DecoderShape, Experts
from shardwise.plan.model.tape import Tape, UnitWork, Visit
from shardwise.plan.request import PlanRequest
from shardwise.plan.searching import Limits, Space, search
from shardwise.train.config import TrainConfig, load_config
from shardwise.train.decoder import Decoder
from shardwise.train.setup import shard_decoder

run_plan = partial(call_command, "plan")

MIXED = replace(SHAPE, experts=Experts(8, 2, 96, shared=1, dense_layers=1))
VOCAB = 64
# Each token goes to all experts, so how many of them are another rank's does not depend on routing.
TINY: dict[str, Any] = {
    **{"dim": 48, "layers": 3, "heads": 4, "kv_heads": 2, "seq": 16, "micro_batch": 2},
    **{"experts": 6, "experts_per_token": 6, "expert_ffn_multiple": 2.0, "vocab": VOCAB},
    **{"shared_experts": 1, "dense_layers": 1},
}
DENSE = {"experts": 0, "dense_layers": 0}


# -- the order of what happens
VISITS = ("before_forward", "after_forward", "before_backward", "after_backward")


def told_to_the_schedule(
    rank: int, num_ranks: int, runs: list[dict[str, Any]]
) -> list[list[tuple[str, int]]]:
    """Return the visits of units that the engine tells its schedule of, in the second pass."""
    told: list[tuple[str, int]] = []
    plain = {name: getattr(Schedule, name) for name in VISITS}

    def listening(name: str) -> Any:
        def visit(schedule: Any, unit: Any, **given: Any) -> Any:
            told.append((name, unit.index))
            return plain[name](schedule, unit, **given)

        return visit

    for name in VISITS:
        setattr(Schedule, name, listening(name))
    found = []
    try:
        for run in runs:
            config = TrainConfig(**{**TINY, **run})
            axes = config.axes.over(num_ranks)
            with torch.device("meta"):
                model: Any = Decoder(config, config.vocab or VOCAB)
            model = shard_decoder(config, axes, model)
            for _ in range(2):
                told.clear()
                ids = torch.randint(VOCAB, (2, config.seq))
                model(ids, ids).backward()
            found.append(list(told))
    finally:
        for name, method in plain.items():
            setattr(Schedule, name, method)
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_tape_has_the_visits_that_the_engine_tells_its_schedule_of(num_ranks):
    """Embeddings and heads as large as a layer are units; experts begin with their layer."""
    runs: list[dict[str, Any]] = [
        {"ep": num_ranks},
        {"ep": num_ranks, "activation_checkpointing": True},
        {**DENSE, "vocab": 1024},
        {"ep": num_ranks, "tp": num_ranks, "vocab": 4096, "stage": 1},
        {"vocab": 4096, "tied_head": True},
        {**DENSE, "tied_head": True, "activation_checkpointing": True},
        {**DENSE, "layers": 1, "vocab": 4096},
        {"ep": num_ranks, "layers": 1, "dense_layers": 0},
        {"ep": num_ranks, "layers": 1, "dense_layers": 0, "activation_checkpointing": True},
    ]
    for run, told in zip(runs, run_ranks(told_to_the_schedule, num_ranks, runs)[0], strict=True):
        config = TrainConfig(**{**TINY, **run})
        axes = config.axes.over(num_ranks)
        checkpointing = "full" if config.activation_checkpointing else "none"
        candidate = Candidate(
            num_shards=axes.dp_shard,
            tp=axes.tp,
            ep=axes.ep,
            micro_batch=2,
            activation_checkpointing=checkpointing,
        )
        models: list[Any] = [ShapedModel("tiny", config.shape(config.vocab or VOCAB), config.seq)]
        if not config.experts:  # a trace shows no routing

            def build(checkpointed: bool, config: TrainConfig = config) -> Decoder:
                return Decoder(config, config.vocab or VOCAB)

            models.append(TracedModel(module_source("tiny", build, config.seq)))
        inputs = set[tuple[int, ...]]()  # of checkpointed blocks
        for model in models:
            visits = [e for e in model.tape(candidate).events if isinstance(e, Visit)]
            assert [(e.kind, e.unit) for e in visits] == told, run
            inputs.add(tuple(e.input_bytes for e in visits))
        assert len(inputs) == 1


# -- what a rank has
def tape_of(shape: DecoderShape, **settings: int) -> Tape:
    return ShapedModel("mixed", shape, SEQ).tape(Candidate(**settings))


@pytest.mark.parametrize("ep", [1, 2, 8])
def test_all_ranks_of_an_expert_group_have_the_whole_model(ep):
    tape = tape_of(MIXED, num_shards=8, ep=ep)
    spread = [u for u in tape.units if u.experts_over is not None]
    experts = sum(torch.Size(p.shape).numel() for u in spread for p in u.params)
    assert num_params_of(tape) + (ep - 1) * experts == MIXED.num_params
    assert [u.name for u in spread] == ["layers.1.experts", "layers.2.experts"] * (ep > 1)


@pytest.mark.parametrize("pp", [1, 3])
@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (2, 2), (1, 4), (4, 2)])
def test_flops_are_of_the_whole_model_whatever_the_degrees(tp, ep, pp):
    """Without ``ep`` ranks of one tensor group compute the same experts, which counts once."""
    shape = replace(MIXED, heads=4, kv_heads=4)
    split = make_plan(shape, num_shards=4, tp=tp, ep=ep, pp=pp)
    assert split.flops_per_step == make_plan(shape, num_shards=4).flops_per_step
    assert split.candidate.world_size == 4 * tp * pp
    assert split.tokens_per_step == 4 * SEQ


# -- what it tells
def test_a_plan_tells_the_expert_degree_its_tokens_and_what_it_assumes():
    made = make_plan(MIXED, num_shards=4, ep=4, accumulation=5)
    assert "ep 4" in made.candidate.label
    rows = SEQ * 2 * 3 // 4 * MIXED.dim * 2  # of two choices three of four are away; bf16
    once = 4 * rows + 8 * 2 * 3  # to experts and back, twice; counts of two experts for three ranks
    assert made.played.program.sent_bytes["ep.all_to_all"] == 5 * 2 * once
    assert made.played.program.num_collectives["ep.all_to_all"] == 5 * 2 * 5
    assert set(made.model_parallel_s) == {"expert"}
    assert 0 < made.model_parallel_s["expert"] < made.simulated.compute_s
    assert any("as many tokens to each expert" in note for note in made.notes)
    assert any("balanced routing: 0.75" in line for line in made.assumptions)
    facts = plan_facts(made)
    assert facts["candidate"]["ep"] == 4
    assert "ep.all_to_all" in facts["traffic"]["sent_bytes"]
    assert not make_plan(MIXED, num_shards=4).model_parallel_s


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"ranks": 6, "ep": 4}, "axes: ep=4 does not divide dp_shard x cp x tp = 6 x 1 x 1 = 6: m"),
        ({"ranks": 6, "ep": 0}, "ep: "),
        ({"params": "7e9", "ep": 2}, "an accounting without a model has no use for --ep"),
        ({"ranks": 6, "ep": 2}, "ep=2: expected a divisor of the model's experts, and it has none"),
    ],
)
def test_a_flag_that_does_not_fit_is_told(flags, words, capsys):
    given = [f"--{name}={value}" for name, value in flags.items()]
    model = [] if "params" in flags else ["llama-3-8b"]
    assert run_plan([*model, *given]) != 0
    assert words in capsys.readouterr().err


# -- time
def test_tokens_that_leave_the_node_take_longer():
    node = make_cluster("h100", 16).node
    inside, between = RankGroup(8, 8, 1), RankGroup(16, 8, 2)
    one = all_to_all_seconds(7 << 20, inside, node)
    assert one == send_seconds(7 << 20, False, node)
    assert all_to_all_seconds(15 << 20, between, node) == send_seconds(8 << 20, True, node)
    assert all_to_all_seconds(1 << 20, RankGroup(1, 1, 1), node) == 0
    settings: dict[str, Any] = {"num_shards": 4, "ep": 4, "micro_batch": 1024}
    made = [make_plan(MIXED, make_cluster("h100", 4, per), **settings) for per in (4, 2, 1)]
    seconds = [each.model_parallel_s["expert"] for each in made]
    assert seconds[0] < seconds[1] < seconds[2]


@pytest.mark.parametrize(
    ("degrees", "placed"),
    [
        (
            {"num_shards": 4, "num_replicas": 2, "cp": 2, "tp": 2, "ep": 8},
            {
                "ep": RankGroup(8, 8, 1),
                "efsdp": RankGroup(2, 1, 2),
                "replicate": RankGroup(2, 1, 2),
            },
        ),
        ({"num_shards": 16, "tp": 2, "ep": 2}, {"efsdp": RankGroup(16, 4, 4)}),
        (  # context ranks shard too
            {"num_shards": 8, "num_replicas": 2, "tp": 4, "cp": 2, "pp": 2},
            {
                "tensor": RankGroup(4, 4, 1),
                "context": RankGroup(2, 2, 1),
                "shard": RankGroup(16, 2, 8),
            },
        ),
    ],
)
def test_groups_are_placed_as_the_axes_are(degrees, placed):
    """``ep`` are neighbours, and those that have the same experts lie so many ranks apart."""
    candidate = Candidate(**degrees)
    groups = Prices(make_cluster("h100", candidate.world_size), candidate).groups
    assert {axis: groups[axis] for axis in placed} == placed


# -- search, and what is written
def test_a_search_keeps_the_expert_degree_and_says_where_it_does_not_fit():
    space = Space(
        Candidate(ep=8), stages=(3,), micro_batches=(1,), degrees=((1, 1, 1), (1, 2, 1), (2, 1, 1))
    )
    result = search(make_model(MIXED), cluster_of_ranks(8), space)
    assert result.pareto
    assert all(made.candidate.ep == 8 for made in result.pareto)
    reasons = [rejected.reason for rejected in result.rejected]
    assert any("ep=8: expected a divisor of dp_shard x cp x tp" in why for why in reasons)


def test_a_shape_with_experts_is_that_of_a_run():
    config = run_of_shape(MIXED, SEQ)
    assert config is not None and config.shape(MIXED.vocab) == MIXED


def test_a_search_for_a_run_fills_pipelines_or_says_why_not():
    model, cluster = make_model(replace(SHAPE, layers=4)), cluster_of_ranks(4)
    space = Space(
        Candidate(), stages=(1,), micro_batches=(1, 4), degrees=((1, 4, 1),), fills_pipelines=True
    )
    assert all(p.candidate.accumulation == 4 for p in search(model, cluster, space).pareto)
    result = search(model, cluster, space, Limits(tokens_per_step=8 * SEQ))
    assert {p.candidate.accumulation for p in result.pareto} == {8}
    words = "a run of 4 pipeline stages takes 4 micro-batches or more, and 512 tokens a step make 2"
    assert words in {rejected.reason for rejected in result.rejected}


def test_a_searched_and_written_pipeline_can_run(tmp_path, capsys):
    planned = tmp_path / "planned.yaml"
    words = "demo --ranks 2 --search --tp 1 --pp 2 --cp 1 --stage 1 --micro-batch 1 --write"
    assert run_plan([*words.split(), str(planned)]) == 0
    config = load_config(planned, {})
    assert (config.pp, config.accumulation) == (2, 2)
    planned.unlink()
    assert run_plan([*words.split(), str(planned), "--accumulation", "1"]) != 0
    assert "accumulation: expected at least pp 2" in capsys.readouterr().err
    assert not planned.exists()


# -- configs
MIXTRAL: dict[str, Any] = {
    **{"model_type": "mixtral", "num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 320},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96},
    **{"num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 64},
}


def config_file(folder: Path) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(MIXTRAL))
    return path


def test_a_config_with_experts_is_one_model_whatever_the_expert_degree(tmp_path):
    """Each has the activations of the same layers: spread or not, as many rows come as go."""
    path = str(config_file(tmp_path))
    setups = [set_up(path, PlanRequest(ranks=4, ep=ep, seq=SEQ)) for ep in (1, 2, 4)]
    assert {type(setup.model) for setup in setups} == {ShapedModel}
    tapes = [setup.model.tape(setup.candidate) for setup in setups]
    places = 2 * 8 * 2 * SEQ * MIXTRAL["num_hidden_layers"]  # of the rows that have come
    works = [[e for e in tape.events if isinstance(e, UnitWork)] for tape in tapes]
    one, two, four = (
        sum(w.net.activations for w in each if w.phase in ("forward", "loss")) for each in works
    )
    assert two == four == one + places
    assert len({flops_of(tape) for tape in tapes}) == 1


def test_a_written_pipeline_of_a_config_with_experts_can_run(tmp_path):
    """Stages hand on no auxiliary loss: experts are balanced by biases, unless a file decides."""
    planned, start = tmp_path / "planned.yaml", tmp_path / "start.yaml"
    words = ["--ranks", "4", "--pp", "2", "--accumulation", "2", "--write", str(planned)]
    assert run_plan([str(config_file(tmp_path)), *words]) == 0
    config = load_config(planned, {})
    assert (config.pp, config.expert_balance, config.expert_bias) == (2, 0.0, True)
    assert run_plan([str(config_file(tmp_path)), *words[:2], *words[-2:]]) == 0
    assert load_config(planned, {}).expert_balance > 0
    start.write_text("".join(f"{key}: {value}\n" for key, value in TINY.items()))
    assert run_plan([str(start), *words]) == 0
    assert load_config(planned, {}).expert_bias
    start.write_text(start.read_text() + "expert_balance: 0.5\n")
    assert run_plan([str(start), *words]) != 0


def test_every_rank_of_a_tensor_group_scores_all_tokens():
    """A larger router costs as much on each rank of a tensor group as on one alone."""

    def flops(num: int, tp: int) -> int:
        shape = replace(MIXED, experts=Experts(num, 2, 96))
        return flops_of(tape_of(shape, tp=tp))

    assert flops(16, 2) - flops(8, 2) == flops(16, 1) - flops(8, 1) > 0


def test_padding_is_told_with_the_ranks_that_share_rows():
    made = make_plan(MIXED, num_shards=4, cp=2, tp=2, ep=2)
    (note,) = padding_notes(made)
    assert "do not divide by 8, and experts by 8, cost" in note
    assert made.candidate.expert_shards == 8


def test_a_search_refuses_an_expert_degree_that_fits_nothing_before_it_plays():
    space = Space(Candidate(ep=3), degrees=((1, 1, 1), (1, 2, 1), (2, 1, 1)))
    with pytest.raises(ConfigError, match="ep=3: expected a divisor of the model's 8 experts"):
        search(make_model(MIXED), cluster_of_ranks(24), space, progress=pytest.fail)


def test_a_search_varies_prefetch_where_context_or_expert_ranks_share_state():
    """One shard alone has peers in a context group, and experts in a tensor group."""
    for degrees, ep in (((1, 1, 4), 1), ((4, 1, 1), 2)):
        space = Space(Candidate(ep=ep), stages=(3,), micro_batches=(1,), degrees=(degrees,))
        shape = replace(MIXED, heads=4, kv_heads=4)
        result = search(make_model(shape), cluster_of_ranks(4), space)
        tried = [p.candidate for p in result.pareto] + [r.candidate for r in result.rejected]
        assert len({candidate.prefetch_bytes for candidate in tried}) > 1

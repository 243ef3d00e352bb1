"""Tensor, pipeline and context degrees, long windows and noise: what a plan makes of them."""

import json
from dataclasses import replace
from functools import partial

import pytest

from commands import call_command
from decoders import SEQ, SHAPE, cluster_of_ranks, make_model, make_plan
from shardwise.errors import ConfigError
from shardwise.homes import Offload
from shardwise.plan.candidate import Candidate
from shardwise.plan.facts import plan_facts
from shardwise.plan.machine.hardware import make_cluster
from shardwise.plan.machine.pricing import Prices, send_seconds
from shardwise.plan.model.shaped import ShapedModel
from shardwise.plan.model.shapes import Experts, gpt_shape
from shardwise.plan.planning import plan, time_rows
from shardwise.plan.step.play import play
from shardwise.plan.timing.simulate import simulate

run_simulate = partial(call_command, "simulate")

DEEP = replace(SHAPE, layers=8)
MIXED = replace(SHAPE, experts=Experts(8, 2, 96, shared=1, dense_layers=1))
ALL_DENSE = replace(MIXED, experts=Experts(8, 2, 96, dense_layers=3))
COUNTS = ("tp", "pp", "micro_batch", "accumulation")
BOUNDARY = SEQ * SHAPE.dim * 2  # bytes of the stream, one window in bf16


# -- pipelines
@pytest.mark.parametrize("accumulation", [1, 2, 3, 9])
@pytest.mark.parametrize("stages", [2, 4])
def test_a_pipeline_is_as_slow_as_its_slowest_stage_and_filled_once(accumulation, stages):
    """Clipping and the optimizer come once; short windows have fewer sums of gradients."""
    made = make_plan(DEEP, num_shards=2, pp=stages, accumulation=accumulation, stage=1)
    through = accumulation + stages - 1
    tapes = make_model(DEEP).stages(made.candidate).values()
    candidate = replace(made.candidate, accumulation=through)
    seconds = Prices(made.cluster, made.candidate).seconds
    stage_s = [simulate(play(tape, candidate).program, seconds).step_s for tape in tapes]
    crosses = stages * 2 > 8
    sends_s = through * 2 * send_seconds(BOUNDARY, crosses, made.cluster.node)
    assert made.sends_s == pytest.approx(sends_s)
    assert made.step_s == pytest.approx(
        max(stage_s) + sends_s, rel=1e-6 if accumulation > 2 else 0.01
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_a_pipeline_gathers_and_reduces_once_a_step_whatever_the_micro_batches(stage):
    """As its runs do: see tests/interop/test_pipeline_schedules.py."""
    one, four, alone = (
        make_plan(DEEP, num_shards=2, stage=stage, pp=pp, accumulation=num)
        for pp, num in ((2, 1), (2, 4), (1, 4))
    )
    kinds = ("shard.all_gather", "shard.reduce_scatter")
    found = [[plan.played.program.num_collectives[k] for k in kinds] for plan in (one, four, alone)]
    assert found[0] == found[1]
    assert found[2][1] > found[1][1]
    first, last = (sum(plan.played.program.sent_bytes[k] for k in kinds) for plan in (one, four))
    assert first == pytest.approx(last, rel=0.01)  # the figures are of one end stage or the other


def test_gpipe_takes_as_long_as_1f1b_and_has_all_micro_batches_in_flight():
    """The difference of each stage is what so many more micro-batches keep; logits on the last."""
    model = ShapedModel("deep", DEEP, SEQ)
    cluster = cluster_of_ranks(4)

    def peaks(schedule: str, num: int) -> tuple[list[int], float]:
        candidate = Candidate(pp=4, accumulation=num, pp_schedule=schedule, micro_batch=64)
        found = [
            max(m.ledger.activations for m in play(model.tape(candidate, stage), candidate).peaks)
            for stage in range(4)
        ]
        return found, plan(model, cluster, candidate).step_s

    few, few_s = peaks("1f1b", 8)
    many, many_s = peaks("gpipe", 8)
    more, _ = peaks("gpipe", 9)
    assert many_s == pytest.approx(few_s)
    assert all(gpipe > one for gpipe, one in zip(many, few, strict=True))
    each = [after - before for after, before in zip(more, many, strict=True)]
    logits = 64 * SEQ * SHAPE.vocab
    assert each[3] > each[1] + 4 * logits  # in float32 at least
    assert each[1] == each[2] > 0


@pytest.mark.parametrize(
    ("dense", "vocab", "shown", "largest"),
    [(0, 64, {0, 1, 3}, 0), (3, 64, {0, 1, 2, 3}, 2), (0, 100_000, {0, 1, 3}, 3)],
)
def test_every_stage_that_no_other_is_like_is_planned(dense, vocab, shown, largest):
    """With dense layers first, one in the middle that has experts is the largest."""
    experts = Experts(8, 2, 640, dense_layers=dense)
    shape = replace(DEEP, experts=experts, vocab=vocab)
    made = make_plan(shape, pp=4, accumulation=4, micro_batch=256)
    model = make_model(shape)
    assert set(model.stages(made.candidate)) == shown
    totals = [
        play(model.tape(made.candidate, i), replace(made.candidate, accumulation=3)).peak
        for i in range(4)
    ]
    sizes = [peak.ledger.total for peak in totals]
    assert made.played.peak.ledger.total == max(sizes) == sizes[largest]
    if dense:
        assert max(sizes) > 1.2 * max(sizes[0], sizes[-1])
        assert any("pipeline stage 3 of 4" in note for note in made.notes)


# -- tensor and context
def test_state_is_sharded_and_gradients_reduced_over_context_ranks_too():
    state = ("param_shards", "grad_shards", "optimizer_state")
    split = make_plan(num_shards=4, cp=2)
    plain = make_plan(num_shards=8)
    held = [[p.played.device.lines()[name] for name in state] for p in (split, plain)]
    assert held[0] == held[1]
    assert sum(held[0]) == pytest.approx(12 * SHAPE.num_params / 8, rel=0.01)
    alone = make_plan(num_shards=1, cp=2)
    for made in (split, alone):
        assert made.played.program.sent_bytes["shard.reduce_scatter"] > 0
    assert split.candidate.world_size == 8
    assert split.tokens_per_step == 4 * SEQ


def test_traffic_of_tensor_and_context_ranks_is_counted_and_timed():
    made = make_plan(num_shards=2, tp=2, cp=2, accumulation=5)
    sent, num = made.played.program.sent_bytes, made.played.program.num_collectives
    # Two all-reduces forward and two backward, each 2 (t - 1) / t of the part of the stream.
    one = 2 * (2 - 1) * (SEQ // 2) * SHAPE.dim * 2 // 2
    assert sent["tp.sent"] == 5 * SHAPE.layers * 4 * one
    assert num["tp.sent"] == 5 * SHAPE.layers * 4
    assert sent["cp.all_gather"] == sent["cp.all_to_all"] > 0
    assert set(made.model_parallel_s) == {"tensor", "context"}
    assert 0 < sum(made.model_parallel_s.values()) < made.simulated.compute_s
    assert not make_plan(num_shards=2).model_parallel_s


def test_ways_of_attention_are_priced_by_what_they_send():
    """Fewer bytes by heads than gathered, for many key heads; a ring sends gradients in float32."""
    shape = replace(SHAPE, heads=8, kv_heads=8, head_dim=SHAPE.dim // 8)
    methods = ("gather", "heads", "ring")
    made = {m: make_plan(shape, cp=8, cp_method=m, micro_batch=4096) for m in methods}
    seconds = {m: each.model_parallel_s["context"] for m, each in made.items()}
    sent = {
        m: sum(n for name, n in each.played.program.sent_bytes.items() if name.startswith("cp."))
        for m, each in made.items()
    }
    assert sent["heads"] < sent["gather"] < sent["ring"]
    assert 0 < seconds["heads"] < seconds["gather"] < seconds["ring"]
    assert "cp 8, cp method heads" in made["heads"].candidate.label
    assert "method" not in made["gather"].candidate.label


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        ({"tp": 3}, ["tp=3", "4 heads"]),
        ({"tp": 8}, ["tp=8", "4 heads"]),
        ({"pp": 4}, ["pp=4", "3 layers"]),
        ({"cp": 3}, ["cp=3", "64 tokens"]),
        ({"cp": 8, "cp_method": "heads"}, ["cp=8", "4 heads", "gather"]),
        ({"cp": 4, "tp": 2, "cp_method": "heads"}, ["cp=4", "2 heads", "gather"]),
        ({"cp": 64, "cp_method": "ring"}, ["cp=64", "2 x cp", "64 tokens", "gather"]),
        ({"num_shards": 3, "ep": 3}, ["ep=3", "8 experts"]),
        ({"num_shards": 2, "ep": 4}, ["ep=4", "dp_shard x cp x tp = 2 x 1 x 1"]),
        ({"num_shards": 2, "ep": 2, "shape": SHAPE}, ["ep=2", "experts, and it has none"]),
        ({"num_shards": 2, "ep": 2, "shape": ALL_DENSE}, ["ep=2", "experts, and it has none"]),
        *(({name: 0}, [f"{name} must be at least 1, got 0"]) for name in COUNTS),
    ],
)
def test_a_degree_that_the_shape_cannot_have_is_refused(degrees, words):
    shape, candidate = degrees.pop("shape", MIXED), Candidate(**degrees)
    with pytest.raises(ConfigError) as error:
        make_model(shape).tape(candidate)
    assert all(word in str(error.value) for word in words)


def test_key_heads_may_be_fewer_than_tensor_ranks_and_a_vocabulary_is_padded():
    made = make_plan(replace(SHAPE, kv_heads=2, vocab=321), tp=4)
    table = next(iter(make_model(replace(SHAPE, vocab=321)).tape(made.candidate).units[0].params))
    assert table.shape[0] == 81
    with pytest.raises(ConfigError, match=r"tp=2.*3 key-value heads"):
        make_plan(replace(SHAPE, heads=6, kv_heads=3), tp=2)


# -- long windows
def test_a_long_window_says_how_much_of_it_was_simulated():
    made = make_plan(num_shards=4, accumulation=16)
    time = plan_facts(made)["time"]
    assert (time["num_simulated_micro_batches"], time["num_micro_batches"]) == (3, 16)
    assert time["simulated_s"] < time["step_s"]
    share = made.simulated.exposed_s / made.simulated.step_s
    assert made.exposed_s == pytest.approx(share * made.step_s)
    assert time["step_exposed_communication_s"] == made.exposed_s


@pytest.mark.parametrize(
    "settings",
    [
        {"num_shards": 4, "accumulation": 2},
        {"num_shards": 2, "num_replicas": 2, "stage": 2},
        {"num_shards": 2, "offload": Offload("cpu", None, "nvme"), "accumulation": 2},
        {"num_shards": 2, "tp": 2, "pp": 3},
    ],
)
def test_the_lines_of_the_time_table_add_up(settings):
    made = make_plan(**settings)
    rows = time_rows(made)
    seconds = {row.name: row.seconds for row in rows if not row.is_part}
    names = ("computing", "waiting for communication", "waiting for offload", "idle")
    assert sum(seconds.get(name, 0.0) for name in names) == pytest.approx(seconds["all of it"])
    assert seconds["all of it"] == pytest.approx(made.simulated.step_s)
    parts: dict[str, list[float]] = {}
    for row in rows:
        if not row.is_part:
            head = parts.setdefault(row.name, [])
        elif not row.name.startswith("of it"):
            head.append(row.seconds)
    assert sum(parts["computing"]) == pytest.approx(seconds["computing"])
    facts = plan_facts(made)["time"]
    keys = ("compute_s", "exposed_communication_s", "exposed_offload_s", "idle_s")
    assert sum(facts[key] for key in keys) == pytest.approx(facts["simulated_s"])


# -- the simulate command
def test_positions_beside_an_embedding_that_is_a_unit_are_reduced_once_a_step():
    """The embedding's backward writes their gradient, which is the root's."""
    model = make_model(gpt_shape(4, 64, 4, 4096, positions=SEQ))
    moved = set()
    for accumulation in range(1, 5):
        offload = Offload(optimizer="cpu", params="cpu")
        candidate = Candidate(num_shards=2, pp=2, accumulation=accumulation, offload=offload)
        tape = model.tape(candidate)
        moved.add(play(tape, candidate).program.copied_bytes["to_host"])
        assert [unit.name for unit in tape.units[:2]] == ["", "embedding"]
    assert len(moved) == 1


def test_a_save_takes_what_the_hosts_link_takes(capsys):
    found = []
    for gpu in ("a100", "gh200"):  # PCIe 4 beside NVLink-C2C
        arguments = f"llama-3-8b --ranks 16 --gpu {gpu} --tp 2 --mtbf-hours 1000"
        assert run_simulate([*arguments.split(), "--json"]) == 0
        goodput = json.loads(capsys.readouterr().out)["goodput"]
        assert goodput["mtbf_s"] == 1000 * 3600 / 16  # all devices may fail
        found.append(goodput["checkpoint_fraction"] / goodput["kept_fraction"])
    host = [make_cluster(gpu, 8).node.host.device_link for gpu in ("a100", "gh200")]
    rates = [link.achieved_bytes_per_s for link in host]
    assert found[0] / found[1] == pytest.approx(rates[1] / rates[0], rel=0.02)

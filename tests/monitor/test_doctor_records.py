"""Rules on records written by hand: what needs a device that is not here, and where each abstains.

Each test takes a healthy record and changes what the failure changes.
"""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from records import facts, write_record
from shardwise.errors import ConfigError
from shardwise.monitor.doctor import LiveDoctor, diagnose
from shardwise.monitor.findings import (
    Change,
    Finding,
    Gain,
    finding_docs,
    read_docs,
)
from shardwise.monitor.lateness import Late
from shardwise.monitor.lines import JsonLines, read_lines
from shardwise.monitor.metrics import GIB, OverRanks
from shardwise.monitor.record import (
    Begin,
    End,
    Fix,
    IdleScheduler,
    LostUpdates,
    Memory,
    Moment,
    NoGradient,
    NonFinite,
    OtherSave,
    OutOfMemory,
    RunRecord,
    Save,
    SkippedSteps,
    StepLine,
    Timeline,
    keys_of,
    read_ends,
    read_line,
    read_run,
)
from shardwise.processes import own_process
from shardwise.unit_facts import UnitFacts

LAYER = 400 << 20
HOSTS = ("a",) * 4 + ("b",) * 4
HEALTHY = {  # of all ranks alike: an accelerator, steps of a second
    "time_metrics/end_to_end(s)": 1.0,
    "time_metrics/data_loading(s)": 0.01,
    "time_metrics/compute(s)": 0.95,
    "time_metrics/outside(s)": 0.01,
    "time_metrics/optimizer(s)": 0.03,
    "offload/optimizer(ms)": 0.0,
    "checkpoint/stall(s)": 0.0,
    "checkpoint/save(s)": 0.0,
    "comm/exposed(ms)": 40.0,
    "comm/waited(ms)": 40.0,
    "comm/num_collectives": 50.0,
    "comm/shard(s)": 0.5,
    "comm/shard_sent(MiB)": 50_000.0,
    "memory/max_active(GiB)": 50.0,
    "memory/max_active(%)": 62.5,
    "memory/max_reserved(GiB)": 55.0,
    "memory/num_alloc_retries": 0.0,
    "memory/num_ooms": 0.0,
    "optimizer/skipped_steps": 0.0,
    "host/waits_for_core(s)": 0.001,
    "tokens/behind_longest(%)": 0.0,
    "tokens/per_step": 8000.0,
    "numbers/non_finite_values": 0.0,
    "numbers/non_finite_gradients": 0.0,
    "time_metrics/forward(s)": 0.3,
    "time_metrics/recompute(s)": 0.0,
    "time_metrics/evaluation(s)": 0.0,
    "time_metrics/paused(s)": 0.02,
    "memory/in_use(GiB)": 40.0,
    "memory/host(GiB)": 4.0,
    "data/shared_inputs(%)": 0.0,
    "data/rows_of_a_pass": 8000.0,
    "host/reads_of_values": 2.0,
    "numbers/dropouts_off(%)": 0.0,
    "numbers/kept_gradients": 0.0,
    "numbers/gradient_norm": 1.5,
    "numbers/clipped_to": 1.0,
}


def unit(name, **other):
    told = {"full_bytes": LAYER, "rank_bytes": LAYER // 8, "padding_bytes": 0, "layout": "rows"}
    return UnitFacts(
        name, "Block", 12, LAYER // 4, **{**told, "dtype": "float32 (computes in bfloat16)"} | other
    )


def memory_line(engine_gib, other_gib):
    moment = Moment("b", "", {"param_full": int(engine_gib * GIB)}, int(other_gib * GIB))
    files = {"layers.0": {"optimizer_state": 8 * GIB}}
    return Memory(3, [moment], 0, {"device": {}, "host": {}, "files": files})


def run_of(changes=None, memory=None, values=None, waited_for=None, **of_facts):
    metrics = {
        name: value if isinstance(value, OverRanks) else alike(value)
        for name, value in {**HEALTHY, **(changes or {})}.items()
    }
    lines = tuple(
        StepLine(n, 1, float(n), metrics, values or {"loss": 2.0}, waited_for or {})
        for n in range(1, 16)
    )
    own = {0: (memory or memory_line(30, 20), *no_gradient(0), End(15, None))}
    told = {"device": "NVIDIA H100", "units": layers(200), "hosts": HOSTS, **of_facts}
    return RunRecord(Path("x"), facts(num_ranks=8, **told), lines, own, idle_s=5.0)


def no_gradient(count, share=0.0, trained=0):
    """Return the lines of three checks that found so many parameters without a gradient."""
    names = [f"layers.{n}.weight" for n in range(count)]
    return [NoGradient(step, names[:8], count, share, trained) for step in (3, 5, 8)]


def waits(pairs):
    """Return the waits of ranks for each other, in ms by pair."""
    found = {}
    for (one, other), ms in pairs.items():
        found.setdefault(one, {})[other] = ms + 1.0
        found.setdefault(other, {})[one] = ms
    return found


def longer(percent, rank=5):
    """Let the batches of a rank have more tokens."""
    return {"tokens/behind_longest(%)": OverRanks(0, percent, percent, rank, 2)}


def codes(run):
    return [finding.code for finding in diagnose(run).findings]


def layers(count, prefix="layers.", **other):
    return tuple(unit(f"{prefix}{number}", **other) for number in range(count))


def with_lines(*lines):
    """Return a run of whose rank 0 only these lines are known."""
    return replace(run_of(), by_rank={0: lines})


def ended(error, **other):
    return replace(End(8, error, 1.0, "x", None, 9, "forward", "layers.0"), **other)


def saved(stall_s, save_s):
    return {"checkpoint/stall(s)": stall_s, "checkpoint/save(s)": save_s}


def lost(percent, of_worst):
    return {"numbers/lost_updates(%)": percent, "numbers/lost_updates_of_worst(%)": of_worst}


def alike(value):
    """Return a figure that all ranks have."""
    return OverRanks(value, value, value, 0, 0)


def each_line(run, change, **other):
    """Let ``change`` return other metrics of each line, by its number and those that it has."""
    lines = ((line, change(n, line.metrics)) for n, line in enumerate(run.steps))
    return replace(run, steps=tuple(replace(line, metrics=m, **other) for line, m in lines))


def over_time(run, line_s, saves=()):
    """Let a line come every so many seconds, and be of so many steps, some with a save."""
    one = saved(alike(0.001), alike(0.001))
    run = each_line(run, lambda n, m: {**m, **(one if n in saves else {})}, num_steps=int(line_s))
    return replace(run, steps=tuple(replace(x, at_s=line_s * (x.step - 1)) for x in run.steps))


def in_turn(run):
    """Let another rank be the least in each line."""

    def turned(n, metrics):
        ranks = {"min_rank": n % 8, "max_rank": (n + 1) % 8}
        return {name: replace(value, **ranks) for name, value in metrics.items()}

    return each_line(run, turned)


def growing(name, first, times=1.0, more=0.0):
    """Return a run of which a figure grows from line to line."""
    return each_line(run_of(), lambda n, m: {**m, name: alike(first * times**n + more * n)})


def late(rank, seconds, cause="time_metrics/compute(s)", every=1, **changes):
    """Return a run on a CPU of which a rank is late in every so many lines."""
    run = run_of({"time_metrics/data_loading(s)": 0.02, **changes}, device="cpu")
    found = {rank: Late(1, {cause: seconds}, seconds)}
    lines = (replace(x, late=found if x.step % every == 0 else {}) for x in run.steps)
    return replace(run, steps=tuple(lines))


def retries_of(run):
    return each_line(run, lambda n, m: {**m, "memory/num_alloc_retries": alike(n)})


# A process that was on this machine: its number has been given to another one since.
GONE = replace(own_process(), host="here", born="before")
HALF = layers(2, dtype="float32 (computes in float16)")
WAITED = {"comm/waited(ms)": OverRanks(20, 300, 310, 5, 2)}
# Rank 5 computes for longer, and all others wait.
LATE = WAITED | {"time_metrics/compute(s)": OverRanks(0.6, 0.65, 0.95, 1, 5)}
EXPOSED = {"comm/exposed(ms)": 300.0, "comm/waited(ms)": 300.0}
COPIES = {"offload/to_device(ms)": 300.0, "offload/to_host(ms)": 90.0}
OVER_HOSTS = {"degrees": {"replicate": 2, "shard": 4}}
OFFLOAD = "Offload(optimizer='cpu')"
OFFLOADED_INPUTS = "Offload(optimizer='device', activations='cpu')"
HIDDEN = {"offload/beside(ms)": 700.0, "offload/exposed(ms)": 10.0}
FAULTS = {  # by the code that must be found, and what is wrong
    "SW030 activations": run_of({"memory/max_active(%)": 95.0}, memory_line(25, 50)),
    "SW030 activations, and the allocator tries again": retries_of(run_of({}, memory_line(25, 50))),
    "SW005 state at stage 1": run_of({"memory/max_active(%)": 95.0}, memory_line(60, 15), stage=1),
    "SW005 gathers at stage 3": run_of(EXPOSED | {"memory/max_active(%)": 20.0}, units=layers(20)),
    "SW012 communication": run_of(EXPOSED),
    "SW031 fragments": run_of({"memory/max_reserved(GiB)": 72.0}),
    "SW014 a slow axis": run_of(
        EXPOSED | {"comm/replicate(s)": 0.4, "comm/replicate_sent(MiB)": 4000.0}, **OVER_HOSTS
    ),
    "SW014 a network between hosts": run_of(
        waited_for=waits({(0, 4): 300.0, (0, 1): 20.0, (1, 5): 290.0, (4, 5): 20.0}), device="cpu"
    ),
    "SW033 files": run_of(
        {"time_metrics/optimizer(s)": 0.6}, offload="Offload(optimizer='nvme:/scratch')"
    ),
    "SW032 the host's step": run_of(
        {"time_metrics/optimizer(s)": 0.6}, offload="Offload(optimizer='cpu')"
    ),
    "SW032 copies that nothing is computed beside": run_of(
        {"offload/exposed(ms)": 400.0, "offload/beside(ms)": 500.0, **COPIES},
        offload="Offload(params='cpu', optimizer='cpu')",
    ),
    "SW032 a step behind on the cores that compute": run_of(
        {"offload/beside(ms)": 500.0, "offload/exposed(ms)": 10.0, **COPIES},
        offload="Offload(optimizer='cpu')",
        device="cpu",
    ),
    "SW020 a straggler": run_of(LATE),
    "SW024 uneven batches": run_of(LATE | longer(50)),
    "SW024 batches that are uneven in turn": in_turn(run_of(LATE | longer(50))),
    "SW020 a straggler whose batches are a little longer": run_of(LATE | longer(20)),
    "SW020 a straggler, and another rank's batches are longer": run_of(LATE | longer(50, rank=4)),
    "SW042 updates that round away": run_of(lost(40.0, 45.0)),
    "SW042 gains that stay 1.0": run_of(lost(2.0, 99.0)),
    "SW020 a straggler for no known reason": run_of(WAITED),
    "SW040 overflows": run_of({"optimizer/skipped_steps": 0.5}, units=HALF),
    "SW040 a scale below 1": run_of(values={"loss_scale": 0.25}, units=HALF),
    "SW041 a bad loss": run_of(values={"loss": None}),
    "SW004 one large unit": run_of(units=(unit("", full_bytes=20 * GIB), *layers(50))),
    "SW001 slices that are whole": run_of(units=layers(200, rank_bytes=LAYER)),
    "SW001 all ranks on the replicate axis": run_of(degrees={"replicate": 8}),
    "SW001 parameters outside": run_of(unsharded_bytes=50 * LAYER),
    "SW002 one unit": run_of(units=(unit("", num_modules=9),)),
    "SW003 units too small": run_of(
        units=layers(6, "layers.0.", full_bytes=1 << 16, rank_bytes=1 << 13)
    ),
    "SW006 padding": run_of(units=(unit("a", padding_bytes=LAYER // 4), unit("b"))),
    "SW010 small buckets": run_of(
        bucket_bytes=1, units=layers(64, full_bytes=1 << 16, rank_bytes=1 << 13)
    ),
    "SW011 a bucket of the whole model": run_of(bucket_bytes=1 << 40),
    "SW011 a prefetch of the whole model": run_of(prefetch_bytes=1 << 40),
    "SW013 a slow link": run_of(waited_for=waits({(0, 1): 280.0, (0, 2): 4.0}), device="cpu"),
    "SW021 a slow loader": run_of({"time_metrics/data_loading(s)": 0.3}),
    "SW050 saves on the training thread": run_of(saved(0.5, 0.6)),
    "SW050 saves that are longer than the steps between them": run_of(saved(0.4, 1.6)),
    "SW050 a long copy of one rank's save": run_of(saved(OverRanks(0, 0, 0.4, 1, 2), 1.0)),
    "SW050 torch.save of one rank": with_lines(OtherSave(8, "torch.save", 4.0)),
    "SW023 memory that ran out": with_lines(
        OutOfMemory(9, 2 * GIB, 70 * GIB, 80 * GIB, [Fix("stage=3", fits=True)]),
        ended("OutOfMemoryError"),
    ),
    "SW041 bad gradients": replace(
        with_lines(NonFinite(3, ["a.b", "c"], 1)),
        steps=run_of({"numbers/non_finite_gradients": 2.0}).steps,
    ),
    "SW051 no save for an hour": over_time(run_of(), 300.0),
    "SW051 no save after the first hour": over_time(run_of(), 400.0, saves=range(3)),
    "SW022 a run that hangs": replace(run_of(), by_rank={}, idle_s=1000.0),
    "SW022 a run that goes on after one that ended, and hangs": replace(
        run_of(), by_rank={0: (ended("ValueError"), Begin(9))}, idle_s=1000.0
    ),
    "SW023 a rank that raised after others had lost it": replace(
        run_of(), by_rank={0: (ended("CollectiveError", follows=True),), 1: (ended("KeyError"),)}
    ),
    "SW020 waits for a slow rank, which are no slow network": run_of(
        LATE | {"comm/exposed(ms)": LATE["comm/waited(ms)"]}
    ),
    "SW020 a slow rank on a CPU": run_of(LATE, device="cpu"),
    "SW021 a slow loader of one rank, which is no straggler": run_of(
        WAITED | {"time_metrics/data_loading(s)": OverRanks(0.01, 0.01, 0.3, 1, 5)}
    ),
    "SW020 a rank that is late in one step of four": late(5, 0.8, every=4),
    "SW020 garbage collection of a rank": late(3, 0.2, "host/garbage_collections"),
    "SW020 another process on the cores of a rank": run_of(
        {
            "host/waits_for_core(s)": OverRanks(0.01, 0.02, 0.4, 1, 2),
            "comm/waited(ms)": OverRanks(5.0, 380.0, 385.0, 2, 1),
        },
        device="cpu",
    ),
    "SW021 a loader of one rank that stalls now and then": late(
        2, 0.9, "time_metrics/data_loading(s)", every=4
    ),
    "SW024 batches of one rank that weigh less": run_of(longer(50)),
    "SW025 the same samples on all ranks": run_of({"data/shared_inputs(%)": 100.0}),
    "SW026 tiny batches": run_of(
        EXPOSED | {"data/rows_of_a_pass": 4.0, "time_metrics/optimizer(s)": 0.4}
    ),
    "SW027 a read of each norm": run_of({"host/reads_of_values": 60.0}),
    "SW034 a leak": growing("memory/in_use(GiB)", 40.0, more=0.01),
    "SW034 a leak of the host's memory": growing("memory/host(GiB)", 4.0, more=0.005),
    "SW035 everything is computed again": run_of(
        {"time_metrics/recompute(s)": 0.28, "memory/max_active(%)": 20.0}
    ),
    "SW040 a scale that falls": growing("optimizer/loss_scale", 65536.0, times=0.5),
    "SW040 a scaler that skips every step": replace(
        run_of(), steps=(), by_rank={0: (SkippedSteps(1, 16, 1.0), SkippedSteps(1, 32, 0.0))}
    ),
    "SW043 a norm that grows behind clipping": growing("numbers/gradient_norm", 2.0, times=2.0),
    "SW044 a scheduler that is not stepped": with_lines(IdleScheduler(40, "StepLR", 0.1)),
    "SW045 frozen layers": with_lines(*no_gradient(2, 0.2)),
    "SW045 layers that are not used": with_lines(*no_gradient(9, 0.8, trained=9)),
    "SW046 a model in evaluation mode": run_of({"numbers/dropouts_off(%)": 100.0}),
    "SW047 gradients that are not dropped": run_of({"numbers/kept_gradients": 1.0}),
    "SW052 a long evaluation": run_of({"time_metrics/paused(s)": 1.2}),
    "SW023 a rank that ended its loop early": replace(
        run_of(),
        by_rank={0: (ended("CollectiveError", follows=True, during=16),), 1: (End(12, None, 2.0),)},
    ),
    "SW032 inputs that are copied": run_of(
        HIDDEN | {"offload/exposed(ms)": 400.0}, offload=OFFLOADED_INPUTS
    ),
}
STOPPED = {
    0: (ended("CollectiveError", follows=True),),
    1: (ended("KeyboardInterrupt"),),
}
HEALTHY_RUNS = {
    "saves now and then": over_time(run_of(), 300.0, saves=range(0, 15, 3)),
    "short, without a save": over_time(run_of(), 100.0),
    "offload that is hidden": run_of(HIDDEN, offload=OFFLOAD),
    "a long step of the optimizer on the device": run_of(
        {"time_metrics/optimizer(s)": 0.6}, offload=OFFLOADED_INPUTS
    ),
    "it has ended long ago": replace(run_of(), idle_s=1e6),
    "a norm that is large from the start": run_of({"numbers/gradient_norm": 300.0}),
    "memory that grows, and stays": each_line(
        run_of(), lambda n, m: {**m, "memory/in_use(GiB)": alike(40 - 2.0 ** (3 - n))}
    ),
    "adapters beside frozen weights": with_lines(*no_gradient(200, 0.99)),
    "parameters without a gradient in some steps": with_lines(
        *no_gradient(2, 0.2)[:2], *no_gradient(0)[2:]
    ),
    "the same batch on all ranks again and again": each_line(
        run_of(), lambda n, m: {**m, "data/shared_inputs(%)": alike(100.0 * (n == 0))}
    ),
    "ranks of one batch": run_of(
        {"data/shared_inputs(%)": 100.0}, degrees={"shard": 4, "tensor": 2}
    ),
    "ranks that are late in turn": replace(
        run_of(),
        steps=tuple(
            replace(x, late={x.step % 8: Late(1, {"time_metrics/compute(s)": 0.5}, 0.5)})
            for x in run_of().steps
        ),
    ),
    "an observer that waits for a core, and no rank for it": run_of(
        {
            "host/waits_for_core(s)": OverRanks(0.01, 0.02, 0.4, 1, 2),
            "comm/waited(ms)": OverRanks(5.0, 8.0, 9.0, 2, 1),
        },
        device="cpu",
    ),
    "a scaler that found its scale": with_lines(SkippedSteps(1, 8, 512.0)),
    "it was stopped by an exception that says so": replace(
        run_of(), by_rank={0: (ended("EarlyStopping"),), 1: (ended("EarlyStopping"),)}
    ),
    "its user has stopped it": replace(run_of(), idle_s=1e6, by_rank=STOPPED),
}
ABSTAINS = {  # the code, and what is missing
    "no batch came through data()": (
        *("SW021", "run.data(...)"),
        run_of({"time_metrics/data_loading(s)": 0.0, "time_metrics/outside(s)": 0.6}),
    ),
    "a straggler, and cores are short": (
        *("SW020", "a core for each rank"),
        run_of(LATE | {"host/waits_for_core(s)": 0.2}, device="cpu"),
    ),
    "offload, and cores are short": (
        *("SW032", "a core for each rank"),
        run_of(HIDDEN | {"host/waits_for_core(s)": 0.9}, offload=OFFLOAD, device="cpu"),
    ),
    "few lines": (
        *("SW020", "7, and 8 are needed"),
        replace(run_of(), steps=run_of().steps[:7]),
    ),
    "16 bits that were not compared": (
        *("SW042", "comparisons of parameters in 16 bits"),
        run_of(units=(unit("layers.0", dtype="bfloat16"), unit("layers.1"))),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_failure_is_found_and_no_other(name):
    found = diagnose(FAULTS[name]).findings
    assert [finding.code for finding in found] == [name.split()[0]]
    assert found[0].evidence and found[0].why and found[0].changes is not None


def test_every_finding_has_a_record_with_its_failure():
    assert {name.split()[0] for name in FAULTS} == set(finding_docs())


def test_a_healthy_record_has_no_finding_and_every_rule_judges_it():
    found = diagnose(run_of())
    assert not found.findings
    # Who waits for whom is not told on accelerators.
    assert {each.code for each in found.abstentions} <= {"SW013"}
    assert {*found.judged, "SW013"} == set(finding_docs())


@pytest.mark.parametrize("name", HEALTHY_RUNS)
def test_other_healthy_runs_have_no_finding(name):
    assert not codes(HEALTHY_RUNS[name])


@pytest.mark.parametrize("name", ABSTAINS)
def test_a_rule_without_its_evidence_abstains_and_says_what_is_missing(name):
    code, words, run = ABSTAINS[name]
    found = diagnose(run)
    assert words in {each.code: each.missing for each in found.abstentions}[code]
    assert code not in {finding.code for finding in found.findings}
    if name == "few lines":
        missing = {each.code for each in found.abstentions}
        assert {"SW012", "SW020", "SW021", "SW030", "SW031", "SW050"} <= missing


@pytest.mark.parametrize(("every", "is_told"), [(2, True), (3, True), (6, False)])
def test_a_rank_that_is_late_now_and_then_is_told_once_it_is_no_chance(every, is_told):
    late = {
        "comm/waited(ms)": OverRanks(20, 600, 610, 5, 2),
        "time_metrics/compute(s)": OverRanks(0.6, 0.65, 1.25, 1, 5),
    }
    usual, slow = run_of(), run_of(late)
    lines = [(slow if n % every == 0 else usual).steps[n] for n in range(len(usual.steps))]
    run = replace(usual, steps=tuple(lines))
    found = diagnose(run).findings
    assert [(finding.code, finding.rank) for finding in found] == [("SW020", 5)] * is_told
    assert not codes(in_turn(run))


@pytest.mark.parametrize(
    ("since", "first", "rank"),
    [
        ({"loss": {0: 8, 1: 7, 2: 8}}, 7, 1),  # others take it over in the next step
        ({"loss": {0: 7}}, 7, None),  # the only rank that logs
        ({"loss": {0: 7, 1: 7, 2: 7}}, 7, None),
        ({"loss": {0: 0, 1: 7, 2: 7}}, 7, None),
        ({"numbers/non_finite_gradients": {0: 7, 1: 0}, "loss": {0: 9, 1: 8}}, 7, None),
    ],
)
def test_the_first_bad_step_is_exact_and_a_rank_named_if_others_were_finite_then(
    since, first, rank
):
    run = run_of(values={"loss": None})
    lines = [replace(line, num_steps=4, bad_since=since) for line in run.steps[9:]]
    (finding,) = diagnose(replace(run, steps=(*lines,))).findings
    assert (finding.code, finding.rank) == ("SW041", rank)
    assert finding.evidence["first bad step"] == first and f"step {first}" in finding.verdict
    assert "before step" not in str(finding.changes)


def test_units_of_a_toy_and_a_module_that_no_unit_can_divide_are_healthy():
    def made(full_bytes, num_modules):
        whole = unit("", full_bytes=full_bytes, rank_bytes=full_bytes // 8, num_modules=num_modules)
        return codes(run_of(units=(whole,)))

    assert made(4 << 20, 4) == made(4 << 20, 0) == ["SW002"]
    assert made(4 << 20, 3) == made((4 << 20) - 1, 4) == []  # an nn.LSTM between two layers; a toy
    for head, found in ((3 << 20, []), (5 << 20, ["SW004"])):
        blocks = [unit(f"layers.{n}", full_bytes=65536, rank_bytes=8192) for n in range(4)]
        large = unit("", full_bytes=head, rank_bytes=head // 8)
        assert codes(run_of(units=(large, *blocks))) == found


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"kind": "end", "error": "KeyError", "phase": "forward"}, "in step 1, in forward"),
        ({"kind": "end", "error": "CollectiveError", "follows": True}, ": CollectiveError"),
        ({"kind": "end", "error": "OSError", "message": "no \udc80"}, "OSError: no ?"),
        ({"kind": "begin", "process": asdict(GONE) | {"later": 1}}, "rank 0 on here died"),
        ({"kind": "begin", "process": None}, None),
        ({"kind": "begin"}, None),
        ({"kind": "save", "path": "\udc80", "is_finite": True}, None),
    ],
)
def test_lines_of_ranks_are_read_with_keys_of_other_versions_and_without_newer_ones(
    line, said, tmp_path
):
    folder = write_record(tmp_path, num_ranks=1) / "observed"
    with JsonLines(folder / "rank-0.jsonl") as file:
        file.write(step=1, **line)
    found = [f.verdict for f in diagnose(read_run(tmp_path)).findings if f.code == "SW023"]
    assert len(found) == (said is not None) and (said is None or said in found[0])


@pytest.mark.parametrize(
    "line",
    [
        Begin(1, GONE),
        End(9, None, 1.5),
        End(9, "ValueError", 1.5, "text", True, 10, "forward", ""),
        Timeline(2, 0.5, [("main", "forward", "", -0.1, 0.2, 0)]),
        memory_line(1, 2),
        NonFinite(3, ["a"], 0),
        LostUpdates(3, {"a": 0.5}),
        OutOfMemory(9, None, 1, 2, [Fix("stage=3", True, 1, 2, "c")], 1, "p", "u", {"a": 1}, 3, []),
        SkippedSteps(3, 8, 0.5),
        NoGradient(3, ["a"], 1, 0.5, 1),
        IdleScheduler(40, "StepLR", 0.1),
        Save(3, "/x", False),
        OtherSave(3, "torch.save", 0.5),
    ],
    ids=lambda line: type(line).__name__,
)
def test_a_line_is_read_as_it_was_written(line, tmp_path):
    with JsonLines(tmp_path / "rank-0.jsonl") as file:
        file.write(**keys_of(line))
    (told,) = read_lines(tmp_path / "rank-0.jsonl")
    assert [*told][:2] == ["kind", "step"] and read_line(told, "file") == line
    assert told.get("message", "") is not None  # left out where there is none


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("rank-0", {"kind": ["memory"]}, "kind: expected text"),
        ("rank-0", {"kind": "save", "path": 3, "is_finite": True}, "path: expected"),
        ("rank-0", {"spans": [["m", "p", "u", None, 1.0, 0]]}, "spans.0.3: expected"),
        ("steps", {"waited_for": {"0": {"1": None}}}, "waited_for.0.1: expected"),
    ],
)
def test_a_line_that_somebody_has_edited_is_refused(name, keys, said, tmp_path):
    file = write_record(tmp_path) / "observed" / f"{name}.jsonl"
    *others, last = file.read_text().splitlines()
    file.write_text("\n".join([*others, json.dumps(json.loads(last) | keys)]) + "\n")
    for read in (read_run, read_ends):
        with pytest.raises(ConfigError, match=re.escape(said)):
            read(tmp_path)


@pytest.mark.parametrize(
    ("code", "name"), [("SW051", "checkpoint/save(s)"), ("SW050", "time_metrics/end_to_end(s)")]
)
def test_a_rule_abstains_where_a_figure_of_a_line_is_no_number(code, name, tmp_path):
    file = write_record(tmp_path) / "observed" / "steps.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[-2]["metrics"][name]["max"] = None
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    missing = {each.code: each.missing for each in diagnose(read_ends(tmp_path)).abstentions}
    assert missing[code] == f"the figure {name}"


def test_a_slow_loader_explains_a_straggler_of_its_own_rank_alone():
    loader, late = (Finding(c, "warning", "t", "v", {}, "w", rank=5) for c in ("SW021", "SW020"))
    assert loader.explains(late) and not loader.explains(replace(late, rank=4))


def test_a_rank_died_after_the_last_step_that_any_rank_knows_of():
    by_rank = {
        0: (ended("CollectiveError", follows=True, during=23),),
        1: (Begin(1, GONE),),
    }
    (finding,) = diagnose(replace(run_of(), by_rank=by_rank)).findings
    assert "rank 1 on here died after step 22" in finding.verdict


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        ("ended by signal 9 (SIGKILL)", "error: it was killed by SIGKILL (often: the machine ran"),
        ("ended by signal 15 (SIGTERM)", "SIGTERM (often: a launcher, a scheduler or a person"),
        ("ended by signal 11 (SIGSEGV)", "it crashed with SIGSEGV (native code read memory"),
        ("ended by signal 7 (SIGBUS)", "it crashed with SIGBUS (a mapped file or shared memory"),
        (
            "it ended with exit code 3 and no error",
            "it ended with exit code 3, as by os._exit",
        ),
        ("killed or crashed, as its launcher's log may tell", "which of them is not known"),
    ],
)
def test_a_rank_that_died_is_told_with_its_signal_and_who_sends_it(seen, says):
    lost = ended("CollectiveError", follows=True, during=23)
    lost = replace(lost, message=f"training: rank 1 (process 7 on here) has died: {seen}")
    (finding,) = diagnose(replace(run_of(), by_rank={0: (lost,), 1: (Begin(1, GONE),)})).findings
    assert says in finding.verdict
    assert ("crash" in finding.verdict) == ("SEGV" in seen or "BUS" in seen or "crash" in seen)


def test_a_finding_as_json_has_the_keys_of_the_documentation():
    changes = Change("stage", 3, 2), Change("micro_batch", None, "more")
    gain = Gain(0.1, "s/step", "measured", 0.2)
    finding = Finding("SW012", "warning", "t", "v", {"n": 1}, "w", changes, gain, rank=3, step=7)
    told = json.loads(json.dumps(finding.to_json()))
    assert told.pop("changes")[0] == {"key": "stage", "from": 3, "to": 2}
    assert told.pop("gain") == {"low": 0.1, "unit": "s/step", "source": "measured", "high": 0.2}
    assert told == {
        **{"code": "SW012", "severity": "warning", "title": "t", "verdict": "v", "why": "w"},
        **{"evidence": {"n": 1}, "unit": None, "rank": 3, "step": 7},
        "doc": "docs/findings.md#sw012",
    }


def test_each_code_is_documented_in_full():
    doc = "[SW999]\ntitle='t'\nseverity='warning'\nmeans='m'\ncondition='s'\nremedies=['r']\n"
    case = "cases={default={verdict='v', why='w'}}\n"
    (whole,) = read_docs(f"{doc}picture='p'\n{case}").values()
    assert (whole.code, whole.remedies, whole.picture) == ("SW999", ["r"], "p")
    for rest in (case, f"picture=''\n{case}", "picture='p'\n", "picture='p'\ncases={}\n"):
        with pytest.raises(ConfigError, match=r"finding SW999: (picture|cases)"):
            read_docs(doc + rest)


def test_live_a_finding_is_logged_once_and_kept(tmp_path, caplog):
    run = FAULTS["SW012 communication"]
    doctor = LiveDoctor(run.facts, tmp_path)
    told = []
    with caplog.at_level("WARNING", "shardwise"):
        for line in run.steps:
            doctor.write(line)
            told.append(len(doctor.found))
    doctor.close()
    assert told == [0] * 9 + [1] * 6  # five lines after three are judged; it holds for three
    assert len(caplog.records) == 1 and "\n" not in caplog.records[0].getMessage()
    assert "shardwise explain SW012" in caplog.text
    (line,) = (tmp_path / "findings.jsonl").read_text().splitlines()
    assert json.loads(line) == json.loads(json.dumps(doctor.found[0].to_json()))


def test_of_a_very_long_record_the_end_and_samples_are_read_and_it_says_so(tmp_path, monkeypatch):
    write_record(tmp_path, num_steps=400)
    whole = read_run(tmp_path)
    assert len(whole.steps) == 400 and whole.note is None
    sizes = {"_TAIL_OF_LONG_BYTES": 60_000, "_NUM_SAMPLES": 8, "_SAMPLE_BYTES": 8_000}
    for name, size in sizes.items():
        monkeypatch.setattr(f"shardwise.monitor.record.{name}", size)
    some = read_run(tmp_path)
    assert 8 <= some.num_samples < len(some.steps) < 200
    assert [line.step for line in some.steps] == sorted({line.step for line in some.steps})
    assert some.steps[0].step == 1 and some.steps[-1].step == 400
    late = some.steps[some.num_samples :]
    assert [line.step for line in late] == [*range(late[0].step, 401)]
    assert f"all lines from step {late[0].step} on" in some.note
    assert codes(some) == codes(whole)

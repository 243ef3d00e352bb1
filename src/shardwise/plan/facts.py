"""Plans, searches and simulations as plain data: units in the keys, bytes as integers.

A figure's key ends in ``_bytes``, ``_s``, ``_per_s`` or ``_fraction``, or begins with ``num_``;
such a key may hold figures by name. ``candidate`` holds settings by the names of their flags.
``micro_batch`` of a peak is the number of the micro-batch in which it occurs, from 0.
"""

from collections.abc import Sequence
from dataclasses import asdict

from shardwise.plan.candidate import Candidate
from shardwise.plan.machine.hardware import Cluster
from shardwise.plan.planning import Plan
from shardwise.plan.searching import SearchResult
from shardwise.plan.step.program import Peak
from shardwise.plan.timing.simulate import Simulated


def plan_facts(plan: Plan) -> dict[str, object]:
    """Return a plan as plain data."""
    played = plan.played
    return {
        "kind": "plan",
        "model": plan.model,
        "num_params": plan.num_params,
        "num_tokens_per_window": plan.seq,
        "cluster": cluster_facts(plan.cluster),
        "candidate": candidate_facts(plan.candidate),
        "label": plan.candidate.label,
        "verdict": plan.verdict,
        "memory": {
            "capacity_bytes": plan.capacity_bytes,
            "low_bytes": plan.memory.low_bytes,
            "expected_bytes": plan.memory.expected_bytes,
            "high_bytes": plan.memory.high_bytes,
            "margins_bytes": dict(plan.memory.margins),
            "peak": _peak_facts(plan, played.peak),
            "peaks": [_peak_facts(plan, peak) for peak in played.peaks],
            "resting_bytes": played.device.lines(),
            "host_bytes": played.host.total,
            "host_lines_bytes": played.host.lines(),
            "nvme_bytes": played.files.total,
            "nvme_lines_bytes": played.files.lines(),
            "node_host_bytes": plan.room.host_bytes,
            "node_host_capacity_bytes": plan.room.host_capacity_bytes,
            "node_nvme_bytes": plan.room.file_bytes,
            "node_nvme_capacity_bytes": plan.room.file_capacity_bytes,
        },
        "time": {
            "step_s": plan.step_s,
            "num_tokens_per_step": plan.tokens_per_step,
            "tokens_per_s": plan.tokens_per_s,
            "rank_tokens_per_s": plan.tokens_per_s / plan.candidate.world_size,
            "mfu_fraction": plan.mfu,
            "num_flops_per_step": plan.flops_per_step,
            "step_exposed_communication_s": plan.exposed_s,
            "pipeline_fill_s": plan.fill_s,
            "pipeline_sends_s": plan.sends_s,
            "num_micro_batches": plan.candidate.accumulation,
            # The figures below are of so many micro-batches, and of one rank of one stage.
            "num_simulated_micro_batches": plan.simulated.num_micro_batches,
            **simulated_facts(plan.simulated),
            "model_parallel_s": dict(plan.model_parallel_s),
        },
        "traffic": {
            "sent_bytes": dict(played.program.sent_bytes),
            "num_collectives": dict(played.program.num_collectives),
            "copied_bytes": dict(played.program.copied_bytes),
        },
        "assumptions": list(plan.assumptions),
        "notes": list(plan.notes),
    }


def search_facts(result: SearchResult) -> dict[str, object]:
    """Return a search as plain data: the plans of the Pareto set, and rejected ones with reasons.

    The winner is written in full, the other plans by their settings and main figures.
    """
    return {
        "kind": "search",
        "num_candidates": result.num_candidates,
        "num_played": result.num_played,
        "winner": plan_facts(result.winner) if result.winner is not None else None,
        "pareto": [_brief_facts(plan) for plan in result.pareto],
        "rejected": [
            {"candidate": candidate_facts(r.candidate), "reason": r.reason} for r in result.rejected
        ],
        "notes": list(result.notes),
    }


def _brief_facts(plan: Plan) -> dict[str, object]:
    return {
        "candidate": candidate_facts(plan.candidate),
        "label": plan.candidate.label,
        "verdict": plan.verdict,
        "low_bytes": plan.memory.low_bytes,
        "expected_bytes": plan.memory.expected_bytes,
        "high_bytes": plan.memory.high_bytes,
        "step_s": plan.step_s,
        "exposed_communication_s": plan.exposed_s,
        "num_tokens_per_step": plan.tokens_per_step,
        "tokens_per_s": plan.tokens_per_s,
        "mfu_fraction": plan.mfu,
    }


def simulated_facts(run: Simulated) -> dict[str, object]:
    """Return the times of a simulated step."""
    return {
        "simulated_s": run.step_s,
        "compute_s": run.compute_s,
        "communication_s": run.communication_s,
        "exposed_communication_s": run.exposed_s,
        "overlap_fraction": run.overlap,
        "exposed_offload_s": run.exposed_offload_s,
        "idle_s": run.idle_s,
        "not_computing_s": run.bubble_s,
        "busy_s": dict(run.busy_s),
        "phase_s": dict(run.phase_s),
        "stream_phase_s": {s: dict(phases) for s, phases in run.stream_phase_s.items()},
        "critical_path_s": dict(run.critical_s),
        "units": [
            {"name": name, **seconds}
            for name, seconds in zip(run.program.unit_names, run.unit_seconds, strict=True)
        ],
    }


def scaling_facts(plans: Sequence[Plan]) -> list[dict[str, float]]:
    """Return a scaling curve as plain data; efficiency is beside the first plan's ranks."""
    best = plans[0].tokens_per_s / plans[0].candidate.world_size if plans else 1.0
    return [
        {
            "num_ranks": plan.candidate.world_size,
            "step_s": plan.step_s,
            "tokens_per_s": plan.tokens_per_s,
            "efficiency_fraction": plan.tokens_per_s / plan.candidate.world_size / best,
            "exposed_fraction": plan.exposed_s / plan.step_s,
            "memory_bytes": plan.memory.expected_bytes,
        }
        for plan in plans
    ]


def cluster_facts(cluster: Cluster) -> dict[str, object]:
    """Return what a cluster consists of, by name and main figures."""
    node = cluster.node
    return {
        "num_ranks": cluster.num_ranks,
        "num_nodes": cluster.num_nodes,
        "node": node.name,
        "accelerator": node.accelerator.name,
        "accelerator_memory_bytes": node.accelerator.memory_bytes,
        "num_ranks_per_node": node.num_accelerators,
        "link": node.intra.name,
        "network": node.inter.name,
        "num_nics": node.num_nics,
        "host": node.host.name,
    }


def candidate_facts(candidate: Candidate) -> dict[str, object]:
    """Return every setting of a candidate."""
    return {**asdict(candidate), "num_ranks": candidate.world_size}


def _peak_facts(plan: Plan, peak: Peak) -> dict[str, object]:
    return {
        "phase": peak.phase,
        "unit": plan.unit_name(peak.unit),
        "micro_batch": peak.micro_batch,
        "total_bytes": peak.ledger.total,
        "lines_bytes": peak.ledger.lines(),
    }

"""Record what plans say of FSDP on several links, by tokens per rank.

Run `python docs/record_bound.py`; then `make pages` writes the page on the bound.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.plan import Candidate, find_model, make_cluster, plan
from shardwise.plan.model.shaped import ShapedModel
from shardwise.plan.planning import Plan
from shardwise.svg import colour_of

RECORDED = Path(__file__).parent / "site" / "data" / "bound.json"
MODEL, GPU, RANKS, SEQ = "llama-3-8b", "H100-80GB", 8, 512
LINKS = ("nvlink4", "pcie5", "infiniband-ndr", "infiniband-hdr", "ethernet-100", "ethernet-25")
TOKENS = [SEQ << power for power in range(11)]


@cache
def planned(link: str, tokens: int) -> Plan:
    """Return the plan of a step in which each rank has so many tokens."""
    source = find_model(MODEL)
    assert source.shape is not None
    candidate = Candidate(num_shards=RANKS, micro_batch=tokens // SEQ)
    cluster = make_cluster(GPU, RANKS, link=link)
    return plan(ShapedModel(source.name, source.shape, SEQ), cluster, candidate)


def seconds(link: str, tokens: int) -> list[float]:
    """Return the seconds of a step, and those in which a rank only waits for communication."""
    made = planned(link, tokens)
    return [float(f"{each:.4g}") for each in (made.step_s, made.exposed_s)]


def facts() -> dict[str, Any]:
    """Return the factors of the formula: bytes that a rank sends, and rates of datasheets."""
    made = planned(LINKS[0], TOKENS[0])
    sent = made.played.program.sent_bytes
    nodes = {link: planned(link, TOKENS[0]).cluster.node for link in LINKS}
    return {
        "params": made.num_params,
        "sent_bytes": [sent["shard.all_gather"], sent["shard.reduce_scatter"]],
        "flops_per_s": nodes[LINKS[0]].accelerator.peak_flops(made.matmul_dtype),
        "bytes_per_s": {link: node.intra.bandwidth_bytes_per_s for link, node in nodes.items()},
    }


def main() -> None:
    kinds = {"computing": "forward", "waiting for communication": "wait_unshard"}
    found = facts() | {
        "kinds": {word: colour_of(kind) for word, kind in kinds.items()},
        "tokens": TOKENS,
        "plans": {link: [seconds(link, tokens) for tokens in TOKENS] for link in LINKS},
    }
    RECORDED.write_text(json.dumps(found, separators=(",", ":")).replace('],"', '],\n"') + "\n")


if __name__ == "__main__":
    main()

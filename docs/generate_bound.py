"""Write the page on FSDP's bound from what record_bound.py has recorded."""

import json
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "site" / "data" / "bound.json"
SHOWN = (2048, 8192, 32768, 131072)


def bound_tokens(data: dict[str, Any], link: str) -> float:
    """Return the tokens of a rank that take as long to compute as its bytes to send."""
    intensity = sum(data["sent_bytes"]) / (6 * data["params"])
    return intensity * data["flops_per_s"] / data["bytes_per_s"][link]  # type: ignore[no-any-return]


def bound_page() -> str:
    """Return the page, with a table for readers without scripts."""
    data = json.loads(RECORDED.read_text(encoding="utf-8"))
    rows = []
    for link, bandwidth in data["bytes_per_s"].items():
        plans = dict(zip(data["tokens"], data["plans"][link], strict=True))
        waits = (f"{waited / step:.0%}" for step, waited in map(plans.__getitem__, SHOWN))
        cells = f"{bandwidth / 1e9:,.4g}", f"{bound_tokens(data, link):,.0f}", *waits
        rows.append(f"| {link} | {' | '.join(cells)} |")
    head = " | ".join(f"at {tokens:,}" for tokens in SHOWN)
    per_weight = sum(data["sent_bytes"]) / data["params"]
    page = PAGE.replace("ROWS", "\n".join(rows)).replace("HEAD", head)
    return page.replace("BYTES", f"{per_weight:.2f}")


PAGE = """# FSDP's bound

Stage 3 sends parameters and gradients in every micro-batch. How many tokens must a rank have, so
that computing hides it? Choose a link and move the slider.

<div class="picture" data-picture="bound"></div>

The tokens t of a rank take 6 P t operations with P parameters, forward and backward. The messages
of a micro-batch do not depend on t. With C operations per second and W bytes per second, computing
takes longer than sending if

```text
6 P t / C  >  bytes / W
        t  >  bytes / (6 P) x C / W
```

Two gathers in bf16 and a reduction in bf16 are 6 P bytes: t > C / W, whatever the model. (Source:
Austin et al. 2025, How to Scale Your Model, "Fully-Sharded Data Parallelism";
github:jax-ml/scaling-book at 04d8de58, training.md.) The reductions here are in fp32, and the last
unit is gathered once: BYTES P bytes.

| link | GB/s | bound, tokens | waits HEAD |
|---|---|---|---|---|---|---|
ROWS

- The bound has datasheets' rates. The percentages are the planner's: how much of a step a rank only
  waits for communication, with measured rates, latencies and overlap. Devices compute more slowly
  than datasheets say, so waiting ends at fewer tokens if the link keeps its rate.
- Llama 3 8B on 8 x H100-80GB, one link for all ranks, windows of 512 tokens, bf16, stage 3:
  `shardwise plan llama-3-8b --ranks 8 --gpu h100 --link pcie5 --seq 512 --micro-batch 16` prints
  the plan of 8,192 tokens. Whether that fits is another question.
- Below the bound, more ranks with fewer tokens each make a step no shorter. Larger micro-batches
  help, and so do [fewer bytes](how-to/fewer-bytes.md),
  [shards inside a node](how-to/hybrid-sharding.md), and stage 2 with accumulation, which gathers
  the parameters once per step.

[Lab 1](../labs/shardwise_labs/lab01/page.md) counts what stages hold, and
[lab 7](../labs/shardwise_labs/lab07/page.md) hides communication. `python docs/record_bound.py`
asks the planner, and `make pages` writes this page.
"""

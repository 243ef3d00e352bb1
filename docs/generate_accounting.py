"""Write the numbers of the page on what a rank holds, and the page: see generate_pages.py.

The script of the page multiplies numbers of this file and adds them; it has no rule of its own. The
numbers are those of `shardwise.plan.account` and, for offloaded state, of the planner's state at
rest.
"""

import json
from collections.abc import Iterator
from itertools import product

from shardwise.homes import Offload
from shardwise.plan.accounting import Accounting, account
from shardwise.plan.candidate import Candidate
from shardwise.plan.model.tape import Tape, TapeParam, TapeUnit
from shardwise.plan.sizes import PRECISIONS
from shardwise.plan.step.play import bytes_between_steps
from shardwise.svg import colour_of

STAGES = (0, 1, 2, 3)
OPTIMIZERS = ("adamw", "adamw_bf16_moments", "adamw_8bit", "sgd_momentum", "sgd")
OFFLOADS = {
    "none": None,
    "optimizer state, masters and gradients in host memory": Offload(optimizer="cpu"),
    "all state in host memory": Offload(params="cpu", optimizer="cpu"),
    "optimizer state in files, the rest in host memory": Offload(params="cpu", optimizer="nvme"),
}
KINDS = {
    "parameters": "param_shards",
    "gradients": "grad_shards",
    "optimizer state": "optimizer_state",
}
PLACES = ("device", "host", "files")
SOME, RANKS = 1 << 22, (2, 4)  # parameters, and ranks that divide them: between them lie the rates
TABLE = ("7e9", 8, "bf16", "adamw")

Held = dict[tuple[str, str], int]


def kinds_of(found: Accounting) -> tuple[int, ...]:
    """Return the bytes of parameters with master weights, of gradients and of state."""
    parameters, masters, *others = found.lines.values()
    return parameters + masters, *others


def held_bytes(
    params: int, ranks: int, offload: str, stage: int, precision: str, optimizer: str
) -> Held:
    """Return the bytes of one rank by place and kind, at the end of backward."""
    places = OFFLOADS[offload]
    if places is None:
        found = account(params, ranks, stage, precision, optimizer)
        held = kinds_of(found)
        return {("device", kind): each for kind, each in zip(KINDS, held, strict=True)}
    how = {"stage": stage, "num_shards": ranks, "precision": precision, "optimizer": optimizer}
    unit = TapeUnit("", (TapeParam("weight", (params,), "float32"),))
    candidate = Candidate(**how, offload=places)  # type: ignore[arg-type]
    tape = Tape((unit,), (), "float32")
    between_steps = bytes_between_steps(tape, candidate)
    ledgers = zip(
        PLACES, (between_steps.device, between_steps.host, between_steps.files), strict=True
    )
    lines = {place: ledger.lines() for place, ledger in ledgers}
    lines["device"]["param_shards"] += lines["device"]["param_full"]
    return {(p, kind): lines[p][line] for p in PLACES for kind, line in KINDS.items()}


def choices() -> Iterator[tuple[str, int, str, str]]:
    """Yield each setting that the page offers: offload, stage, precision, optimizer."""
    precisions = [name for name, row in PRECISIONS.items() if row.engine_runs_it]
    for offload, stage in product(OFFLOADS, STAGES):
        # At stages 0 and 1 the device also holds the sums of full gradients of a window.
        if offload == "none" or stage > 1:
            yield from product((offload,), (stage,), precisions, OPTIMIZERS)


def rates(choice: tuple[str, int, str, str]) -> list[list[object]]:
    """Return rows of place, kind, bytes per parameter of the model, and per one of a slice."""
    # Twice the parameters less once: what each tensor has of its own, such as a counter, is gone.
    few, many = (
        {
            key: (held_bytes(2 * SOME, n, *choice)[key] - held) / SOME
            for key, held in held_bytes(SOME, n, *choice).items()
        }
        for n in RANKS
    )
    rows: list[list[object]] = []
    for (place, kind), of_few in few.items():
        of_slice = (of_few - many[place, kind]) / (1 / RANKS[0] - 1 / RANKS[1])
        whole = of_few - of_slice / RANKS[0]
        if whole or of_slice:
            rows.append([PLACES.index(place), list(KINDS).index(kind), whole, of_slice])
    return rows


def accounting_data() -> str:
    """Return the numbers of the page."""
    found = {"/".join(map(str, choice)): rates(choice) for choice in choices()}
    head = {
        "params": [m * 10**e for e in range(6, 12) for m in (1, 2, 3, 5, 7)] + [10**12],
        "ranks": [1 << n for n in range(13)],
        "places": PLACES,
        "kinds": {kind: colour_of(line) for kind, line in KINDS.items()},
    }
    lines = [f'"{name}": {json.dumps(value)}' for name, value in {**head, "rates": {}}.items()]
    rows = ",\n".join(f'"{key}": {json.dumps(value)}' for key, value in found.items())
    return "{\n" + ",\n".join(lines)[:-2] + "{\n" + rows + "\n}}\n"


def accounting_page() -> str:
    """Return the page, with a table for readers without scripts."""
    params, ranks, *how = TABLE
    rows = [
        f"| {each.stage} | "
        + " | ".join(f"{held / 1e9:.1f}" for held in (*kinds_of(each), each.device_bytes))
        + f" | {each.device_bytes / 2**30:.1f} |"
        for each in account(params, ranks, 3, *how).of_all_stages()
    ]
    return PAGE.replace("ROWS", "\n".join(rows))


PAGE = """# What a rank holds

Parameters, gradients and optimizer state of one rank at the end of backward, by stage, precision,
optimizer and offload. Activations, logits and buffers of collectives are not counted;
[`shardwise plan`](how-to/plan.md) counts them for a model.

<div class="picture" data-picture="accounting"></div>

7 billion parameters on 8 ranks, bf16 with fp32 masters, AdamW, in GB (10⁹ bytes); the last column
in GiB (2³⁰ bytes):

| stage | parameters and masters | gradients | optimizer state | together | GiB |
|---|---|---|---|---|---|
ROWS

- `shardwise plan --params 7e9 --ranks 8` prints them. `make pages` writes this page and the numbers
  behind it from `shardwise.plan.account`, and for offload from the planner's state at rest.
- Parameters include master weights. A slice has the parameters divided by the ranks, rounded up.
- At stages 0 and 1 gradients are reduced once per step and counted in full, as an accumulation
  window holds them. Offload is shown for stages 2 and 3.
- At stage 3 full parameters of the units in use come on top, see
  [cost of a stage](how-to/choose-layout-and-units.md#cost-of-a-stage).
"""

"""Colours of phases and of kinds of memory: those of a plan's pictures, where it has the same."""

from shardwise.monitor.metrics import TRANSFERS
from shardwise.plan.report.page import LINE_COLOURS, PHASE_COLOURS

OTHER = "other"  # bytes of the device that are not the engine's
_WAITING, _REST = "#c0392b", ("#5a7d9a", "#9a7d5a", "#7d5a9a", "#5a9a7d")
_PHASES = {
    **PHASE_COLOURS,
    **dict.fromkeys(TRANSFERS, "#0f7f86"),
    "step": PHASE_COLOURS["optimizer"],
    "all_gather": PHASE_COLOURS["unshard"],
    "reduce_scatter": PHASE_COLOURS["reduce"],
    "engine": PHASE_COLOURS["unshard"],
    "waiting for others": _WAITING,
    "wait_unshard": _WAITING,
    "wait_reduce": "#e0796d",
    "exchange": "#8f2a1f",
    "data": "#e08a1e",
    "save": "#8a6d3b",
    "load": "#b89a63",
    "outside": "#a9b1ba",
}
_KINDS = {**LINE_COLOURS, OTHER: LINE_COLOURS["activations"], "activations_on_host": "#7a828c"}


def colour_of_phase(phase: str) -> str:
    """Return the colour of a phase; one that is not known has the same in all pictures."""
    return _PHASES.get(phase) or _REST[sum(map(ord, phase)) % len(_REST)]


def colour_of_kind(kind: str) -> str:
    """Return the colour of a kind of memory."""
    return _KINDS.get(kind) or _REST[sum(map(ord, kind)) % len(_REST)]


def order_of_kinds(kind: str) -> tuple[bool, int]:
    """Return where a kind stands among others, in all pictures and tables; `OTHER` is last."""
    known = list(_KINDS)
    return kind == OTHER, known.index(kind) if kind in known else len(known)


def is_light(colour: str) -> bool:
    """Return whether dark text is easier to read on a colour than white text."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue > 140

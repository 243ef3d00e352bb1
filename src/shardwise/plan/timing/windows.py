"""How long the micro-batches of one step take on one pipeline stage, few of them played.

Note [Long windows]
The micro-batches of an accumulation window are alike but for the first and the last. A window
longer than three is played with two and with three, and each further one adds the difference. What
is read from disks from the step's begin on hides behind the whole window, not behind each of its
micro-batches: there the window is played up to 32 of them. Where all micro-batches go through a
unit before the next, each adds to the peak of memory, and all are played.

Note [Noise and long windows]
The difference of two noisy steps is mostly noise. With jitter the difference is that of two quiet
steps, times how much longer noise makes a step on average; so many steps are averaged that some
thousands of operations are.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwise.plan.candidate import Candidate
from shardwise.plan.machine.pricing import Pricer
from shardwise.plan.model.tape import Tape
from shardwise.plan.step.ledger import Played
from shardwise.plan.step.play import play
from shardwise.plan.timing.scenario import Scenario
from shardwise.plan.timing.simulate import Simulated, simulate

_LONGEST_PLAYED = 3
_LONGEST_WITH_DISKS = 32
_AVERAGED_OPS = 20_000  # their mean is within a few per cent where sigma is 1
_AVERAGED_RANK_OPS = 4_000_000  # many ranks need fewer: each waits for the slowest of many


@dataclass(frozen=True)
class Window:
    """One stage's step, its neighbours aside.

    ``played`` counts the traffic of all micro-batches; ``simulated`` has those that were played.
    ``window_s`` is the whole step, ``micro_batch_s`` what one more micro-batch adds.
    """

    played: Played
    simulated: Simulated
    window_s: float
    micro_batch_s: float


def play_shown(tape: Tape, candidate: Candidate) -> Played:
    """Play as many micro-batches of a step as Note [Long windows] shows."""
    return play(tape, replace(candidate, accumulation=_num_shown(candidate)))


def _num_shown(candidate: Candidate) -> int:
    if candidate.in_rounds:
        return candidate.accumulation
    disks = "nvme" in candidate.offload.tiers
    return min(candidate.accumulation, _LONGEST_WITH_DISKS if disks else _LONGEST_PLAYED)


def time_window(
    tape: Tape, candidate: Candidate, played: Played, prices: Pricer, scenario: Scenario | None
) -> Window:
    """Simulate a step of one stage, of which ``play_shown`` gave ``played``.

    **Cost** one more play; with jitter, up to a few thousand operations more on each rank.

    **Source** see Notes [Long windows] and [Noise and long windows].
    """

    def time(played: Played, within: Scenario | None = scenario) -> Simulated:
        return simulate(played.program, prices.seconds, within, overlap=prices.overlap)

    shown, simulated = _num_shown(candidate), time(played)
    more = candidate.accumulation - shown
    if not more and candidate.pp == 1:
        return Window(played, simulated, simulated.step_s, simulated.step_s / shown)
    quiet = scenario and replace(scenario, jitter_sigma=0.0)
    # A window of one has no shorter one: there the difference is to that of two.
    other = play(tape, replace(candidate, accumulation=shown - 1 if shown > 1 else 2))
    noisy = scenario is not None and scenario.jitter_sigma > 0
    quiet_s = time(played, quiet).step_s if noisy else simulated.step_s
    micro_batch_s = abs(quiet_s - time(other, quiet).step_s)
    if scenario is not None and noisy and quiet_s > 0:
        ops = min(_AVERAGED_OPS, _AVERAGED_RANK_OPS // scenario.num_ranks)
        steps = max(scenario.num_steps, -(-ops // len(played.program.ops)))
        micro_batch_s *= time(played, replace(scenario, num_steps=steps)).step_s / quiet_s
    window_s = simulated.step_s + more * micro_batch_s
    if more:
        program, less = played.program, other.program
        program = replace(
            program,
            sent_bytes=_extend(program.sent_bytes, less.sent_bytes, more),
            num_collectives=_extend(program.num_collectives, less.num_collectives, more),
            copied_bytes=_extend(program.copied_bytes, less.copied_bytes, more),
        )
        played = replace(played, program=program)
    return Window(played, simulated, window_s, micro_batch_s)


def _extend(longer: Mapping[str, int], shorter: Mapping[str, int], more: int) -> dict[str, int]:
    """Add ``more`` times what one more micro-batch added."""
    return {key: value + more * (value - shorter.get(key, 0)) for key, value in longer.items()}

"""Lab 10: what goes wrong. Rules of a small doctor, held against runs that fail on purpose.

Fill in PREDICT first, then the gaps from top to bottom. `shardwise lab run 10` trains with bad
settings and lets your rules judge them; `shardwise lab check 10 lab10_failures.py` checks them.
"""

from typing import Any

# Step 1, before you run anything. Units of 10, 40, 40, 40 and 10 MB. Backward finishes them from
# the last one to the first. A bucket collects units, and starts ONE reduction for all of them once
# it holds at least so many MB. The rest is reduced at the end of backward.
PREDICT = {
    "reductions with buckets of 1 MB": 5,  # predicted
    "reductions with buckets of 45 MB": 3,  # predicted
    "reductions with buckets of 1000 MB": 1,  # predicted
    # A save stops training for 30 s, and a failure comes every 10 hours on average.
    "minutes between saves that lose least": 24.5,  # predicted
}


def num_reductions(unit_bytes: list[int], bucket_bytes: int) -> int:
    """Return the reductions of one backward pass; the last unit is finished first."""
    # GAP 1. Go through the units from the last one on, and add up what the bucket holds.
    count, held = 0, 0
    for size in reversed(unit_bytes):
        held += size
        if held >= bucket_bytes:
            count, held = count + 1, 0
    return count + (held > 0)
    # END


def bucket_finding(unit_bytes: list[int], bucket_bytes: int, usual_bytes: int) -> str | None:
    """Return "SW010" for a bucket that is too small, "SW011" for one that is too large, or None.

    `usual_bytes` is the bucket's size by default.
    """
    # GAP 2. Too small: at least twice as many reductions as with the usual bucket. Too large: more
    # than usual, and the whole model fits, so nothing is reduced before backward has ended.
    if num_reductions(unit_bytes, bucket_bytes) >= 2 * num_reductions(unit_bytes, usual_bytes):
        return "SW010"
    if bucket_bytes > usual_bytes and bucket_bytes >= sum(unit_bytes):
        return "SW011"
    return None
    # END


def wrapping_finding(unit_bytes: list[int]) -> str | None:
    """Return "SW002" if the model is one unit, "SW004" if one unit is most of it, or None."""
    # GAP 3. A unit is most of the model if it has more than half of all bytes.
    if len(unit_bytes) == 1:
        return "SW002"
    if max(unit_bytes) > sum(unit_bytes) / 2:
        return "SW004"
    return None
    # END


def save_interval(save_s: float, failure_s: float) -> float:
    """Return the seconds between saves that lose the least time.

    `save_s` is what a save costs, `failure_s` the mean time between failures.
    """
    # GAP 4. With interval T a run loses save_s / T of its time in saves, and after a failure T / 2
    # on average, so T / 2 / failure_s. Which T makes the sum smallest? (Set its derivative to 0.)
    return (2 * save_s * failure_s) ** 0.5
    # END


def offload_slowdown(step_s: float, moved_bytes: float, bytes_per_second: float) -> float:
    """Return how many times as long a step takes if it moves so many bytes to and from the host.

    Copies run beside the step, so the longer of the two decides.
    """
    # GAP 5. 1.0 if the copies take no longer than the step.
    return max(step_s, moved_bytes / bytes_per_second) / step_s
    # END


def activation_finding(state_bytes: int, other_bytes: int, device_bytes: int) -> str | None:
    """Return "SW030" if a device is nearly full, and activations are the most of it; else None.

    `state_bytes` are parameters, gradients and moments; the others are activations.
    """
    # GAP 6. Nearly full: at least 85 % of the device. No stage divides activations, so a higher
    # one would not help: less of them must be kept.
    is_full = state_bytes + other_bytes >= 0.85 * device_bytes
    return "SW030" if is_full and other_bytes > state_bytes else None
    # END


def slow_axis(sent: dict[str, float], seconds: dict[str, float]) -> str | None:
    """Return the axis that is much slower than the fastest ("SW014"), or None.

    An axis is one way in which ranks are grouped, such as those that shard (lab 11). `sent` and
    `seconds` are bytes and seconds in a step, by axis; an axis may have sent nothing.
    """
    # GAP 7. Much slower: less than 0.3 of the fastest one's bytes per second. More seconds alone
    # say nothing: more bytes may have been sent.
    rates = {axis: sent[axis] / seconds[axis] for axis in sent if sent[axis] and seconds[axis]}
    slow = [axis for axis, rate in rates.items() if rate < 0.3 * max(rates.values())]
    return min(slow, key=rates.__getitem__) if slow else None
    # END


def mend(settings: dict[str, Any], finding: str) -> dict[str, Any]:
    """Return other settings, with which the doctor finds nothing any more.

    "units" are numbers of layers, one after another, each at least 1. "bucket_bytes" are usually
    1 << 20. "offload" is None, "cpu" or "files". "save_every" is a number of steps, or None.
    """
    # GAP 8. Each finding is about one of the four; change no other. All state fits on the device.
    # A step takes two minutes, and half an hour without a save is too long for the doctor.
    if finding in ("SW010", "SW011"):
        return settings | {"bucket_bytes": 1 << 20}
    if finding in ("SW002", "SW004"):
        return settings | {"units": [1] * sum(settings["units"])}
    if finding in ("SW032", "SW033"):
        return settings | {"offload": None}
    return settings | {"save_every": 10}
    # END


# After the run. lab10_broken.py has one rule that finds nothing where something is wrong: which
# line, and which finding is missed: "SW002", "SW004", "SW010" or "SW011"?
BREAK = {
    "line": None,  # its number
    "finding": None,
}

# 64 devices, each failing every 6,400 hours on average, so one of them every 100 hours. A save
# costs 20 s. Save every 5, 20, 60 or 480 minutes?
DECIDE = {
    "minutes": None,
}

# True or False?
CLAIMS = {
    "Larger buckets are always better, since a message costs a latency": None,
    "At zero3 one large unit takes more memory than many small ones": None,
    "Offloading to the host can leave a step as fast as before": None,
}

"""Lab 10: what goes wrong."""

from shardwise_labs.course import Claim, Decision, Defect, Lab, Number

LAB = Lab(
    number=10,
    name="failures",
    title="What goes wrong, and how to find it",
    targets={
        "count": 1,
        "buckets": 2,
        "wrapping": 3,
        "saves": 4,
        "offload": 5,
        "activations": 6,
        "axis": 7,
        "mend": 8,
    },
    num_ranks=(2,),
    predict={
        "reductions with buckets of 1 MB": Number(5, "each unit fills a bucket by itself"),
        "reductions with buckets of 45 MB": Number(3, "10 + 40, then 40 + 40, and 10 are left"),
        "reductions with buckets of 1000 MB": Number(1, "what is left at the end is reduced once"),
        "minutes between saves that lose least": Number(
            24.5, "the square root of 2 x 30 s x 36,000 s is 1,470 s", within=0.02
        ),
    },
    claims={
        "Larger buckets are always better, since a message costs a latency": Claim(
            False,
            "gradients wait in them: the peak is {huge_peak} bytes with one huge bucket and "
            "{tiny_peak} with tiny ones. And no reduction runs beside backward",
        ),
        "At zero3 one large unit takes more memory than many small ones": Claim(
            True, "the peak is {one_peak} bytes with one unit, {many_peak} with six"
        ),
        "Offloading to the host can leave a step as fast as before": Claim(
            True, "copies run beside the step: 20 GB at 20 GB/s hide behind a step of 2 s"
        ),
    },
    defect=Defect(
        "if max(unit_bytes) > 2 * sum(unit_bytes):",
        "SW004",
        "no unit is larger than the model, so the rule never finds anything",
    ),
    decision=Decision(
        60,
        "the square root of 2 x 20 s x 360,000 s is 3,795 s, or 63 minutes",
        "put both numbers, in seconds, into your save_interval",
    ),
    uses_engine=True,
    hang_s=60.0,
    hints={
        1: (
            "Two numbers: reductions so far, and bytes in the bucket.",
            "reversed(unit_bytes): add the size; if the bucket is full, count and empty it.",
            "At the end: count + (held > 0).",
        ),
        2: (
            "Call num_reductions with both sizes of buckets.",
            "SW010 if the first is at least twice the second.",
            "SW011 if bucket_bytes > usual_bytes and bucket_bytes >= sum(unit_bytes). Else None.",
        ),
        3: (
            "Two conditions, and the first is about the number of units.",
            "A list of one unit is SW002, however large it is.",
            "SW004 if max(unit_bytes) > sum(unit_bytes) / 2.",
        ),
        4: (
            "Write the loss as a function of T: save_s / T + T / (2 * failure_s).",
            "Its derivative is -save_s / T**2 + 1 / (2 * failure_s).",
            "T is the square root of 2 * save_s * failure_s.",
        ),
        5: (
            "How long do the copies take?",
            "The step takes the longer of the two. How many times as long as before?",
            "max(step_s, moved_bytes / bytes_per_second) / step_s",
        ),
        6: (
            "Two conditions: the device is nearly full, and of what?",
            "state_bytes + other_bytes against 0.85 * device_bytes.",
            "'SW030' if is_full and other_bytes > state_bytes else None",
        ),
        7: (
            "Bytes per second of each axis, and the largest of those.",
            "Leave out axes without bytes or seconds.",
            "The slowest whose rate is below 0.3 * max(rates.values()), or None.",
        ),
        8: (
            "`shardwise explain SW010` names the remedies in their order. And the other six?",
            "Usual buckets; one layer in each unit; no offload; a save at least every 14 steps.",
            "settings | {'units': [1] * sum(settings['units'])}, and so for the other three.",
        ),
    },
)

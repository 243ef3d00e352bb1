"""Lab 2: collectives."""

from shardwise_labs.course import Claim, Decision, Defect, Lab, Number

LAB = Lab(
    number=2,
    name="collectives",
    title="Collectives from sends and receives",
    targets={"exchange": 1, "scatter": 2, "gather": 3, "reduce": 4, "seconds": 5},
    num_ranks=(3,),
    predict={
        "everything to everyone, in P on 4 ranks": Number(3, "P to each of 3 other ranks"),
        "slice by slice, in P on 4 ranks": Number(
            1.5, "3 slices of P / 4 to those who add them, and 3 sums of P / 4 back"
        ),
        "seconds for 7B on 8 ranks": Number(1.96, "2 x 7/8 of 28 GB, at 25 GB/s"),
    },
    claims={
        "An all-reduce of P bytes on 3 ranks sends P bytes per rank": Claim(
            False, "it is two passes of (N - 1) / N each: {sent} bytes sent for {whole}"
        ),
        "A ring adds in rank order, so it has the bits of one process": Claim(
            False,
            "the sum of slice r begins at rank r + 1: {other_bits} of {numel} random numbers have "
            "other bits than a sum in rank order",
        ),
        "On twice as many ranks each rank sends less than twice as many bytes": Claim(
            True,
            "2 (N - 1) / N never reaches 2: {sent} bytes on 3 ranks, {of_six} on 6",
        ),
    },
    defect=Defect(
        "BUCKET = 96",
        "SW010",
        "each message has 128 bytes, so the time is latency and no link is ever filled",
    ),
    decision=Decision(
        25,
        "49 GB in 1.96 s; at 12.5 GB/s it takes 3.92 s, longer than backward",
        "how many GB does a rank send, and how many are that in each of the 2.5 s?",
    ),
    hints={
        1: (
            "`dist.send` returns when the message is on its way. Who is receiving by then?",
            "dist.isend(tensor, right) returns at once. Keep what it returns.",
            "received = torch.empty_like(tensor); isend, recv(received, left), handle.wait().",
        ),
        2: (
            "Write down for 3 ranks which slice each rank sends in step 0 and in step 1.",
            "The partial sum starts as slices[(rank - 1) % num_ranks].",
            "In the loop: total = exchange(total) + slices[(rank - 2 - step) % num_ranks].",
        ),
        3: (
            "The same ring, but slices are copied into their places and not added.",
            "What you pass on in step s is what arrived in step s - 1; first it is `mine`.",
            "piece = exchange(piece); slices[(rank - 1 - step) % num_ranks].copy_(piece).",
        ),
        4: (
            "First every rank adds up one slice, then all ranks get all slices.",
            "You have a function for each half.",
            "all_gather(reduce_scatter(values))",
        ),
        5: (
            "Two passes. In each a rank sends all slices but one.",
            "(N - 1) / N of the bytes in each pass, divided by bytes per second.",
            "2 * (num_ranks - 1) / num_ranks * num_bytes / bytes_per_second",
        ),
    },
)

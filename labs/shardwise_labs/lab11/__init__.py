"""Lab 11: compose kinds of parallelism."""

from shardwise_labs.course import Claim, Decision, Defect, Lab, Number

LAB = Lab(
    number=11,
    name="compose",
    title="Compose tensor, data and pipeline",
    targets={
        "places": 1,
        "copy": 2,
        "sum": 3,
        "mean": 4,
        "pipeline": 5,
        "tensor": 3,
        "sent": 5,
    },
    num_ranks=(4,),
    predict={
        "stage of rank 5 with pp=2, dp=2, tp=2": Number(1, "5 = (1 * 2 + 0) * 2 + 1"),
        "gradient's scale, if divided by 4 ranks where dp is 2": Number(0.5, "2 / 4"),
        "idle share": Number(3 / 11, "8 micro-batches take 8 + 3 slots: a stage waits in 3 of 11"),
    },
    claims={
        "Gradients are averaged over all ranks": Claim(
            False,
            "over those with other batches. Averaged over all four, the gradient of `up` is {wrong}"
            " x as large as in one process, and a mixture of two parts",
        ),
        "What tensor parallelism sends grows with the batch": Claim(
            True,
            "it sends activations: {tp_sent} bytes in a step with 4 rows, {tp_sent_more} with 8",
        ),
        "A rank of a pipeline sends as much as one of data parallelism": Claim(
            False, "{pp_sent} bytes to its neighbour, {dp_sent} to average gradients"
        ),
    },
    defect=Defect(
        "part, rest = divmod(rank, pp * dp)",
        "SW014",
        "ranks of a tensor-parallel group are far apart, so each layer waits for the slow link",
    ),
    decision=Decision(
        "zero3",
        "17.5 GB of state and 30 GB of activations fit; other axes would only add messages",
        "what does zero3 hold of 16 x 70 GB on 64 devices, and what is left for activations?",
    ),
    hints={
        1: (
            "divmod(rank, tp) splits off the axis that runs fastest.",
            "rest, part = divmod(rank, tp). What is left is stage * dp + replica.",
            "stage, replica = divmod(rest, dp); return stage, replica, part",
        ),
        2: (
            "The input went to every rank, so its gradient comes from every rank.",
            "An all_reduce over ctx.group, of a clone.",
            "total = grad.clone(); dist.all_reduce(total, group=ctx.group); return total, None",
        ),
        3: (
            "A row-parallel product gives each rank a summand of the output.",
            "An all_reduce over group, of a clone.",
            "total = x.clone(); dist.all_reduce(total, group=group); return total",
        ),
        4: (
            "Parts of a tensor are different parameters: they must not be averaged.",
            "dist.all_reduce(p.grad, group=group), then divide by the number of ranks in group.",
            "p.grad /= dist.get_world_size(group)",
        ),
        5: (
            "Two loops over the micro-batches. Keep (x, y) of each for the second one.",
            "Without `after` y is the loss, divided by len(micro); with it, y.backward(grad).",
            "x = given.clone(); dist.recv(x, before); x.requires_grad_(); later send x.grad.",
        ),
    },
)

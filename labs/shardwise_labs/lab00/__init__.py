"""Lab 0: when not to shard."""

from shardwise_labs.course import Claim, Decision, Defect, Lab, Number

LAB = Lab(
    number=0,
    name="replicas",
    title="When not to shard",
    targets={
        "fits": 1,
        "each": 2,
        "flat": 3,
        "start": 4,
        "passes": 5,
        "bits": 4,
        "sent": 3,
    },
    num_ranks=(2,),
    predict={
        "GB of a model of 1e9 parameters on each rank": Number(16, "4 + 4 + 8 bytes for each"),
        "bytes sent in a step, in P, on 2 ranks": Number(1, "2 * 1 / 2"),
        "the same on 8 ranks": Number(1.75, "2 * 7 / 8: it grows to 2, however many ranks"),
        "messages with one for each tensor": Number(28, "one for each of 28 tensors"),
    },
    claims={
        "Sharding makes a model that fits train faster": Claim(
            False,
            "zero3 makes {zero3_calls} collectives in a step where one does, and sends {zero3_sent}"
            " bytes in place of {sent}",
        ),
        "With data parallelism on two ranks each holds half of the model": Claim(
            False, "each holds all of it, {held} bytes after backward; only the batch is divided"
        ),
        "ZeRO-1 sends hardly more bytes than data parallelism": Claim(
            True,
            "{zero1_sent} and {sent} bytes: a reduce-scatter and an all-gather are the two halves "
            "of an all-reduce. It costs nothing, and saves {zero1_saved} bytes",
        ),
    },
    defect=Defect(
        "yours.average_each(self.parameters)",
        "SW010",
        "28 small messages in place of one: each costs a latency, and the bytes are the same",
    ),
    decision=Decision(
        "replicated",
        "24 GB and 8 GB fit in 40 GB, so nothing needs to be sharded",
        "what do 16 bytes per parameter and the activations need on one device?",
    ),
    hints={
        1: (
            "What of the device is left beside the activations? What does a parameter need?",
            "16 bytes for each parameter, on every rank.",
            "(device_bytes - activation_bytes) // 16",
        ),
        2: (
            "A loop over parameters, and two lines for each that has a gradient.",
            "all_reduce adds. A mean is the sum divided by dist.get_world_size().",
            "dist.all_reduce(p.grad); p.grad /= dist.get_world_size()",
        ),
        3: (
            "One tensor with all gradients one after another, one all_reduce, and back again.",
            "flat.split([grad.numel() for grad in grads]) gives the parts.",
            "grad.copy_(part.view_as(grad)) for each; leave out parameters without a gradient.",
        ),
        4: (
            "If ranks begin with different values, equal gradients keep them different.",
            "dist.broadcast(p.data, src=0) for each parameter.",
            "Then torch.optim.Adam(self.parameters, lr=lr, foreach=False).",
        ),
        5: (
            "Which of the stages send something in each micro-batch?",
            "replicated and zero1 do not: 2 passes, however many micro-batches.",
            "zero2: micro_batches + 1. zero3: 3 * micro_batches.",
        ),
    },
)

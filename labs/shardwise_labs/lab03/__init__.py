"""Lab 3: ZeRO-1."""

from shardwise_labs.course import Claim, Decision, Defect, Lab, Number

LAB = Lab(
    number=3,
    name="zero1",
    title="ZeRO-1: divide the optimizer's state",
    targets={
        "pad": 1,
        "mean": 2,
        "gather": 3,
        "gradient": 5,
        "bits": 5,
        "held": 4,
        "sent": 5,
        "peak": 5,
    },
    num_ranks=(3,),
    predict={
        "7B replicated, GB per rank": Number(112, "4 + 4 + 8 bytes for each of 7e9 parameters"),
        "7B zero1, GB per rank": Number(63, "4 + 4 bytes, and 8 / 8 of Adam"),
        "zero1 sends, in P on 3 ranks": Number(
            4 / 3, "2/3 P to reduce the gradients, and 2/3 P to gather the parameters"
        ),
        "elements per rank": Number(3, "10 is padded to 12"),
    },
    claims={
        "ZeRO-1 sends twice as much as DDP, since it reduces and gathers": Claim(
            False,
            "an all-reduce is both: {ddp_sent} bytes for DDP here, and {sent} were sent",
        ),
        "With Adam, a sum of gradients in place of the mean hardly shows in the parameters": Claim(
            True,
            "Adam divides by the size of the gradient: training with sums moves these parameters "
            "by {sum_update} of their norm. Clipping and SGD do see it",
        ),
        "With ZeRO-1 a rank computes the gradients of its own slice only": Claim(
            False,
            "its batch gives a gradient to every parameter: each rank has {grads} bytes of them",
        ),
    },
    defect=Defect(
        "start += yours.padded(p.numel(), num_ranks * 2048)",
        "SW006",
        "each bias of 64 elements takes 6,144; a flat tensor needs zeros at its end only",
    ),
    decision=Decision(
        16,
        "56 GB stay whole, and 56 / N of moments must fit in 4: 14 or more",
        "parameters and gradients take 56 GB on each rank. Are 56 / N of moments too much?",
    ),
    hints={
        1: (
            "10 elements on 4 ranks are 3 each, so 12 in all.",
            "Divide and round up, then multiply. Python's // rounds down.",
            "-(-numel // num_ranks) rounds up.",
        ),
        2: (
            "An all-reduce gives every rank everything. Here each rank needs one slice.",
            "dist.reduce_scatter(output, list of N slices) sums, by default.",
            "Divide the output by dist.get_world_size(), then return it.",
        ),
        3: (
            "The collective that gives all ranks all slices is an all-gather.",
            "dist.all_gather(list of N tensors, shard) writes into the tensors of the list.",
            "Tensors of values.chunk(num_ranks) are views: writing to them fills `values`.",
        ),
        4: (
            "A slice of a tensor is a view. nn.Parameter(view) stays one.",
            "This rank's slice begins at rank * size, where size is numel // num_ranks.",
            "torch.optim.Adam([self.shard], ...): then the moments are as large as the shard.",
        ),
        5: (
            "Four things in order: mean gradient, optimizer, gather, zeros.",
            "self.shard.grad is what Adam reads; mean_slice(self.flat.grads) is what it should be.",
            "After the gather: self.flat.grads.zero_() and self.shard.grad = None.",
        ),
    },
)

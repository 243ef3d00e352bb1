"""Lab 4: ZeRO-2."""

from shardwise_labs.course import Claim, Decision, Defect, Lab, Number

LAB = Lab(
    number=4,
    name="zero2",
    title="ZeRO-2: divide the gradients",
    targets={
        "hooks": 1,
        "count": 2,
        "reduce": 3,
        "gradient": 4,
        "bits": 5,
        "held": 3,
        "sent": 4,
        "peak": 3,
    },
    num_ranks=(2,),
    predict={
        "7B zero2, GB per rank": Number(38.5, "4 bytes of a parameter, and (4 + 8) / 8"),
        "zero2 sends, over zero1": Number(1, "each gradient is still reduced once per step"),
        "with four micro-batches, over zero1": Number(
            2.5, "four reductions and one gather, over one of each"
        ),
    },
    claims={
        "ZeRO-2 never holds the full gradients of a unit": Claim(
            False,
            "backward writes full gradients: the peak is {peak} bytes, and {held} stay after it",
        ),
        "With one micro-batch per step, ZeRO-2 sends what ZeRO-1 sends": Claim(
            True, "both send {sent} bytes: one reduction and one gather of everything"
        ),
        "A run whose optimizer reads 1/N of each gradient is ZeRO-2": Claim(
            False,
            "ZeRO-1's reads as much. What counts is what is held after backward: {grads} bytes "
            "of gradients here, {full_grads} at ZeRO-1",
        ),
    },
    defect=Defect(
        "BUCKET = 1 << 20",
        "SW011",
        "the model has fewer elements, so all full gradients wait for the end of backward",
    ),
    decision=Decision(
        "zero1",
        "63 GB fit in 70, and zero2 sends 2.5 x as much",
        "what does each stage hold, of 70 GB? And what does it send in four micro-batches?",
    ),
    hints={
        1: (
            "Autograd writes the gradients of a module one by one. You want a call after each.",
            "p.register_post_accumulate_grad_hook(function) calls function(p) after p.grad is set.",
            "lambda _p: self.count_gradient(), once for each of self.parameters.",
        ),
        2: (
            "num_missing is set before backward, in Zero2.backward.",
            "Subtract 1. At which value is the unit complete?",
            "if self.num_missing == 0: self.reduce()",
        ),
        3: (
            "mean_slice needs one flat tensor, laid out as self.values.",
            "torch.zeros(self.values.numel()), then full[span] = p.grad.flatten(), p by p.",
            "Set p.grad = None in the loop. Then shard.grad is the mean, or itself plus the mean.",
        ),
        4: (
            "After backward num_missing is above 0 in a unit with an unused parameter.",
            "Such a unit has gradients of its other parameters. They are still to be reduced.",
            "for unit in self.units: if unit.num_missing > 0: unit.reduce()",
        ),
        5: (
            "The gradients are reduced when step begins: two calls of the optimizer come first.",
            "self.optimizer.step(), then self.optimizer.zero_grad().",
            "gather_slices(unit.values, unit.shard.data) for each unit.",
        ),
    },
    needs=("lab03_zero1.py",),
)

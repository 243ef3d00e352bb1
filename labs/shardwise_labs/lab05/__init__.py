"""Lab 5: ZeRO-3."""

from shardwise_labs.course import Claim, Decision, Defect, Lab, Number

LAB = Lab(
    number=5,
    name="zero3",
    title="ZeRO-3: divide the parameters",
    targets={
        "shard": 1,
        "gather": 2,
        "free": 3,
        "forward": 4,
        "reduce": 5,
        "gradient": 6,
        "bits": 6,
        "held": 6,
        "sent": 6,
        "peak": 5,
    },
    num_ranks=(2,),
    predict={
        "7B zero3, GB per rank": Number(14, "all 16 bytes are divided by 8"),
        "zero3 sends, over zero1": Number(
            1.5, "a gather in forward, one in backward, and the reduction: three passes, not two"
        ),
        "gathers of a module that runs twice": Number(
            3, "one for each forward call, and one in backward: it is full from the second call on"
        ),
    },
    claims={
        "ZeRO-3 sends three times as many bytes as ZeRO-1": Claim(
            False, "it makes three passes, ZeRO-1 two: {sent} bytes here, and {zero1_sent}"
        ),
        "Fewer and larger units raise the peak": Claim(
            True,
            "three full copies of the largest unit are there: {peak} bytes with six units, "
            "{one_unit} with one",
        ),
        "ZeRO-3 gathers each parameter once per step": Claim(
            False, "forward frees it, so backward gathers again: {gathers} gathers of six units"
        ),
    },
    defect=Defect(
        "GROUP = 4",
        "SW004",
        "all four blocks form one unit, so three full copies of all of them are there at once",
    ),
    decision=Decision(
        8,
        "112 / 8 = 14 GB of slices, and 2.4 GB of one full unit, fit in 20 GB",
        "activations and one full unit take 6.4 of 24 GB. Does 112 / N fit in the rest?",
    ),
    hints={
        1: (
            "A view shares memory with its tensor. Free the tensor, and the view is empty.",
            "self.values[self.mine].clone() has memory of its own.",
            "self.shard.data = that clone; then self.free().",
        ),
        2: (
            "Three steps: give memory back, fill it, remember that the unit is full.",
            "4 bytes per element: resize_(self.values.numel() * 4) on the untyped storage.",
            "Return at once if self.is_full. Else resize, gather_slices, self.is_full = True.",
        ),
        3: (
            "The tensor must stay, since parameters are views of it. Its memory need not.",
            "A storage of 0 bytes is a tensor without memory.",
            "self.values.untyped_storage().resize_(0), and self.is_full = False.",
        ),
        4: (
            "Forward is over, so free. But backward of this module needs the values again.",
            "output.register_hook(function) calls it when the gradient of the output is known.",
            "if output.requires_grad: output.register_hook(lambda _grad: self.gather())",
        ),
        5: (
            "Lab 4's reduce has done the gradients. What of this unit is still full?",
            "super().reduce() calls lab 4's.",
            "super().reduce(), then self.free().",
        ),
        6: (
            "Shards are parameters with gradients. Adam needs no more.",
            "The next forward pass gathers, so there is nothing to send here.",
            "self.optimizer.step(), then self.optimizer.zero_grad().",
        ),
    },
    needs=("lab03_zero1.py", "lab04_zero2.py"),
)

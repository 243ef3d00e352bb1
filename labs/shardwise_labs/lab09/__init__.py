"""Lab 9: mixed precision."""

from shardwise_labs.course import Claim, Decision, Defect, Lab, Number

LAB = Lab(
    number=9,
    name="precision",
    title="Mixed precision: masters and loss scaling",
    targets={
        "ulp": 1,
        "gradient": 3,
        "bits": 3,
        "held": 2,
        "sent": 3,
        "moves": 2,
        "skip": 4,
        "scale": 5,
    },
    num_ranks=(2,),
    predict={
        "the bf16 number after 1.0": Number(
            1 + 2**-7, "8 significant bits, so the step from 1.0 is 2**-7", within=0.0005
        ),
        "1.0 in bf16 after 1000 times 0.001": Number(
            1, "0.001 is less than half of 2**-7, so each single sum rounds back to 1.0"
        ),
        "bytes per parameter on 2 ranks": Number(10, "2 + 2, and 4 + 4 + 4 divided by 2"),
    },
    claims={
        "bf16 needs no loss scaling, so it needs no fp32 masters": Claim(
            False,
            "its range is that of fp32, but its steps are wide: after 16 steps {moved_without} of "
            "{gains} gains of norms have moved without masters, {moved} with them",
        ),
        "The loss can go down while updates round away": Claim(
            True,
            "without masters the mean loss of all batches went from {first_loss} to {last_loss}, "
            "and {lost} of the updates rounded away",
        ),
        "A rank whose gradient overflows may skip its step alone": Claim(
            False,
            "the other ranks step: {apart} parameters of {all} moved, and the moments' counters "
            "of steps differ from then on",
        ),
    },
    defect=Defect(
        "self.master.data.copy_(own)",
        "SW042",
        "the masters are read back from the rounded values, so what they hold beyond bf16 is lost "
        "in each step",
    ),
    decision=Decision(
        "masters",
        "2 + 2 + 12 / 8 bytes: 38.5 GB. fp32 is 63 GB, and bf16 alone does not move",
        "GB at zero1 on 8 ranks, for each; then the smallest update of a bf16 weight",
    ),
    hints={
        1: (
            "1.0 is 0.5 * 2**1. The next number is 1 + 2**-7. So which exponent is half a step?",
            "A step is 2**(e - 8), half of it 2**(e - 9).",
            "torch.ldexp(torch.ones_like(weights), exponent - 9)",
        ),
        2: (
            "The masters keep what rounding to bf16 drops. Where is it still there?",
            "Take the slice from `values`, not from self.flat.values.",
            "nn.Parameter(values.chunk(num_ranks)[rank].clone())",
        ),
        3: (
            "mean_slice, optimizer.step and gather_slices, as in lab 3. What does each work on?",
            "self.flat.grads.float() goes in, self.master.data.bfloat16() goes out.",
            "After the gather: self.flat.grads.zero_() and self.master.grad = None.",
        ),
        4: (
            "What must all ranks know before one of them steps? How many bytes is that?",
            "A flag of one element: 1.0 if the slice has something that is not finite.",
            "bad = (~grad.isfinite().all()).float(); dist.all_reduce(bad)",
        ),
        5: (
            "Three cases: skipped; good and the row is complete; good.",
            "A skipped step ends the row, and so does a growth.",
            "elif self.good_steps == self.growth_steps: double, and set good_steps to 0.",
        ),
    },
    needs=("lab03_zero1.py",),
)

"""Lab 8: offload."""

from shardwise_labs.course import Claim, Decision, Defect, Lab, Number

LAB = Lab(
    number=8,
    name="offload",
    title="Offload, and when it does not pay",
    targets={
        "blocks": 1,
        "step": 2,
        "ahead": 3,
        "bits": 4,
        "held": 4,
        "moved": 4,
        "tokens": 5,
    },
    num_ranks=(2,),
    predict={
        "7B zero1 with offload, GB": Number(56, "4 + 4 bytes stay; the moments are elsewhere"),
        "bytes moved per element": Number(16, "two moments of 4 bytes, read and written"),
        "tokens that hide the copies": Number(5333, "16 * 4e14 / (6 * 8 * 25e9)"),
    },
    claims={
        "Offloading the moments halves what zero1 holds, on any number of ranks": Claim(
            False,
            "on {ranks} ranks it holds {held} bytes in place of {zero1_held}: zero1 has divided "
            "the moments already, so on more ranks there is less to win",
        ),
        "Reading ahead moves fewer bytes": Claim(
            False, "{ahead_moved} bytes with it and {moved} without: they move beside the step"
        ),
        "A larger batch hides more of the copies": Claim(
            True,
            "{ahead_moved} bytes are moved in a step with 1 row, {wide_moved} with 8: compute "
            "grows, copies do not",
        ),
    },
    defect=Defect(
        "self.size = 64",
        "SW033",
        "a read for each 64 elements: hundreds of small reads, each with its latency",
    ),
    decision=Decision(
        "keep",
        "63 GB of zero1 and 10 GB fit in 80 GB: offload would only cost",
        "what does zero1 hold on 8 ranks, and is it too much beside the activations?",
    ),
    hints={
        1: (
            "range(0, numel, size) has the beginnings.",
            "The last end is numel, and not begin + size.",
            "[(begin, min(begin + size, numel)) for begin in range(0, numel, size)]",
        ),
        2: (
            "Three calls for each block. Which of them change something in place?",
            "values[begin:end] is a view, so adam changes values. moments have to be written.",
            "moments = store.read(begin, end); adam(...); store.write(begin, moments)",
        ),
        3: (
            "Take the result of the read in flight, begin the next read, and then step.",
            "coming = pool.submit(store.read, *cuts[0]) before the loop.",
            "In the loop: coming.result(), submit cuts[number + 1] if there is one, adam, write.",
        ),
        4: (
            "mean_slice, step_ahead, gather_slices, zero: lab 3 with another optimizer.",
            "self.num_steps += 1 first; the gradient is a local variable.",
            "step_ahead(self.shard.data, grad, self.store, self.num_steps, self.lr, self.size)",
        ),
        5: (
            "Set the two times equal, and solve for T.",
            "6 * P * T / flops = 16 * P / N / bytes_per_second. P falls out.",
            "16 / num_ranks / bytes_per_second * flops / 6",
        ),
    },
    needs=("lab03_zero1.py",),
)

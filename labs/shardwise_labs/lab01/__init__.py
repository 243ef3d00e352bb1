"""Lab 1: where memory goes."""

from shardwise_labs.course import Claim, Decision, Defect, Lab, Number

LAB = Lab(
    number=1,
    name="memory",
    title="Where memory goes",
    targets={"mixed": 1, "formula": 2, "stage": 3, "held": 4, "peak": 5},
    num_ranks=(2,),
    predict={
        "7B replicated": Number(112, "2 + 2 + 12 bytes for each of 7e9 parameters"),
        "7B zero1": Number(38.5, "only Adam's 12 bytes are divided by 8"),
        "7B zero2": Number(26.25, "gradients and Adam, 14 bytes, are divided by 8"),
        "7B zero3": Number(14, "all 16 bytes are divided by 8"),
        "70B zero3 on 64 ranks": Number(17.5, "16 bytes x 70e9 / 64"),
        "peak over formula": Number(None, "any number"),
    },
    claims={
        "ZeRO-3 divides a rank's peak memory exactly by the number of ranks": Claim(
            False,
            "the measured peak is {peak} bytes, the formula says {formula}: full parameters and "
            "gradients of a unit, and activations, come on top",
        ),
        "FSDP is there to make steps faster": Claim(
            False,
            "it is there to fit: zero3 sent {zero3_sent} bytes per step, zero1 {zero1_sent}",
        ),
        "In mixed precision a parameter costs as many bytes as in fp32": Claim(
            True, "2 + 2 + 12 = 16 bytes, as 4 + 4 + 8; activations are what gets smaller"
        ),
    },
    defect=Defect(
        '"zero1": alone["zero1"],',
        "SW001",
        "Adam's state is not divided; a run like that holds whole state on every rank",
    ),
    decision=Decision(
        "zero1",
        "63 GB of 70 GB; zero3 would hold 14 GB and send 1.5 x as much",
        "take the lowest stage that fits in 70 GB; in fp32 it is 4 + 4 + 8 bytes",
    ),
    hints={
        1: (
            "Mixed precision computes in 2 bytes, but Adam works in fp32.",
            "Adam keeps three numbers per parameter: a master copy and two moments.",
            '"adam" is 4 + 4 + 4; the other two are 2.',
        ),
        2: (
            "Which of the three kinds does each stage divide by dp?",
            "Write the replicated sum, then move one kind after the other under `/ dp`.",
            "zero2 = numel * (param + (grad + adam) / dp)",
        ),
        3: (
            "The dictionary of bytes_per_rank has the stages in the right order.",
            "Loop over its items and return at the first that is not above device_bytes.",
            "After the loop return None.",
        ),
        4: (
            "The number of elements is not bytes, and two tensors may share one memory.",
            "A dictionary from the storage's data_ptr() to its nbytes() has each storage once.",
            "storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() ...}",
        ),
        5: (
            "The slices are bytes_per_rank(...)['zero3'] of the sum of all units.",
            "Three full copies in fp32 of one unit come on top. Of which unit?",
            "slices + 12 * max(unit_numels)",
        ),
    },
)

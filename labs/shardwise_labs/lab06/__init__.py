"""Lab 6: one parameter's path through the engine."""

from shardwise_labs.course import Claim, Decision, Defect, Lab, Number

LAB = Lab(
    number=6,
    name="path",
    title="One parameter's path through the engine",
    targets={"rows": 1, "record": 2, "path": 3, "forms": 4, "sent": 5},
    num_ranks=(2,),
    predict={
        "rows of 2.up.weight on rank 0": Number(64, "128 rows, half of them on each rank"),
        "rows of the head on rank 1": Number(3, "rank 0 has ceil(7 / 2), and 3 are left"),
        "gathers of six units in a step": Number(
            11, "6 in forward and 5 in backward, since the last unit stays full"
        ),
    },
    claims={
        "model.parameters() gives full parameters to the optimizer": Claim(
            False, "it gives a {rest_class} with elements of shape {rest_shape} on this rank"
        ),
        "A unit is gathered when its forward begins": Claim(
            False,
            "{first} was called before {second}: the gather begins while another unit computes",
        ),
        "Between forward and backward one unit stays full": Claim(
            True, "{kept} bytes are full then: the last unit's, whose backward comes first"
        ),
    },
    defect=Defect(
        "units = [model]",
        "SW002",
        "one unit for the whole model: all of it is full from the first layer to the last",
    ),
    decision=Decision(
        "none",
        "each copy remembers the version of the slices that it was gathered from; the next forward "
        "compares, and gathers",
        "which step reads the full values next, and what does it compare before?",
    ),
    hints={
        1: (
            "share = ceil(rows / ranks), which is -(-rows // ranks) in integers.",
            "Rank r begins at r * share. The last ranks may have fewer rows, or none.",
            "min(rank * share, num_rows), min((rank + 1) * share, num_rows)",
        ),
        2: (
            "A function `look(frame, event, argument)`, and three calls after it.",
            "Append the name if event is 'call', the name is in STATIONS, and an argument is own.",
            "any(id(value) in own for value in frame.f_locals.values())",
        ),
        3: (
            "Five stations in forward, six in backward. Both begin with memory.",
            "Engine.before_forward waits in Unit.finish_unshard. Storage.free ends each pass.",
            "Backward: prepare_gather, on_backward, finish_unshard, on_unit_end, add, free.",
        ),
        4: (
            "Three moments: before the step, inside of the module's forward, after the step.",
            "module.register_forward_hook(function) calls function(module, inputs, output).",
            "found.update(forward=held(m.weight)) inside; hook.remove(); held(module.weight.grad).",
        ),
        5: (
            "Two sums. Which of the two lists does each take?",
            "2 * sum(own) counts the last unit once too often.",
            "2 * sum(own) - own[-1], sum(others) + 4 * num_tensors",
        ),
    },
    uses_engine=True,
)

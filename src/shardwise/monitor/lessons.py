"""What each code of a finding means: one table for findings, `shardwise explain` and its page."""

from dataclasses import dataclass

from shardwise.monitor.findings import Severity


@dataclass(frozen=True)
class Lesson:
    """One code, taught: what it means, when it is told, what to do first, what it looks like."""

    code: str
    title: str
    severity: Severity
    means: str
    signal: str
    remedies: tuple[str, ...]
    picture: str


_LESSONS = (
    Lesson(
        "SW001",
        "Not sharded",
        "critical",
        "State that should be cut over the ranks is whole on each of them, so more ranks save no "
        "memory. As a rule a mesh has all its ranks on the replicate axis, or an optimizer was "
        "given parameters that no unit owns.",
        "At stage 1 to 3 over several ranks: the shard axis has one rank; or slices x ranks exceed "
        "the parameters by more than 20 %; or more than 10 % of the bytes that the optimizer "
        "holds belong to no unit. Known at step 0.",
        (
            "put ranks on the shard axis (dp_shard), or leave the mesh out",
            "shard the whole model, not a part of it",
            "build the optimizer from the sharded model's parameters()",
        ),
        "The unit tree: bytes per rank equal the full bytes.",
    ),
    Lesson(
        "SW002",
        "One unit for the whole model",
        "warning",
        "All parameters are gathered, reduced and freed together. Nothing can be gathered while "
        "something else computes, and at stage 3 the whole model is on the device at its peak.",
        "Over several ranks: a single unit that has at least 8 parameters in at least 4 modules, "
        "of 4 MiB or more. Known at step 0.",
        (
            "name the blocks: shard(model, units=[...]) or fully_shard on each block",
            "keep the blocks in a ModuleList, where shard() finds them by itself",
        ),
        "The timeline: one long all-gather before the forward pass, one reduction after backward.",
    ),
    Lesson(
        "SW003",
        "Units too small",
        "warning",
        "Each unit costs a collective in forward and backward, and the host some ten to hundred "
        "microseconds. Many small ones are ruled by that, and never reach a link's bandwidth.",
        "More than 4 units in one repeated block, half of them below 1 MiB. Known at step 0.",
        (
            "one unit for each block, not for each layer in it",
            "experts of a block as one unit, unless each is large",
        ),
        "The timeline: a comb of short collectives, gaps between them.",
    ),
    Lesson(
        "SW004",
        "One unit is much larger than the others",
        "warning",
        "What the largest unit needs is held beside everything else: its full parameters and "
        "gradients are the spike of the step. While it is gathered there is nothing to compute.",
        "One unit has more than half of the parameters (30 % where its bytes also exceed 5 % of "
        "the device) beside at least 3 others, and 3 times the next one; of a model of at least 4 "
        "MiB. Known at step 0.",
        (
            "make units of the embedding and the head, outside the root unit",
            "split the unit: name its parts in units=",
        ),
        "Memory over the step: one narrow tower; the timeline: a gather that nothing hides.",
    ),
    Lesson(
        "SW005",
        "Another stage fits this run better",
        "warning",
        "A stage trades memory for traffic. Stage 3 gathers parameters twice in each step; stages "
        "0 and 1 keep what could be cut.",
        "Either memory is above 92 % of the device below stage 3, and state rather than "
        "activations fills it; or at stage 3 communication that nothing hides is above 15 % of "
        "the step, and the full parameters would fit into 70 % of the device.",
        (
            "memory: the next stage, up to 3",
            "time: stage 2, which keeps the parameters that it has gathered",
            "several hosts: stage 3 within each host, copies across them (dp_replicate)",
        ),
        "Memory of a step against the device's size; exposed communication of the step.",
    ),
    Lesson(
        "SW006",
        "Padding",
        "warning",
        "Rows that do not divide by the ranks are filled up. Padding takes memory on every rank, "
        "in the optimizer's state too, and on some backends it is sent.",
        "Padding above 2 % of the parameters and 1 MiB, or above 20 % and 64 KiB. Known at step 0.",
        (
            'layout="flat", which needs next to none',
            "a number of ranks that divides the rows (hidden size, vocabulary)",
            "a vocabulary rounded up to a multiple of the ranks",
        ),
        "The unit tree: the column of padding.",
    ),
    Lesson(
        "SW010",
        "Reductions too small",
        "warning",
        "Gradients of small units travel together until a bucket is full. With a tiny bucket each "
        "unit has a reduction of its own, which costs its latency instead of its bytes.",
        "bucket_bytes below the default makes at least twice as many reductions as the default "
        "would, and at least 2 more. Known at step 0.",
        ("bucket_bytes: leave it out (1 MiB)", "larger units"),
        "The timeline: many short reduce-scatters during backward.",
    ),
    Lesson(
        "SW011",
        "Buckets or prefetch too large",
        "warning",
        "A reduction begins when its bucket is full. One that takes the whole model begins after "
        "backward, hides behind nothing, and all full gradients wait in memory for it. A budget of "
        "prefetch as large as the model gathers it far ahead.",
        "Over several ranks: bucket_bytes above the default and as large as all parameters of at "
        "least 3 units; or at stage 3 prefetch_bytes of half the parameters and two of the "
        "largest units. Known at step 0.",
        ("bucket_bytes: leave it out (1 MiB)", "prefetch_bytes: leave it out (one unit ahead)"),
        "Memory over the step: gradients pile up until the end of backward, one reduction there.",
    ),
    Lesson(
        "SW012",
        "Communication is what the step waits for",
        "warning",
        "Collectives take longer than what they could hide behind. Waiting for a slow rank does "
        "not count here: the figure is that of the rank that waits least.",
        "Communication that nothing hides above 15 % of the step on the rank that waits least, "
        "and longer than what is noise. On a CPU, where ranks share cores, also 20 ms for each "
        "collective, and twice as long as ranks wait for a core.",
        (
            "more tokens in each step per device: micro-batch, accumulation",
            "prefetch_bytes larger; units of a block each",
            "stage 2, if its memory fits; several hosts: copies across them (dp_replicate)",
            "bf16 parameters and gradients on the wire",
        ),
        "The timeline: gaps on the line that computes, under collectives.",
    ),
    Lesson(
        "SW013",
        "A slow link between two ranks",
        "warning",
        "Both ranks of a pair wait long for each other's messages, while other pairs do not. A "
        "slow rank is waited for but does not wait itself; a slow link is waited for at both ends.",
        "The shorter of the two waits above 10 % of the step, and 3 times that of any other pair, "
        "in most lines. Needs 3 ranks and a transport that sends point to point (gloo).",
        (
            "look at the link: cable, switch port, NIC, route, TCP in the place of RDMA",
            "place the two ranks on hosts that are near each other",
            "copies across the slow link (dp_replicate), shards within",
        ),
        "The table of who waits for whom: two cells that mirror each other.",
    ),
    Lesson(
        "SW014",
        "A slow axis of the mesh",
        "warning",
        "Collectives over one axis move far fewer bytes in a second than those over another, and "
        "are what the step waits for: as a rule that axis goes over hosts.",
        "On accelerators: the rate over an axis below 0.3 of the fastest one's, its time above "
        "15 % of the step. With gloo: pairs of ranks over one axis, or on different hosts, wait "
        "for each other above 10 % of the step and 3 times longer than other pairs.",
        (
            "shards within a host, copies across hosts (dp_shard, dp_replicate)",
            "the network: RDMA in the place of TCP, the right NIC for each device",
        ),
        "The timeline: spans of one axis are long for the bytes that they say.",
    ),
    Lesson(
        "SW020",
        "A straggler",
        "warning",
        "One rank comes late to the collectives, and all others wait for it. It is found as the "
        "rank that waits least: its own wall time is that of everybody, since steps end together.",
        "The same rank waits least in 80 % of the lines, less than the others by more than 10 % "
        "of the step and more than noise; where it is late now and then, of at least three late "
        "lines that are a quarter of all.",
        (
            "what the rank does longer than others is in the evidence: look there",
            "compute: clocks and temperature, another model of device, other work on its cores",
            "outside of the model: logging, evaluation, garbage collection on one rank",
            "uneven batches: lengths that differ from rank to rank",
        ),
        "Bars of waiting by rank: all are high but one.",
    ),
    Lesson(
        "SW021",
        "The data loader",
        "warning",
        "The step waits for its batch. On one rank alone, that rank is a straggler too.",
        "The wait for the next batch above 10 % of the step on the slowest rank, as a mean of the "
        "judged steps, and in a fifth of their lines. Needs batches that come through "
        "run.data(...).",
        (
            "more workers, pinned memory, prefetching in the loader",
            "texts that are tokenized and packed before the run",
            "data nearer to the rank that waits",
        ),
        "The timeline: a block of data at the beginning of each step.",
    ),
    Lesson(
        "SW022",
        "No step any more",
        "critical",
        "The run has neither ended nor told of a step for far longer than steps take. It hangs, "
        "or it was killed.",
        "Nothing written for 5 times the longest of nearly all intervals (99 %) between lines, "
        "and for 60 s.",
        (
            "is the process alive? A killed one leaves a reason in the system's log (memory)",
            "the message of the watch on standard error: who waits for whom",
            "py-spy dump on each rank: where it stands",
        ),
        "The curve of steps over time ends in a flat line.",
    ),
    Lesson(
        "SW023",
        "The run died",
        "critical",
        "A rank raised, ran out of memory or was killed, or the ranks made different collectives.",
        "A rank's file says that it ended with an error, or does not say that it ended, and its "
        "process is gone (seen on its own machine). Ctrl-C counts as an end.",
        (
            "an error: the log of the rank that is named has its stack",
            "killed: the system's log (dmesg) and the scheduler's: memory of the host, time limits",
            "a collective: shardwise.watch(hang_timeout) names the rank that does not make it",
        ),
        "The curves end, and nothing after them says that the run is over.",
    ),
    Lesson(
        "SW030",
        "Activations are what does not fit",
        "warning",
        "At the peak most of the memory is neither parameters nor gradients nor state. No stage "
        "cuts activations: they depend on micro-batch and sequence.",
        "Memory above 85 % of the device, or the allocator had to free and try again; at the peak "
        "more than half of it is not the engine's.",
        (
            "checkpoint the blocks (activation_checkpointing)",
            "a smaller micro-batch, more accumulation",
            "a loss in chunks, if logits are a large part; parts of sequences (cp)",
            'offload of checkpointed inputs: Offload(activations="cpu")',
        ),
        "Memory over the step: a hill that grows through forward and falls through backward.",
    ),
    Lesson(
        "SW031",
        "Fragmentation",
        "warning",
        "The allocator holds memory that nobody uses, in pieces that fit no request. It then gives "
        "back and asks again, which stops the device.",
        "Reserved and not allocated at the peak above 20 % of the device, or retries that go on.",
        (
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            "batches of one shape; lengths rounded up",
            "empty_cache() on all ranks in the same step, as a last resort",
        ),
        "Reserved memory far above allocated memory.",
    ),
    Lesson(
        "SW032",
        "Offload to host memory takes over",
        "warning",
        "With state in host memory, gradients go there, the optimizer steps there, parameters "
        "come back. Where that is a large part of the step, the device waits.",
        "Offload to host memory. The optimizer's step on the training thread, with copies and "
        "background steps that nothing is computed beside, takes more than 25 % of the step. On a "
        "CPU, where they take cores from forward and backward, all of them count: 40 % and 50 ms.",
        (
            "shardwise.optim.AdamW, whose step on the host is fused",
            'step_on="device"; overlap the step with the next forward pass',
            "offload a fraction only (fraction=), or the optimizer's state alone; accumulate more",
            "cores for each rank: bind ranks to their own",
        ),
        "The timeline: a long step that nothing runs behind, or copies beside idle time.",
    ),
    Lesson(
        "SW033",
        "The disk starves the step",
        "warning",
        "State in files is read and written once in each step. Where the disk is slower than the "
        "step can hide, everything waits for it.",
        "Offload to files. The optimizer's step on the training thread, with reads, writes, copies "
        "and background steps that nothing is computed beside, takes more than 25 % of the step. "
        "On a CPU all of them count: 40 % and 50 ms.",
        (
            "host memory first, files for what does not fit there",
            "several folders on several disks; a file system that takes direct I/O",
            "more accumulation for each step; moments of fewer bits",
        ),
        "The timeline: a long step, reads and writes at the disk's rate all along.",
    ),
    Lesson(
        "SW040",
        "Half precision is not stable",
        "warning",
        "The loss scaler skips steps whose gradients have overflowed. A few at the beginning find "
        "the scale; later ones are lost work, and a scale below 1 means gradients cannot be held.",
        "Training in float16, by precision or autocast: after the first lines more than 5 % of "
        "the steps are skipped, or a logged loss scale is below 1. With `fully_shard`, skips "
        "beyond those of every step, as a micro-batch without a window looks like one there.",
        (
            'precision="bf16", which has the range of fp32 and needs no scaler',
            "clip gradients; a smaller learning rate, a longer warm-up",
            "the layers that overflow in fp32",
        ),
        "The loss scale: a saw that falls more than it rises.",
    ),
    Lesson(
        "SW041",
        "Numbers that are not finite",
        "critical",
        "A loss or a gradient is inf or nan. The step after it makes the parameters so, and "
        "nothing that follows can be used.",
        "A logged value that is not finite, on any rank; or a gradient that a step was about to "
        "use (looked at every 10 steps or 2 s, and whenever a logged value is bad). Without a loss "
        "scaler; one that skips such steps is left alone.",
        (
            "go on from a checkpoint that was finite as it was saved; the finding names the newest",
            "look at the batch of the rank that is named, and at the parameters that are",
            "a smaller learning rate, a longer warm-up, clipping; bf16 in the place of fp16",
        ),
        "The curve of the loss ends, or jumps before it does.",
    ),
    Lesson(
        "SW050",
        "Saves stop the training",
        "warning",
        "Training waits while a checkpoint is copied, or for the save before it, or for the disk "
        "where saves do not go on in the background.",
        "Time in saves on the training thread above 3 % of the run, and 0.3 s in a line of it. "
        "Saves by torch.save and torch's distributed checkpoints are seen by a look at the "
        "training thread every 0.1 s.",
        (
            "save in the background (Checkpoints.save without wait=True; reserve() once)",
            "save less often than a save takes",
            "a faster disk: node-local, copied elsewhere later",
        ),
        "The timeline: a block of save between two steps.",
    ),
    Lesson(
        "SW051",
        "A failure would cost much work",
        "warning",
        "What has been computed since the last save is lost when a rank, a node or a disk fails, "
        "and the longer a run, the surer that happens.",
        "The longest time without a save is above half an hour, or 4 times the interval that loses "
        "least, sqrt(2 x stall x mean time between failures), if that is more. One failure in "
        "50,000 hours of a device is assumed, as published of large clusters, and not less than "
        "one a week. Judged of runs that have trained for as long.",
        (
            "save every so many steps: Checkpoints(...).save(step), or save_every of the command",
            "keep more than one (keep_last=2), in a folder that survives the node",
            "shardwise ckpt verify, now and then",
        ),
        "The timeline has no block of checkpoint.",
    ),
)  # fmt: skip

LESSONS = {lesson.code: lesson for lesson in _LESSONS}


def as_markdown(lesson: Lesson) -> str:
    """Return a section of the page of findings."""
    remedies = "\n".join(f"{n}. {text}" for n, text in enumerate(lesson.remedies, 1))
    return (
        f"## {lesson.code}\n\n**{lesson.title}** ({lesson.severity}). {lesson.means}\n\n"
        f"*When it is told.* {lesson.signal}\n\n*What to do, in this order.*\n\n{remedies}\n\n"
        f"*What it looks like.* {lesson.picture}\n"
    )


_INTRODUCTION = """# Findings

What `shardwise doctor RUN` may say of an observed run, by code. `shardwise explain CODE` says the
same in a terminal, and `shardwise explain --markdown` writes this page. Thresholds are shares of a
step wherever they can be; what is shorter than 20 ms on a CPU, or 2 ms on an accelerator, counts as
noise. How to use it: [doctor.md](how-to/doctor.md).
"""


def page() -> str:
    """Return docs/findings.md."""
    row = "| [{0.code}](#{1}) | {0.title} | {0.severity} |"
    rows = [row.format(each, each.code.lower()) for each in _LESSONS]
    table = ["| code | finding | severity |", "|---|---|---|", *rows, ""]
    return "\n".join([_INTRODUCTION, *table, *map(as_markdown, _LESSONS)])

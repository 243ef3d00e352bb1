#!/usr/bin/env bash
# torch.optim.Muon under FSDP2 raises in the middle of its step if a matrix has fewer rows than ranks.
#
# torch 2.13.0, two ranks on a CPU, no Shardwise. For a matrix that fully_shard cuts by rows, and of
# which a rank has no row, DTensor chooses a replicated result for Muon's last product, and then
# refuses to add it to the sharded matrix in place. By then the matrices before it are stepped, and
# this one has its weight decay, so the step is taken in part. Alone, the same step is taken.
# Exits with 1 if that has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/run.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")


def step(sharded):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4, bias=False), torch.nn.Linear(4, 1, bias=False))
    if sharded:
        fully_shard(model)
    before = [param.detach().clone() for param in model.parameters()]
    model(torch.ones(2, 5)).square().mean().backward()
    try:
        torch.optim.Muon(model.parameters(), lr=0.1).step()
        outcome = "no error"
    except RuntimeError as error:
        outcome = str(error).partition(".")[0] + ": " + str(error).split(": ")[1].split(".")[0]
    after = [param.detach() for param in model.parameters()]
    changed = [not bool((a == b).all()) for a, b in zip(after, before)]
    return outcome, changed


alone, sharded = step(False), step(True)
if dist.get_rank() == 0:
    print(f"alone: {alone[0]}, matrices changed: {alone[1]}")
    print(f"FSDP2: {sharded[0]}, matrices changed: {sharded[1]}")
dist.destroy_process_group()
raise SystemExit(0 if alone[0] == "no error" and sharded[0] != "no error" and sharded[1][0] else 1)
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 "$folder/run.py"
# Seen:
#   alone: no error, matrices changed: [True, True]
#   FSDP2: aten: in-place operations that require placement changes are not supported, matrices
#   changed: [True, True]

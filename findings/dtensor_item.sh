#!/usr/bin/env bash
# `.item()` of a DTensor's sum is this rank's part, so D-Adaptation and Prodigy diverge under FSDP2.
#
# torch 2.13.0, prodigyopt 1.1.2, dadaptation 3.2, two ranks on a CPU, no Shardwise. A DTensor
# `x.sum()` is `Partial`; reading it by `.item()`, `float()`, `bool()` neither reduces nor raises.
# Prodigy and the DAdapt optimizers keep their step size `d` from such sums: each rank gets another
# one, and the ranks' slices are then those of different models. Expected: one `d`, that of one
# process. Exits with 1 if that has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy prodigyopt==1.1.2 dadaptation==3.2
cat > "$folder/run.py" <<'PYTHON'
import dadaptation
import prodigyopt
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
x = distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (2,)), [Shard(0)])
lines = [f"sum 0..7 = {x.sum().full_tensor().item()}, x.sum().item() = {x.sum().item()}"]
is_unchanged = x.sum().item() in (6.0, 22.0)
for kind in (prodigyopt.Prodigy, dadaptation.DAdaptAdam, dadaptation.DAdaptSGD):
    found = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
        if sharded:
            fully_shard(model)
        optimizer = kind(model.parameters(), lr=1.0, d0=1e-2)
        for step in range(8):  # the same batch on both ranks: what one process computes
            batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
            (model(batch) - batch[:, :4]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(optimizer.param_groups[0]["d"])
    both = [None, None]
    dist.all_gather_object(both, found[1])
    lines.append(f"{kind.__name__}: d alone {found[0]:.5f}, under FSDP2 {found[1]:.5f}")
    is_unchanged &= both[0] != both[1]
for rank in range(2):
    if dist.get_rank() == rank:
        print(*(f"rank {rank}: {line}" for line in lines), sep="\n", flush=True)
    dist.barrier()
dist.destroy_process_group()
raise SystemExit(0 if is_unchanged else 1)
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 "$folder/run.py"
# Seen:
# rank 0: sum 0..7 = 28.0, x.sum().item() = 6.0
# rank 0: Prodigy: d alone 0.02092, under FSDP2 0.03452
# rank 1: sum 0..7 = 28.0, x.sum().item() = 22.0
# rank 1: Prodigy: d alone 0.02092, under FSDP2 0.02016

#!/usr/bin/env bash
# `p.data = x` on a parameter of torch's fully_shard changes nothing, and says nothing.
#
# torch 2.13.0, one rank on a CPU, no Shardwise. The assignment gives the DTensor the (empty) memory
# of the DTensor x, while its local tensor stays. So the usual swap of averaged weights for an
# evaluation evaluates the trained ones. A plain parameter takes the new values. `p.copy_(x)` works.
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


def changed(layer):
    before, averaged = layer.weight.detach().clone(), layer.weight.detach() + 1
    layer.weight.data = averaged
    by_data = bool((layer.weight.detach() != before).any())
    with torch.no_grad():
        layer.weight.copy_(averaged)
    return by_data, bool((layer.weight.detach() != before).any())


plain = changed(torch.nn.Linear(2, 2, bias=False))
sharded = changed(fully_shard(torch.nn.Linear(2, 2, bias=False)))
print(f"plain: changed by p.data = x: {plain[0]}, by p.copy_(x): {plain[1]}")
print(f"FSDP2: changed by p.data = x: {sharded[0]}, by p.copy_(x): {sharded[1]}")
dist.destroy_process_group()
raise SystemExit(0 if plain == (True, True) and sharded == (False, True) else 1)
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 1 "$folder/run.py"
# Seen:
#   plain: changed by p.data = x: True, by p.copy_(x): True
#   FSDP2: changed by p.data = x: False, by p.copy_(x): True

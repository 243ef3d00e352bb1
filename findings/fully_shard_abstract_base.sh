#!/usr/bin/env bash
# torch's fully_shard takes no module whose first base is abc.ABC or typing.Generic.
#
# torch 2.13.0, one rank on a CPU, no Shardwise. fully_shard gives the module a class made of
# FSDPModule and its own. Where ABC or Generic stands before nn.Module, Python finds another object
# layout and refuses to assign the class. The same bases in the other order are taken.
# optimum-quanto's QLinear is such a class. Exits with 1 if that has changed.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$folder/run.py" <<'PYTHON'
from abc import ABC
from typing import Generic, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
T = TypeVar("T")


def outcome(*bases):
    class Model(*bases):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

    try:
        fully_shard(Model())
    except TypeError as error:
        return str(error)
    return "sharded"


found = {
    "ABC, Module": outcome(ABC, nn.Module),
    "Generic, Module": outcome(Generic[T], nn.Module),
    "Module, ABC": outcome(nn.Module, ABC),
}
for bases, text in found.items():
    print(f"{bases}: {text}")
dist.destroy_process_group()
refused = found["ABC, Module"] != "sharded" and found["Generic, Module"] != "sharded"
raise SystemExit(0 if refused and found["Module, ABC"] == "sharded" else 1)
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 1 "$folder/run.py"
# Seen:
#   ABC, Module: __class__ assignment: 'FSDPModel' object layout differs from 'Model'
#   Generic, Module: __class__ assignment: 'FSDPModel' object layout differs from 'Model'
#   Module, ABC: sharded

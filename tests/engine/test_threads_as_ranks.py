"""Ranks that are threads of one process, as torch's own tests have them."""

from programs import run_program

THREADS = """
import copy, threading, torch, torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg
import shardwise

_install_threaded_pg()
torch._C._distributed_c10d._set_thread_isolation_mode(True)
NUM_RANKS = 3

def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

def run(rank, kind, store, model, found):
    dist.init_process_group("threaded", rank=rank, world_size=NUM_RANKS, store=store)
    if kind == "fully_shard":
        for each in model:
            shardwise.fully_shard(each)
        shardwise.fully_shard(model)
    else:
        model = shardwise.shard(model, stage=3)
    train(model)
    if kind == "shard":
        shardwise.save(FOLDER, model)
    found[rank] = [param.to_local().detach().clone() for param in model.parameters()]
    dist.destroy_process_group()

for kind in ("fully_shard", "shard"):
    plain = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    models, store, found = [copy.deepcopy(plain) for _ in range(NUM_RANKS)], dist.HashStore(), {}
    threads = [
        threading.Thread(target=run, args=(rank, kind, store, model, found))
        for rank, model in enumerate(models)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    train(plain)
    for number, param in enumerate(plain.parameters()):
        whole = torch.cat([found[rank][number].flatten() for rank in range(NUM_RANKS)])
        torch.testing.assert_close(whole, param.detach().flatten())
print("equal to one process")
"""


def test_ranks_that_are_threads_train_as_one_process(tmp_path):
    """A lock that a thread holds over a collective would keep the others from joining it."""
    script = tmp_path / "threads.py"
    script.write_text(THREADS.replace("FOLDER", repr(str(tmp_path / "saved"))))
    done = run_program(script)
    assert done.stdout == "equal to one process\n", done.stderr

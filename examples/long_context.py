"""Long sequences: each rank has a part of every sequence, packed documents included.

    torchrun --nproc-per-node 4 examples/long_context.py
    torchrun --nproc-per-node 4 examples/long_context.py --method heads

Attention sees the whole sequence, by gathering keys and values or by exchanging heads; everything
else works on the rank's own tokens. The model is the decoder of `shardwise train`; any model that
calls torch's scaled_dot_product_attention will do.
"""

import argparse
import gc

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import shardwise
from shardwise.device import local_device
from shardwise.plan.model.decoder import PlainDecoder
from shardwise.plan.model.shapes import llama_shape

STEPS, VOCAB, LENGTH = 40, 16, 256
DOCUMENTS = [100, 28, 128]  # of one sequence; none sees another


def make_batch(data: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return sequences and next tokens; a document has two of the tokens, which its past tells."""
    parts = []
    for length in DOCUMENTS:
        alphabet = torch.rand(8, VOCAB, generator=data).argsort(1)[:, :2]
        drawn = torch.randint(2, (8, length + 1), generator=data)
        parts.append(alphabet.gather(1, drawn))
    return torch.cat([x[:, :-1] for x in parts], 1), torch.cat([x[:, 1:] for x in parts], 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", default="gather", choices=("gather", "heads"))
    method = parser.parse_args().method
    device = local_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    axes, rank = shardwise.Axes(cp=dist.get_world_size()), dist.get_rank()

    torch.manual_seed(0)
    shape = llama_shape(layers=2, dim=64, heads=4, kv_heads=4, ffn=128, vocab=VOCAB)
    model = shardwise.shard(PlainDecoder(shape).to(device), mesh=axes)
    context = shardwise.parallel.ContextParallel(model, axes, method=method)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(1)  # all ranks of a cp group have the same sequences
    for step in range(1, STEPS + 1):
        ids, labels = (x.to(device) for x in make_batch(data))
        with context.cut(ids, labels, documents=DOCUMENTS) as (part, wanted, positions):
            logits = model(part, positions=positions)
            total = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
            loss = shardwise.parallel.mean_loss(model, total, wanted.numel())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        shown = loss.detach().clone()
        dist.all_reduce(shown)  # the mean over ranks is the loss to show
        if rank == 0 and (step == 1 or step % 10 == 0):
            print(f"step {step:3d}  loss {shown.item() / dist.get_world_size():.4f}")
    if rank == 0:
        sent = shardwise.debug.stats(model).sent_bytes
        print(f"a rank has {part.shape[1]} of {LENGTH} tokens, and sent", sent)
    del model, context, optimizer
    gc.collect()  # the model's cycles would keep gloo's threads: exit may abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""LoRA with PEFT: a frozen bf16 base sharded over ranks, adapters trained in fp32.

    pip install transformers peft
    torchrun --nproc-per-node 2 examples/lora.py

Two things differ from plain PEFT: `shard`, and `save_adapter` instead of `model.save_pretrained`.
The base is a small Llama with random weights, so nothing is downloaded.
"""

import argparse
import gc

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported after init, it keeps the group alive
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise
from shardwise.device import local_device
from shardwise.interop.peft import save_adapter

STEPS, VOCAB = 30, 64


def build_model() -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
    )
    base = LlamaForCausalLM(config)
    base.bfloat16()
    return get_peft_model(base, LoraConfig(r=8, target_modules="all-linear"))


def train(device: torch.device, folder: str) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = shardwise.shard(build_model().to(device), stage=3)
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    data = torch.Generator().manual_seed(rank)  # each rank has its own data
    for step in range(1, STEPS + 1):
        start = torch.randint(VOCAB, (8, 1), generator=data)
        ids = ((start + 7 * torch.arange(16)) % VOCAB).to(device)  # the function to learn
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step == 1 or step % 10 == 0):
            print(f"step {step:3d}  loss {loss.item():.2f}")
    save_adapter(model, folder)  # every rank calls it; PeftModel.from_pretrained loads it
    if rank == 0:
        trained, every = (sum(p.numel() for p in ps) for ps in (adapters, model.parameters()))
        shards = shardwise.debug.stats(model).param_shard_bytes
        print(f"{trained} of {every} parameters trained; {shards} bytes of all on this rank")


def main() -> None:
    parser = argparse.ArgumentParser(description="LoRA over a sharded base.")
    parser.add_argument("--folder", default="runs/adapter", help="where the adapter goes")
    folder = parser.parse_args().folder
    device = local_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(device, folder)
    gc.collect()  # the model's cycles would keep gloo's threads: exit may abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

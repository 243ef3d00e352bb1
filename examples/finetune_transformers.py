"""Fine-tune a Hugging Face model, unmodified, at ZeRO stage 3; then let it write.

    pip install transformers
    torchrun --nproc-per-node 2 examples/finetune_transformers.py

A small Llama with random weights, so nothing is downloaded. Its class says which modules make
good units (`_no_split_modules`), so `shard` needs no more than the model.
"""

import gc

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported after init, it keeps the group alive
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise
from shardwise.device import local_device

STEPS = 60
TEXT = "a unit is gathered, used and freed; a shard is what stays. "


def build_model() -> LlamaForCausalLM:
    config = LlamaConfig(vocab_size=128, hidden_size=64, num_hidden_layers=3, num_attention_heads=4)
    config.intermediate_size = 128
    return LlamaForCausalLM(config)


def draw_batch(random: torch.Generator) -> Tensor:
    ids = torch.tensor([ord(char) for char in TEXT * 3])  # characters are the tokens
    starts = torch.randint(len(TEXT), (4,), generator=random)
    return torch.stack([ids[start : start + 32] for start in starts])


def finetune(device: torch.device) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    with device:
        model = build_model()
    model.activation_checkpointing_enable()  # gradient_checkpointing_enable() in older versions
    shardwise.shard(model, stage=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if rank == 0:
        print(shardwise.describe(model))
    random = torch.Generator().manual_seed(rank)
    for step in range(1, STEPS + 1):
        ids = draw_batch(random).to(device)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step == 1 or step % 15 == 0):
            print(f"step {step:3d}  loss {loss.item():.2f}")
    model.eval()
    prompt = torch.tensor([[ord(char) for char in "a unit is "]], device=device)
    with shardwise.gathered(model), torch.no_grad():  # inside: an ordinary model, whole
        written = model.generate(  # type: ignore[misc]
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False
        )
    if rank == 0:
        print("".join(chr(token) for token in written[0].tolist()))


def main() -> None:
    device = local_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    finetune(device)
    gc.collect()  # the model's cycles would keep gloo's threads: exit may abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

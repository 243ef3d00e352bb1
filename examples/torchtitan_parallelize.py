"""Train torchtitan's debug Llama with Shardwise in its `parallelize_fn`.

    pip install "shardwise[torchtitan]"
    torchrun --nproc-per-node 2 examples/torchtitan_parallelize.py

torchtitan's Trainer needs a tokenizer, data and a GPU. This program handles the model as it does.
"""

import gc

import torch
import torch.distributed as dist
import torchtitan.distributed.parallel_dims as torchtitan_dims
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

from shardwise.device import local_device
from shardwise.interop.torchtitan import with_shardwise

STEPS, VOCAB = 8, 64


def train(device: torch.device) -> None:
    num_ranks = dist.get_world_size()
    torchtitan_dims.device_type = device.type  # it is "cuda" on machines without an accelerator
    spec = model_registry("debugmodel", attn_backend="varlen")
    spec.parallelize_fn = with_shardwise(spec.parallelize_fn)  # the only line about Shardwise
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:  # an attention that runs on a CPU too
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    parallelism = ParallelismConfig(data_parallel_shard_degree=num_ranks)
    dims = torchtitan_dims.ParallelDims.from_config(parallelism, num_ranks)
    dims.build_mesh()
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=TrainingConfig(disable_cuda_graphs=True),  # bf16 copies of fp32 shards
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=FullAC.Config(),
        dump_folder="",
    )
    model.to_empty(device=device)
    torch.manual_seed(0)
    torch.no_grad()(model.init_weights)(buffer_device=None)
    loss_fn = CrossEntropyLoss.Config().build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    data = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, STEPS + 1):
        tokens = torch.randint(VOCAB, (4, 32), generator=data).to(device)
        labels = (7 * tokens + 3) % VOCAB  # the function to learn
        num_tokens = torch.tensor(num_ranks * labels.numel(), device=device)
        loss, _ = loss_fn(model(tokens), labels, num_tokens)  # this rank's part of the mean
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step:3d}  loss {loss.item() * num_ranks:.2f}")


def main() -> None:
    device = local_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(device)
    gc.collect()  # the model's cycles would keep gloo's threads: exit may abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Fine-tune with transformers' own Trainer at ZeRO stage 3, save, and resume.

    pip install transformers accelerate
    torchrun --nproc-per-node 2 examples/trainer.py

Two lines differ from plain transformers: the import of Trainer, and the one that shards the model.
To start from a checkpoint, `from_pretrained` of the same module reads it straight into shards.
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainingArguments

import shardwise
from shardwise.device import local_device
from shardwise.interop.transformers import Trainer

TEXT = "a unit is gathered, used and freed; a shard is what stays. "
STEPS = 20


def build_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=128, hidden_size=64, num_hidden_layers=3, num_attention_heads=4)
    config.intermediate_size = 128
    return LlamaForCausalLM(config)


def build_data() -> list[dict[str, Tensor]]:
    ids = torch.tensor([ord(char) for char in TEXT * 8])  # characters are the tokens
    rows = [ids[start : start + 32] for start in range(len(ids) - 32)]
    return [{"input_ids": row, "labels": row} for row in rows]


def train(folder: str, resume: str | None) -> None:
    data = build_data()
    model = shardwise.shard(build_model(), stage=3)
    args = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        logging_steps=5,
        save_steps=STEPS // 2,
        disable_tqdm=True,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=data[:16])
    trainer.remove_callback(PrinterCallback)  # which prints how long the steps took
    trainer.train(resume_from_checkpoint=resume)
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"eval_loss {loss:.3f} after {trainer.state.global_step} steps")
    trainer.save_model(f"{folder}/model")  # every rank; plain transformers loads it


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a small Llama with Trainer.")
    parser.add_argument("--folder", default="runs/trainer", help="where checkpoints go")
    folder = parser.parse_args().folder
    device = local_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(folder, None)
    train(folder, f"{folder}/checkpoint-{STEPS // 2}")  # the second half again, to the same loss
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

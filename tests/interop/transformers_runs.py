"""Short runs of transformers' Trainer on a small Llama, sharded or under DDP."""

from contextlib import contextmanager
from unittest.mock import patch

import accelerate
import torch
import transformers
from torch import nn

from shardwise import gathered, shard
from shardwise.interop.transformers import Trainer
from transformers_models import make_llama

STEPS = 4
OFTEN = {"save_strategy": "steps", "save_steps": 2}
BEST = {
    **OFTEN,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_only_model": True,
    "load_best_model_at_end": True,
}
Stock = transformers.Trainer


def model_and_data(**options):
    """Return the same model, with dropout, and the same data in every run."""
    torch.manual_seed(0)
    model = make_llama(attention_dropout=0.1, **options)
    random = torch.Generator().manual_seed(1)
    rows = torch.randint(1, 64, (32, 8), generator=random)
    return model, [{"input_ids": row, "labels": row} for row in rows]


def sharded(**ways):
    return shard(model_and_data()[0], **{"stage": 3, **ways})


def train(folder, model, data, cls=Trainer, **options):
    """Train for a few steps without a line to the terminal; return the trainer."""
    resume = options.pop("resume", None)
    given = {name: options.pop(name) for name in ("callbacks", "optimizers") if name in options}
    settings = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
        "ddp_find_unused_parameters": False,
        "dataloader_pin_memory": False,
    }
    generates = "predict_with_generate" in options
    args_class = transformers.Seq2SeqTrainingArguments if generates else None
    args = (args_class or transformers.TrainingArguments)(**{**settings, **options})
    trainer = cls(model=model, args=args, train_dataset=data, eval_dataset=data[:8], **given)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return trainer


def losses(trainer, num_steps=STEPS):
    found = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(found) == num_steps
    return found


def full(model):
    with gathered(model):
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@contextmanager
def as_on_gpus():
    """Let accelerate take the ranks for GPUs: there it refuses to wrap DTensors in DDP."""
    with patch.object(accelerate.Accelerator, "multi_device", property(lambda _: True)):
        yield


class Holder(nn.Module):
    """A model that is none of transformers', with two names for one tensor."""

    def __init__(self, model):
        super().__init__()
        self.inner = model
        self.head = model.lm_head

    def forward(self, input_ids, labels=None):
        return self.inner(input_ids=input_ids, labels=labels)

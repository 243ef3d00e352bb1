"""Models of transformers, unmodified, take the plain steps."""

from functools import partial

import pytest
import torch

from oracle import assert_same_bits
from ranks import on_ranks, run_ranks
from shardwise import shard
from shardwise.config import Units
from trainer import compare, full_parameters, make_steps, train, train_plain

transformers = pytest.importorskip("transformers", reason="transformers is in the test extra")

# Importing a model class pulls in packages that warn about each other.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

from transformers_models import MODELS, make_llama, make_mixtral  # noqa: E402

SETTINGS = [{"stage": 1}, {"stage": 3}]


def ids(random):
    return torch.randint(1, 64, (2, 8), generator=random)


def own_loss(model, tokens):
    """Return the model's own loss, which comes in a ModelOutput."""
    return model(input_ids=tokens, labels=tokens).loss


def pictures(random):
    return torch.randn(2, 3, 16, 16, generator=random)


def loss_of_pictures(model, pixels):
    return model(pixel_values=pixels, labels=torch.tensor([0, 1])).loss


@pytest.mark.parametrize("name", sorted(MODELS))
@on_ranks(2)
def test_transformers_models_take_the_plain_steps(rank, world_size, name):
    """Without dropout; of the picture models, a convolution stands outside the layers."""
    make = partial(make_mixtral, num_experts_per_tok=1) if name == "mixtral" else MODELS[name]
    settings = SETTINGS + [{"stage": 3, "layout": "flat"}] * (name == "llama")
    loss, batch = (loss_of_pictures, pictures) if name == "vit" else (own_loss, ids)
    compare(rank, world_size, lambda: make().eval(), settings, loss, batch=batch)


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


def start_llama_on_meta(rank, world_size):
    """Initialise by the model's own rule, given as init=."""
    with torch.device("meta"):
        model = make_llama()
    shard(model, stage=3, units=Units(init=model._init_weights))
    loss = own_loss(model, torch.tensor([[1, 2, 3]]))
    assert loss.isfinite()
    return full_parameters(model)


def test_a_transformers_model_starts_on_meta_with_its_own_init():
    one = run_ranks(start_llama_on_meta, 1)[0]
    for values in run_ranks(start_llama_on_meta, 2):
        assert_same_bits(values, one)
    assert 0.01 < one["lm_head.weight"].std() < 0.03

"""Models of transformers, unmodified: their units, the plain steps, the plain tokens."""

import re
from functools import partial

import pytest
import torch
from torch import nn

from oracle import assert_same_bits
from peft_models import lora_llama, loss_of
from programs import run_as_in_the_gallery
from ranks import on_ranks, run_ranks
from shardwise import gathered, shard
from shardwise.config import Units
from shardwise.debug import stats
from shardwise.errors import ShardError
from shardwise.layout.units import partition_into_units
from trainer import (
    assert_same_grads,
    compare,
    full_grads,
    full_parameters,
    make_steps,
    train,
    train_plain,
)

transformers = pytest.importorskip("transformers", reason="transformers is in the test extra")

from shardwise.interop.transformers import prepare  # noqa: E402
from transformers_models import (  # noqa: E402
    MODELS,
    PICTURES,
    TINY,
    by_calls,
    make_llama,
    make_mixtral,
)

# Importing a model class pulls in packages that warn about each other.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:Position ids:UserWarning"
)

GROUPED = {**TINY, "num_key_value_heads": 1}
BART = {
    "vocab_size": 64,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
}
GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}


def layers(path, number=2):
    return [f"{path}.{i}" for i in range(number)]


BLOOM = {"vocab_size": 64, "hidden_size": 16, "n_layer": 2, "n_head": 2}
MAMBA = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
DISTIL = {"vocab_size": 64, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
CLIP = {"text_config": TINY, "vision_config": PICTURES, "projection_dim": 8}
GROUPED_8 = {**GROUPED, "head_dim": 8}
BERT_TASK = "RobertaForSequenceClassification"

# The class, the config, and the units that are not the root.
TABLE = [
    ("LlamaForCausalLM", GROUPED, layers("model.layers")),
    ("Qwen3ForCausalLM", GROUPED_8, layers("model.layers")),
    ("GemmaForCausalLM", GROUPED_8, layers("model.layers")),
    ("MixtralForCausalLM", GROUPED, layers("model.layers")),
    ("PhiForCausalLM", TINY, layers("model.layers")),
    ("GPTNeoXForCausalLM", TINY, layers("gpt_neox.layers")),
    ("GPT2LMHeadModel", GPT2, layers("transformer.h")),
    ("BloomForCausalLM", BLOOM, layers("transformer.h")),
    ("MambaForCausalLM", MAMBA, layers("backbone.layers")),  # its hints name each mixer too
    ("BertForMaskedLM", TINY, ["bert.embeddings", *layers("bert.encoder.layer")]),
    (BERT_TASK, TINY, ["roberta.embeddings", *layers("roberta.encoder.layer")]),
    (
        "DistilBertModel",  # without hints: like children
        DISTIL,
        ["embeddings.position_embeddings", *layers("transformer.layer")],
    ),
    (
        "T5ForConditionalGeneration",
        T5,
        ["encoder", *layers("encoder.block"), *layers("decoder.block")],
    ),
    (
        "BartForConditionalGeneration",
        {**BART, "max_position_embeddings": 32},
        ["model.encoder", *layers("model.encoder.layers"), *layers("model.decoder.layers")],
    ),
    ("ViTForImageClassification", PICTURES, ["vit.embeddings", *layers("vit.layers")]),
    (
        "CLIPModel",  # two models in one
        CLIP,
        [
            *("text_model.embeddings", *layers("text_model.encoder.layers")),
            *("vision_model.embeddings", *layers("vision_model.encoder.layers")),
        ],
    ),
]


def build(model_class, settings):
    cls = getattr(transformers, model_class)
    with torch.device("meta"):
        return cls(cls.config_class(**settings))


@pytest.mark.parametrize(("model", "settings", "units"), TABLE, ids=lambda v: str(v)[:20])
def test_the_units_of_an_architecture_are_its_layers(model, settings, units):
    root, *others = partition_into_units(build(model, settings), None)
    assert root.name == ""
    assert [unit.name for unit in others] == units


def llama(**settings):
    return build("LlamaForCausalLM", {**GROUPED, **settings})


def names_of(model):
    return [unit.name for unit in partition_into_units(model, None)][1:]


def test_an_embedding_is_a_unit_when_it_is_as_large_as_a_layer():
    large = llama(vocab_size=4096)
    assert names_of(large) == ["model.embed_tokens", *layers("model.layers"), "lm_head"]
    tied = llama(vocab_size=4096, tie_word_embeddings=True)
    assert names_of(tied) == layers("model.layers")


def test_hints_are_found_inside_a_wrapper():
    wrapper = nn.ModuleDict({"policy": llama(), "value": nn.Linear(16, 1)})
    assert names_of(wrapper) == layers("policy.model.layers")


def test_layers_beside_a_model_with_hints_are_units_too():
    tower = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
    both = nn.ModuleDict({"text": llama(), "picture": tower})
    assert names_of(both) == [*layers("text.model.layers"), *layers("picture", 3)]


def test_a_users_own_plan_is_followed():
    model = llama()
    model._no_split_modules = []
    model.model._no_split_modules = []
    model.fsdp_plan = {"model.layers.*.mlp": "free_full_weight", "lm_head": "keep_full_weight"}
    model.model.fsdp_plan = None
    assert names_of(model) == [f"model.layers.{i}.mlp" for i in range(2)]
    model.fsdp_plan = {"lm_head": "keep_full_weight"}
    assert names_of(model) == layers("model.layers")  # like children


def test_names_of_the_user_come_before_any_hint():
    units = partition_into_units(llama(), ["LlamaMLP"])
    assert [u.name for u in units][1:] == [f"model.layers.{i}.mlp" for i in range(2)]


# -- the plain steps
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


# -- generate(), of PEFT's models too: ranks end at any step
def generate(model, rank, seed, **options):
    """Generate for prompts of this rank's own."""
    prompt = torch.tensor([[3, 5, 7 + rank], [9 + rank, 1, 1]])
    torch.manual_seed(seed)
    mask = torch.ones_like(prompt)
    return model.generate(prompt, attention_mask=mask, pad_token_id=0, **options)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "t5"])
@on_ranks(2)
def test_every_rank_gets_the_plain_models_tokens(rank, name):
    """Greedy, drawn, with beams, without a cache: each rank with its own length."""
    torch.manual_seed(0)
    plain = MODELS[name]().eval()
    ways = [
        {"do_sample": False, "max_new_tokens": 3 + 3 * rank},
        {"do_sample": True, "max_new_tokens": 7 - rank},
        {"do_sample": False, "num_beams": 2, "max_new_tokens": 5 + rank},
        {"do_sample": False, "use_cache": False, "max_new_tokens": 4},
    ]
    expected = [generate(plain, rank, rank, **way) for way in ways]
    for stage in (1, 3):
        torch.manual_seed(0)
        model = prepare(shard(MODELS[name](), stage=stage)).eval()
        for way, tokens in zip(ways, expected, strict=True):
            assert torch.equal(generate(model, rank, rank, **way), tokens), (stage, way)
        with gathered(model):
            assert torch.equal(generate(model, rank, rank, **ways[0]), expected[0])
        assert model.to("cpu") is model
        assert type(model).to(model, "cpu:0") is model.to(torch.device("cpu", 0)) is model
        with pytest.raises(ShardError, match="dtype or device of a sharded model"):
            model.to(torch.bfloat16)


def tokens(model, num_tokens, rank=0):
    ids = torch.tensor([[1, 5 + rank, 9]])
    return model.generate(input_ids=ids, max_new_tokens=num_tokens, do_sample=False)


def generate_with_adapters(rank, world_size):
    plain = lora_llama().eval()
    wanted = tokens(plain, 6 + rank, rank)  # ranks stop at different lengths
    batch = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(rank))
    for stage in (*range(4), "by calls"):
        model = lora_llama().eval()
        if stage == "by calls":
            prepare(by_calls(model))
        else:
            shard(model, stage=stage)
        before = stats(model).param_full_bytes
        assert torch.equal(tokens(model, 6 + rank, rank), wanted)
        if stage == 3:
            assert stats(model).param_full_bytes == before == 0
        loss_of(model, batch).backward()
        expected = full_grads(model)
        for inner in (model.base_model, model.base_model.model):
            model.zero_grad()
            loss_of(inner, batch).backward()
            assert_same_grads(full_grads(model), expected)
        assert torch.equal(tokens(model, 6 + rank, rank), wanted)


def test_a_sharded_peft_model_generates_as_the_plain_one_and_its_base_can_be_called():
    pytest.importorskip("peft", reason="peft is in the test extra")
    run_ranks(generate_with_adapters, 2)


def generate_with_a_prompt(rank, world_size):
    import peft

    def make():
        torch.manual_seed(0)
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
        return peft.get_peft_model(make_llama(), config).eval()

    wanted = tokens(make(), 6)
    model = shard(make(), stage=3)
    with pytest.raises(ShardError):
        tokens(model, 6)
    with gathered(model):
        assert torch.equal(tokens(model, 6), wanted)


def test_a_model_with_a_prompt_generates_inside_gathered_only():
    pytest.importorskip("peft", reason="peft is in the test extra")
    run_ranks(generate_with_a_prompt, 2)


@pytest.mark.slow
def test_the_trainer_example_learns_and_goes_on_to_the_same_loss(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is in the test extra")
    out = run_as_in_the_gallery("trainer.py", "--folder", tmp_path)
    first, again = re.findall(r"^eval_loss (\S+) after 20 steps$", out, re.MULTILINE)
    assert first == again and float(first) < 3
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.num_hidden_layers == 3

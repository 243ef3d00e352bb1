"""The units of models of transformers, whatever their class, and inside other modules."""

import pytest
import torch
from torch import nn

from shardwise.layout.units import partition_into_units

transformers = pytest.importorskip("transformers", reason="transformers is in the test extra")

from transformers_models import PICTURES, TINY  # noqa: E402

# Importing a model class pulls in packages that warn about each other.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

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

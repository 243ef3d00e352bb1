"""Where modules come from: presets against published sizes, configs, the user's own file."""

from __future__ import annotations

import importlib.util
import json

import pytest

from decoders import flops_of
from shardwise.errors import ConfigError
from shardwise.plan.candidate import Candidate
from shardwise.plan.model.models import TracedModel
from shardwise.plan.model.presets import find_model, find_preset, preset_names

# numel of the checkpoints on the Hugging Face hub, as their model cards and indexes give it
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "tinyllama-1.1b": 1_100_048_384,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "mistral-7b": 7_241_732_096,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "smollm-135m": 134_515_008,
    "smollm-1.7b": 1_711_376_384,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "mpt-7b": 6_649_286_656,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_as_many_parameters_as_the_published_model(name):
    assert find_preset(name).shape.num_params == PUBLISHED[name]


@pytest.mark.parametrize(
    "name", ["demo", "smollm-135m", "gpt2", "gemma-2b", "qwen3-0.6b", "mpt-7b"]
)
def test_the_module_of_a_preset_has_the_parameters_of_its_shape(name):
    source = find_model(name)
    model = source.build(False)
    assert all(p.is_meta for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == find_preset(name).shape.num_params


def test_an_unknown_preset_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="'lama-3-8b'; did you mean 'llama-3-8b'"):
        find_model("lama-3-8b")
    with pytest.raises(ConfigError, match="Nothing is downloaded"):
        find_model("meta-llama/Llama-3-8B")
    assert find_preset("GPT2").name == "gpt2"
    assert len(set(preset_names())) == len(preset_names())


def write_config(folder, **keys):
    config = {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        **keys,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_config_becomes_the_class_of_transformers(tmp_path):
    source = find_model(str(write_config(tmp_path)))
    assert (source.name, source.seq, source.max_seq) == (tmp_path.name, 128, 128)
    model = source.build(False)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert source.shape is not None
    assert sum(p.numel() for p in model.parameters()) == source.shape.num_params
    tape = TracedModel(source, 16).tape(Candidate(activation_checkpointing="full"))
    assert [u.name for u in tape.units] == ["", *(f"model.layers.{i}" for i in range(3))]


def test_without_transformers_a_llama_is_planned_by_its_shape(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    source = find_model(str(write_config(tmp_path) / "config.json"))
    assert type(source.build(False)).__name__ == "PlainDecoder"
    assert "pip install transformers" in source.notes[0]
    with pytest.raises(ConfigError, match="with it"):
        find_model(str(write_config(tmp_path, model_type="falcon_mamba")))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model_type": "lama"}, "'lama' is unknown .* did you mean '?llama"),
        ({"model_type": "resnet"}, "config.json: "),
        ({"num_attention_heads": "four"}, "config.json: "),
        ({"hidden_siz": 64}, "'hidden_siz' is no key of LlamaConfig; did you mean 'hidden_size'"),
        ({"num_hidden_layer": 2}, "did you mean 'num_hidden_layers'"),
        ({"hidden_size": -64}, "hidden_size: expected a whole number above 0, got -64"),
        ({"vocab_size": 0}, "vocab_size: expected a whole number above 0, got 0"),
        ({"num_attention_heads": "8"}, "num_attention_heads: expected .*'8'"),
        ({"intermediate_size": True}, "intermediate_size: expected .*True"),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_its_key(tmp_path, keys, words):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **keys}))
    with pytest.raises(ConfigError, match=words):
        find_model(str(tmp_path)).build(False)


def test_what_is_no_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        find_model(str(tmp_path))
    for text, words in (("{", "expected JSON"), ("[]", "key model_type")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=words):
            find_model(str(tmp_path))


FILE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh()) for _ in range(3)
        )
        self.layers[2][0].weight = self.layers[0][0].weight
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.left = nn.Embedding(9, 9), nn.Linear(9, 9)
    def forward(self, ids):
        return self.used(ids)

def build():
    return Net()

def frozen():
    made = Part()
    made.left.requires_grad_(False)
    return made

def allocated():
    return nn.Linear(3, 3, device="cpu")

def convolution():
    return nn.Conv2d(3, 8, 3)

def fails():
    raise OSError("no such disk")

def number():
    return 3

number_of_layers = 3
"""
BATCH = """
def example_batch(micro_batch, seq):
    return torch.ones(micro_batch, seq, 8)

def loss(model, batch):
    return model(batch).sum()
"""


def test_keys_that_a_config_class_does_not_know_are_told_of(tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    known = {"torch_dtype": "bfloat16", "rope_theta": 1e4, "head_dim": None, "_commit": "x"}
    path.write_text(json.dumps({"model_type": "llama", **known}))
    assert find_model(str(path)).notes == ()
    path.write_text(json.dumps({"model_type": "llama", "zzz": 1, **known}))
    assert find_model(str(path)).notes == (f"{path}: no keys of LlamaConfig: zzz",)


def test_parameters_that_get_no_gradient_are_told_of(tmp_path):
    file = tmp_path / "net.py"
    file.write_text(FILE)
    model = TracedModel(find_model(f"{file}:Part"), 7)
    tape = model.tape(Candidate())
    got = {p.name: p.gets_grad for u in tape.units for p in u.params}
    assert got == {"used.weight": True, "left.weight": False, "left.bias": False}
    assert any("90 trained parameters (left.weight, ...) get no" in note for note in model.notes)
    frozen = TracedModel(find_model(f"{file}:frozen"), 7)
    assert all(p.gets_grad for u in frozen.tape(Candidate()).units for p in u.params)
    assert not any("get no gradient" in note for note in frozen.notes)


def test_a_factory_in_the_users_file_is_traced_with_its_own_batch_and_loss(tmp_path):
    file = tmp_path / "net.py"
    file.write_text(FILE + BATCH)
    source = find_model(f"{file}:build", seq=5)
    assert source.notes == (
        "layers.0.0.weight and layers.2.0.weight are one parameter, counted once",
    )
    model = TracedModel(source)
    assert model.num_params == 2 * 64
    tape = model.tape(Candidate(micro_batch=3, precision="fp32"))
    assert (tape.input_bytes, model.seq) == (3 * 5 * 8 * 4, 5)
    assert flops_of(tape) == 3 * 2 * 15 * 64 * 3 - 2 * 15 * 64  # no gradient of the input
    recomputed = model.tape(
        Candidate(micro_batch=3, precision="fp32", activation_checkpointing="full")
    )
    assert flops_of(recomputed) == flops_of(tape) + 3 * 2 * 15 * 64


def test_a_factory_without_a_batch_gets_token_ids(tmp_path):
    file = tmp_path / "net.py"
    file.write_text(FILE)
    tape = TracedModel(find_model(f"{file}:Part"), 7).tape(Candidate(micro_batch=2))
    assert tape.input_bytes == 2 * 7 * 8
    with pytest.raises(ConfigError, match=r"fed int64 token ids.*no example_batch"):
        TracedModel(find_model(f"{file}:convolution"), 7).tape(Candidate())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("net.py:bild", "no function 'bild'; did you mean 'build'"),
        ("net.py:number_of_layers", "has no function 'number_of_layers'"),
        ("net.py:fails", r"fails\(\) under torch.device\('meta'\): OSError: no such disk"),
        ("net.py:number", "returned a int, expected a Module"),
        ("nothing.py:build", "no such file"),
        ("broken.py:build", "importing .*broken.py: ModuleNotFoundError"),
        ("net.py", "net.py:factory"),
    ],
)
def test_what_fails_in_the_users_file_is_named(tmp_path, name, words):
    (tmp_path / "net.py").write_text(FILE)
    (tmp_path / "broken.py").write_text("import no_such_module_anywhere")
    with pytest.raises(ConfigError, match=words):
        find_model(str(tmp_path / name))


def test_parameters_that_a_factory_allocates_are_told_of(tmp_path):
    file = tmp_path / "net.py"
    file.write_text(FILE)
    source = find_model(f"{file}:allocated")
    assert source.notes[0].startswith("2 parameters (weight, ...) were allocated")

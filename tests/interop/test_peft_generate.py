"""A sharded PeftModel generates: PEFT calls the base model, past its own wrapper."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from peft_models import lora_llama, loss_of, make_llama
from ranks import run_ranks
from shardwise import fully_shard, gathered, shard
from shardwise.debug import stats
from shardwise.errors import ShardError
from trainer import assert_same_grads, full_grads

peft = pytest.importorskip("peft", reason="peft is in the test extra")
pytest.importorskip("transformers", reason="transformers is in the test extra")

from shardwise.interop.transformers import prepare  # noqa: E402

# Importing a model class pulls in packages that warn about each other.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:Position ids:UserWarning"
)


def tokens(model: nn.Module, num_tokens: int, rank: int = 0) -> Tensor:
    ids = torch.tensor([[1, 5 + rank, 9]])
    return model.generate(input_ids=ids, max_new_tokens=num_tokens, do_sample=False)


def generate(rank: int, world_size: int) -> None:
    plain = lora_llama().eval()
    wanted = tokens(plain, 6 + rank, rank)  # ranks stop at different lengths
    batch = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(rank))
    for stage in (*range(4), "by calls"):
        model: Any = lora_llama().eval()
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


def test_a_sharded_peft_model_generates_as_the_plain_one_and_its_base_can_be_called() -> None:
    run_ranks(generate, 2)


def generate_with_a_prompt(rank: int, world_size: int) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
        return peft.get_peft_model(make_llama(), config).eval()

    wanted = tokens(make(), 6)
    model = shard(make(), stage=3)
    with pytest.raises(ShardError):
        tokens(model, 6)
    with gathered(model):
        assert torch.equal(tokens(model, 6), wanted)


def test_a_model_with_a_prompt_generates_inside_gathered_only() -> None:
    run_ranks(generate_with_a_prompt, 2)

"""`generate()` on sharded models gives the plain tokens, though ranks end at different steps."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from programs import run_example
from ranks import run_ranks
from shardwise import shard
from shardwise.errors import ShardError

transformers = pytest.importorskip("transformers", reason="transformers is in the test extra")

from shardwise.interop.transformers import prepare  # noqa: E402
from transformers_models import MODELS  # noqa: E402

# Importing a model class pulls in packages that warn about each other.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def generate(model: Any, rank: int, seed: int, **options: Any) -> torch.Tensor:
    """Generate for prompts of this rank's own."""
    prompt = torch.tensor([[3, 5, 7 + rank], [9 + rank, 1, 1]])
    torch.manual_seed(seed)
    mask = torch.ones_like(prompt)
    tokens: torch.Tensor = model.generate(prompt, attention_mask=mask, pad_token_id=0, **options)
    return tokens


def compare_generated(rank: int, world_size: int, name: str) -> None:
    """Greedy, drawn, with beams, without a cache: each rank with its own length."""
    torch.manual_seed(0)
    plain = MODELS[name]().eval()
    ways: list[dict[str, Any]] = [
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
        assert model.to("cpu") is model
        assert type(model).to(model, "cpu:0") is model.to(torch.device("cpu", 0)) is model
        with pytest.raises(ShardError, match="dtype or device of a sharded model"):
            model.to(torch.bfloat16)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "t5"])
def test_every_rank_gets_the_plain_models_tokens(name: str) -> None:
    run_ranks(compare_generated, 2, name)


@pytest.mark.slow
def test_the_trainer_example_learns_and_goes_on_to_the_same_loss(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is in the test extra")
    out = run_example("trainer.py", "--folder", tmp_path)
    first, again = re.findall(r"^eval_loss (\S+) after 20 steps$", out, re.MULTILINE)
    assert first == again and float(first) < 3
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.num_hidden_layers == 3

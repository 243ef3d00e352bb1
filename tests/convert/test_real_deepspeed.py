"""What DeepSpeed itself wrote, element by element; skipped where DeepSpeed is not installed."""

import importlib
import importlib.util
import os
import warnings

import pytest
import torch

from ranks import run_ranks
from shardwise.convert.deepspeed import open_deepspeed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed, not installed here"
    ),
]


class Net(torch.nn.Module):
    """Uneven sizes; a frozen, a tied, and a parameter of one element; two kinds of buffers."""

    def __init__(self):
        super().__init__()
        self.emb = torch.nn.Embedding(11, 6)
        self.frozen = torch.nn.Linear(6, 6).requires_grad_(False)
        self.body = torch.nn.Sequential(
            torch.nn.Linear(6, 5, bias=False), torch.nn.LayerNorm(5), torch.nn.Linear(5, 6)
        )
        self.scale = torch.nn.Parameter(torch.tensor([1.5]))
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("running", torch.zeros(6))
        self.register_buffer("table", torch.arange(7))

    def forward(self, x):
        hidden = self.body(self.frozen(self.emb(x))) * self.scale
        self.running += hidden.detach().mean(0) * 0.1
        return self.head(hidden)


def save(rank, world, folder, stage, bf16):
    """Train three steps, save, and return all tensors as DeepSpeed itself gathers them."""
    warnings.simplefilter("ignore")  # not ours
    os.environ.update(DS_ACCELERATOR="cpu", RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    backend = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None  # it would be compiled first
    deepspeed.init_distributed("gloo", verbose=False)
    model = Net()
    trained = [p for p in model.parameters() if p.requires_grad]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage, "sub_group_size": 40},
    }
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.5},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    engine = deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        tokens = torch.randint(0, 11, (4,), generator=generator)
        engine.backward(engine(tokens).float().pow(2).mean())
        engine.step()
    engine.save_checkpoint(folder, tag="tag", client_state={"note": [1, 2.5]})
    if stage < 3:  # torch's AdamW makes its states later than DeepSpeed looks for them
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found[name, ""] = safe_get_full_fp32_param(parameter).clone()
            for key in ("exp_avg", "exp_avg_sq"):
                found[name, key] = safe_get_full_optimizer_state(parameter, key).clone()
            found[name, "step"] = torch.tensor(3.0)
        else:
            with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
                found[name, ""] = parameter.detach().clone()
    found |= {(name, ""): buffer.clone() for name, buffer in engine.module.named_buffers()}
    return found


@pytest.mark.parametrize(
    ("stage", "world", "bf16"),
    [(1, 2, False), (1, 1, True), (2, 2, True), (3, 2, False), (3, 3, True)],
)
def test_what_deepspeed_wrote_is_read_as_deepspeed_gathers_it(stage, world, bf16, tmp_path):
    expected = run_ranks(save, world, str(tmp_path), stage, bf16, fresh=True)[0]
    source = open_deepspeed(tmp_path)
    infos = {(info.name, info.state): info for info in source.tensors}
    assert set(infos) == set(expected)
    for key, tensor in expected.items():
        got = source.read(infos[key], 0, infos[key].numel).view(infos[key].shape)
        assert got.dtype == tensor.dtype
        assert torch.equal(got, tensor), key
    assert source.step == 3
    assert source.tied == {"head.weight": "emb.weight"}
    assert source.extra == {"note": [1, 2.5]}
    assert [group["weight_decay"] for group in source.optimizer.groups] == [0.5, 0.0]
    assert sorted(source.optimizer.groups[1]["params"]) == [
        "body.1.bias",
        "body.1.weight",
        "body.2.bias",
        "scale",
    ]

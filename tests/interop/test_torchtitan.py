"""torchtitan's `parallelize_fn`: the steps of the plain model, whatever it is combined with.

Where torchtitan is installed (with triton, which it imports), its own Llama is trained as its
Trainer does. What holds without it is tested on a stand-in: a decoder with torchtitan's names, a
function that shards it as torchtitan's do, and the settings and meshes of torchtitan 0.3 as far as
they are read.
"""

import copy
import re
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from models import Block
from oracle import assert_same_bits
from programs import run_as_in_the_gallery
from ranks import on_ranks, run_ranks
from roundings import assert_rounded_alike, of_gradient
from shardwise.errors import ConfigError
from shardwise.interop import torchtitan
from shardwise.surface.methods import FSDPModule
from trainer import adamw, full, full_parameters

VOCAB, NUM_STEPS = 32, 3

# torch's compiler warns about itself, and about what torchtitan does to it.
pytestmark = pytest.mark.filterwarnings("ignore")


@dataclass
class Dims:
    """Stands in for ParallelDims: degrees, and submeshes by the names of its axes."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    spmd_backend: str = "spmd_types"
    device_type: str = "cpu"
    meshes: list[DeviceMesh] = field(default_factory=list)

    def get_activated_mesh(self, axes):
        shards = "fsdp" if self.spmd_backend == "partial_dtensor" else "dp_shard"
        assert axes == ["dp_replicate", shards], axes  # it has no others
        names = tuple(a for a in axes if a != "dp_replicate" or self.dp_replicate > 1)
        if not self.meshes:
            shape = (self.dp_replicate, self.dp_shard)[-len(names) :]
            self.meshes.append(init_device_mesh(self.device_type, shape, mesh_dim_names=names))
        return self.meshes[0]


class Decoder(nn.Module):
    """Stands in for torchtitan's decoders: a ModuleDict of layers between three other modules."""

    enable_weight_tying = False

    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, 8)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(2)})
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(self.norm(x))


def settings(parallel_dims, **parallelism):
    """Return what torchtitan's Trainer gives beside the model; the names of 0.3."""
    usual = {"spmd_backend": "spmd_types", "enable_fsdp_symm_mem": False}
    return {
        "parallel_dims": parallel_dims,
        "training": SimpleNamespace(disable_cuda_graphs=False),
        "parallelism": SimpleNamespace(**usual | parallelism),
    }


def sum_loss(model, tokens, num_tokens):
    """The loss of torchtitan: summed over this rank's tokens, divided by those of all ranks."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum") / (
        num_tokens
    )


def batches_of(world_size, vocab, seq_len=8):
    random = torch.Generator().manual_seed(7)
    return [
        [torch.randint(vocab, (2, seq_len + 1), generator=random) for _ in range(world_size)]
        for _ in range(NUM_STEPS)
    ]


def num_tokens_of(by_rank):
    return sum(tokens[:, 1:].numel() for tokens in by_rank)


def train(model, steps, rank, loss_fn, is_plain=False):
    """Train; a plain model, which every rank has whole, has its gradients summed over ranks."""
    optimizer = adamw(model.parameters())
    losses = []
    for by_rank in steps:
        loss = loss_fn(model, by_rank[rank], num_tokens_of(by_rank))
        loss.backward()
        losses.append(loss.item())
        for param in model.parameters() if is_plain else ():
            dist.all_reduce(param.grad)
        optimizer.step()
        optimizer.zero_grad()
    return losses, full_parameters(model)


def assert_same_run(ours, plain):
    assert ours[0] == plain[0], (ours[0], plain[0])
    names = [re.sub(r"(_checkpoint_wrapped_module|_orig_mod)\.", "", name) for name in ours[1]]
    assert_same_bits(dict(zip(names, ours[1].values(), strict=True)), plain[1])


def its_own(model, *, parallel_dims, **settings):
    """Stand in for a model's own function: tensor parallelism, then shards, as torchtitan does."""
    sharding = sys.modules["torchtitan.distributed.fsdp"]
    mesh = parallel_dims.meshes[0]
    options = {"mesh": mesh}
    if parallel_dims.tp > 1:
        for layer in model.layers.values():
            plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
            parallelize_module(layer, mesh["tp"], plan)
        options["mesh"] = mesh["dp_shard"]
    elif parallel_dims.spmd_backend == "spmd_types":
        replicas = "dp_replicate" if parallel_dims.dp_replicate > 1 else None
        options["dp_mesh_dims"] = torch.distributed.fsdp.DataParallelMeshDims(
            shard="dp_shard", replicate=replicas
        )
    for module in (*model.layers.values(), model):
        sharding.fully_shard(module, **options)
        module.set_gradient_divide_factor(1.0)
    return model


def with_stand_in(model, **given):
    """Call a model's function with ours in it, as where torchtitan itself is not there."""
    torchs = SimpleNamespace(fully_shard=torch.distributed.fsdp.fully_shard)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchtitan, "load_neighbour", lambda *_: None)
        patch.setitem(sys.modules, "torchtitan.distributed.fsdp", torchs)
        made = torchtitan.with_shardwise(its_own)(model, **given)
    assert torchs.fully_shard is torch.distributed.fsdp.fully_shard  # as it was
    return made


@on_ranks(4, fresh=True)
def test_a_models_own_function_takes_any_degree_and_shards_by_ours(rank, world_size):
    steps = batches_of(world_size // 2, VOCAB)
    torch.manual_seed(0)
    start = Decoder()
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp_shard", "tp"))
    dims = Dims(dp_shard=2, tp=2, meshes=[mesh])
    model = with_stand_in(copy.deepcopy(start), **settings(dims))
    assert isinstance(model, FSDPModule) and isinstance(model.layers["0"], FSDPModule)
    for by_rank in steps[:1]:
        sum_loss(model, by_rank[rank // 2], num_tokens_of(by_rank)).backward()
        for tokens in by_rank:
            sum_loss(start, tokens, num_tokens_of(by_rank)).backward()
    for (name, p), q in zip(model.named_parameters(), start.parameters(), strict=True):
        assert_rounded_alike(
            p.grad.full_tensor(), q.grad, of_gradient(8, 11, 8, 11, 8, over=64), name
        )


@pytest.mark.skipif(
    not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"), reason="from torch 2.12 on"
)
@on_ranks(4)
def test_axes_that_are_all_data_parallel_need_no_names(rank, world_size):
    torch.manual_seed(0)
    plain = Decoder()
    for num_replicas in (1, 2):
        dims = Dims(dp_replicate=num_replicas, dp_shard=world_size // num_replicas)
        dims.get_activated_mesh(["dp_replicate", "dp_shard"])
        model = with_stand_in(copy.deepcopy(plain), **settings(dims))
        for param in model.parameters():
            assert isinstance(param, DTensor)
            assert param.placements == (Replicate(), Shard(0))[-param.device_mesh.ndim :]
            assert (
                param.device_mesh.shape == (num_replicas, dims.dp_shard)[-len(param.placements) :]
            )


@on_ranks(1)
def test_what_the_engine_lacks_is_refused_before_anything_changes():
    on_gpu = Dims(meshes=[SimpleNamespace(device_type="cuda")])
    cases = [
        ("spmd_backend='full_dtensor'", settings(Dims(), spmd_backend="full_dtensor")),
        ("enable_fsdp_symm_mem", settings(Dims(), enable_fsdp_symm_mem=True)),
        ("disable_cuda_graphs", settings(on_gpu)),
    ]
    for wanted, given in cases:
        model = Decoder()
        with pytest.raises(ConfigError, match=wanted):
            with_stand_in(model, **given)
        assert type(model) is Decoder


# -- torchtitan itself


def titan():
    """Return what the tests need of torchtitan, told to run on the CPU."""
    pytest.importorskip("torchtitan.models.llama3", exc_type=ImportError)
    import torchtitan.config
    import torchtitan.distributed.parallel_dims as parallel_dims
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    parallel_dims.device_type = "cpu"  # it takes "cuda" where there is no accelerator
    return SimpleNamespace(
        ChunkedLossWrapper=ChunkedLossWrapper,
        CompileConfig=torchtitan.config.CompileConfig,
        CrossEntropyLoss=CrossEntropyLoss,
        FullAC=FullAC,
        ParallelDims=parallel_dims.ParallelDims,
        ParallelismConfig=torchtitan.config.ParallelismConfig,
        SDPA=ScaledDotProductAttention,
        SelectiveAC=SelectiveAC,
        TrainingConfig=torchtitan.config.TrainingConfig,
        model_registry=model_registry,
    )


def llama_config(t, tied=False):
    """Two layers of torchtitan's debug model, with the attention that runs on a CPU."""
    config = t.model_registry("debugmodel", attn_backend="varlen").model
    config.layers = config.layers[:2]
    config.enable_weight_tying = tied
    for layer in config.layers:
        layer.attention.inner_attention = t.SDPA.Config()
    return config


def build_llama(t, world_size, *, ac=None, compiled=False, **changed):
    """Build a model as torchtitan's Trainer does: on meta, parallelized, emptied, initialised."""
    parallelism = t.ParallelismConfig(
        data_parallel_replicate_degree=changed.get("replicas", 1),
        spmd_backend=changed.get("spmd_backend", "spmd_types"),
    )
    dims = t.ParallelDims.from_config(parallelism, world_size)
    dims.build_mesh()
    with torch.device("meta"):
        model = llama_config(t, changed.get("tied", False)).build()
    its_fn = t.model_registry("debugmodel", attn_backend="varlen").parallelize_fn
    model = torchtitan.with_shardwise(its_fn)(
        model,
        parallel_dims=dims,
        training=t.TrainingConfig(mixed_precision_param="float32"),
        parallelism=parallelism,
        compile_config=t.CompileConfig(enable=compiled, backend="aot_eager"),
        ac_config=ac,
        dump_folder="",
    )
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model.train()


def plain_like(t, model, tied=False):
    """Build the plain model with the values of a sharded one."""
    plain = llama_config(t, tied).build()
    plain.init_weights(buffer_device=None)
    with torch.no_grad():
        for to, of in zip(plain.parameters(), model.parameters(), strict=True):
            to.copy_(full(of))
    return plain.train()


def train_llama(rank, world_size):
    t = titan()
    steps = batches_of(world_size, 2048)
    cross_entropy = t.CrossEntropyLoss.Config().build()

    def loss_fn(model, tokens, num_tokens):
        loss, _ = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], torch.tensor(num_tokens))
        return loss

    def chunked(model, tokens, num_tokens):
        wrapper = t.ChunkedLossWrapper.Config(loss_fn=t.CrossEntropyLoss.Config()).build()
        wrapper.set_lm_head(model.lm_head)
        model._skip_lm_head = True
        loss, _ = wrapper(model(tokens[:, :-1]), tokens[:, 1:], torch.tensor(num_tokens))
        return loss

    cases = [
        {},
        {"replicas": world_size},
        {"spmd_backend": "partial_dtensor", "ac": t.SelectiveAC.Config()},
        {"ac": t.FullAC.Config(), "compiled": True},
        {"tied": True},
        {"loss": chunked},
    ]
    for case in cases:
        loss = case.pop("loss", loss_fn)
        torch._dynamo.reset()
        model = build_llama(t, world_size, **case)
        whole = plain_like(t, model, case.get("tied", False))
        plain = train(whole, steps, rank, loss, is_plain=True)
        try:
            assert_same_run(train(model, steps, rank, loss), plain)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.slow
def test_torchtitans_llama_takes_the_steps_of_the_plain_one():
    titan()
    run_ranks(train_llama, 2, fresh=True)


@pytest.mark.slow
def test_the_example_trains_torchtitans_debug_model():
    titan()
    out = run_as_in_the_gallery("torchtitan_parallelize.py")
    losses = [float(x) for x in re.findall(r"^step +\d+  loss (\S+)", out, re.MULTILINE)]
    assert len(losses) > 2 and losses[-1] < losses[0] - 1

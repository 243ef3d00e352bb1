"""Adapters over a frozen, sharded base: the steps of DDP, the bytes of the formula.

They are saved, loaded, switched and merged as PEFT does on a plain model.
"""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from oracle import assert_same_bits
from peft_models import VARIANTS, HandLora, Stack, lora_llama, loss_of, make_llama
from programs import run_as_in_the_gallery
from ranks import on_ranks, run_ranks
from shardwise import describe, gathered, shard
from shardwise.debug import stats
from shardwise.engine.api import engine_of
from shardwise.errors import CheckpointError, ConfigError, ShardError, StateError
from shardwise.interop.peft import load_adapter, save_adapter
from shardwise.layout.units import partition_into_units
from shardwise.plan.candidate import Candidate
from shardwise.plan.model.tape import TapeParam, TapeUnit
from shardwise.plan.step.footprint import footprints_of
from shardwise.tensor.shard_tensor import ShardTensor
from trainer import events_of, full_parameters

peft = pytest.importorskip("peft", reason="peft is in the test extra")
pytest.importorskip("transformers", reason="transformers is in the test extra")

from transformers_models import by_calls  # noqa: E402

# Importing a model class pulls in packages that warn about each other.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:Setting `save_embedding_layers` to `True`:UserWarning",
    "ignore:Model has `tie_word_embeddings=True`:UserWarning",
)

SETTINGS = [{"stage": stage} for stage in range(4)] + [{"stage": 3, "layout": "flat"}]


def units_of(model):
    return {unit.name: {p.name for p in unit.params} for unit in partition_into_units(model, None)}


@pytest.mark.parametrize("make", [make_llama, lambda: Stack(nn.Identity)])
def test_units_are_found_inside_pefts_wrapping_and_hold_the_adapters(make):
    plain = units_of(make())
    wrapped = units_of(
        peft.get_peft_model(make(), peft.LoraConfig(target_modules=["q_proj", "down"]))
    )
    blocks = {name for name in plain if name.rpartition(".")[2].isdigit()}
    assert len(blocks) >= 2
    assert {f"base_model.model.{name}" for name in blocks} <= wrapped.keys()
    assert all(any("lora_A" in p for p in wrapped[f"base_model.model.{b}"]) for b in blocks)


def train(model, num_steps=3):
    """Train what is trainable on this rank's data; leave the gradients of one more backward."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    rank = dist.get_rank()
    torch.manual_seed(rank)  # each rank drops what it likes
    random = torch.Generator().manual_seed(rank + 1)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = loss_of(model, torch.randint(64, (2, 8), generator=random))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    loss_of(model, torch.randint(64, (2, 8), generator=random)).backward()
    return losses, optimizer


def settings_of(name):
    """Return two settings of each variant, so that each setting meets variants of either sort."""
    number = sorted(VARIANTS).index(name)
    return [SETTINGS[number % len(SETTINGS)], SETTINGS[(number + 3) % len(SETTINGS)]]


def compare_with_ddp(rank, world_size, name, settings):
    plain = VARIANTS[name]()
    losses, _ = train(DistributedDataParallel(plain))
    assert len(set(losses)) == len(losses)
    for setting in settings:
        model = VARIANTS[name]()
        before = {n: (p.dtype, p.requires_grad, p.nbytes) for n, p in model.named_parameters()}
        shard(model, **setting)
        ours, own = train(model)
        assert ours == losses, setting
        assert_same_bits(full_parameters(model), dict(plain.named_parameters()))
        now = {n: (p.dtype, p.requires_grad) for n, p in model.named_parameters()}
        assert now == {n: facts[:2] for n, facts in before.items()}
        check_bytes(model, own, before, world_size if setting["stage"] else 1)
        check_plan(model, own, setting, world_size)
        check_traffic(model, own, world_size)


def check_bytes(model, optimizer, before, parts):
    """Shards are everything / N; gradients and state are the adapters' / N, and nothing else."""
    total = sum(nbytes for _, _, nbytes in before.values())
    trained = sum(nbytes for _, requires_grad, nbytes in before.values() if requires_grad)
    assert 0 < trained < total
    assert describe(model).full_bytes == total
    assert describe(model).rank_bytes == stats(model).param_shard_bytes == total // parts
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert stats(model).grad_shard_bytes == trained // parts
    memory = {s.data_ptr(): s.nbytes() for s in (g.to_local().untyped_storage() for g in grads)}
    assert sum(memory.values()) == trained // parts
    state = [t.to_local() for s in optimizer.state.values() for t in s.values() if t.dim()]
    assert sum(t.nbytes for t in state) == 2 * trained // parts  # Adam's two moments


def check_plan(model, optimizer, setting, world_size):
    """The planner weighs the same units."""
    candidate = Candidate(
        num_shards=world_size, precision="fp32", transport="point_to_point", **setting
    )
    units = [
        TapeUnit(
            unit.name,
            tuple(
                TapeParam(s.name, s.cut.shape, str(s.sharded.dtype)[6:], s.sharded.requires_grad)
                for s in unit.params
            ),
        )
        for unit in engine_of(model).units
    ]
    weighed = footprints_of(units, candidate)
    assert sum(w.shard_bytes for w in weighed) == stats(model).param_shard_bytes
    assert sum(w.reduce.out for w in weighed if w.reduce) == stats(model).grad_shard_bytes
    state = [t for s in optimizer.state.values() for t in s.values()]
    held = sum((t.to_local() if t.dim() else t).nbytes for t in state)
    assert sum(w.state_bytes for w in weighed) == held


def check_traffic(model, optimizer, world_size):
    """After a step, stages 1 and 2 gather what was trained and nothing else."""
    stage = engine_of(model).config.stage
    optimizer.step()
    events = events_of(model)
    loss_of(model, torch.zeros(2, 8, dtype=torch.int64))
    gathered = sum(num_bytes for kind, _, num_bytes in events if kind == "shard.all_gather")
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    if not stage.frees_after_forward:  # stage 3 gathers every unit that runs
        assert gathered == (trained if stage.shards_state else 0) * (world_size - 1) // world_size


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_adapters_take_the_steps_of_ddp_and_the_frozen_base_costs_its_shards_only(name):
    run_ranks(compare_with_ddp, 2, name, settings_of(name))


# -- adapters saved, loaded, switched and merged
IDS = torch.arange(16).view(2, 8)
BF16 = torch.bfloat16


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(input_ids=IDS).logits


def losses_of(model):
    return train(model, 2)[0]


@pytest.mark.parametrize(
    ("world_size", "options"), [(2, {"stage": 3}), (3, {"stage": 2, "layout": "flat"})]
)
@on_ranks()
def test_adapters_are_saved_as_stock_peft_saves_them_and_loaded_without_the_base(
    world_size, rank, tmp_path, options
):
    names = ("default", "second")
    embedding = {"modules_to_save": ["norm"], "targets": ("q_proj", "embed_tokens")}
    model = shard(lora_llama(BF16, names, **embedding), **options)
    losses_of(model)
    ours, stock = Path(tmp_path, "ours"), Path(tmp_path, "stock")
    events = events_of(model)
    save_adapter(model, ours)
    saved = ("lora_", "modules_to_save", "embed_tokens.base_layer")  # it is targeted
    num_saved = sum(any(part in name for part in saved) for name, _ in model.named_parameters())
    assert len(events) == num_saved + 1  # a gather each, none of the base, and one last question
    with gathered(model):
        model.save_pretrained(str(stock), is_main_process=rank == 0)
    dist.barrier()
    for part in ("", "second"):
        file = Path(part, "adapter_model.safetensors")
        assert_same_bits(load_file(ours / file), load_file(stock / file))
        config = Path(part, "adapter_config.json")
        assert json.loads((ours / config).read_text()) == json.loads((stock / config).read_text())
    save_adapter(model, Path(tmp_path, "one"), ["second"])
    assert [p.name for p in Path(tmp_path, "one").iterdir() if p.is_dir()] == ["second"]

    # Stock PEFT reads it.
    torch.manual_seed(0)
    base = make_llama().to(BF16)
    plain = peft.PeftModel.from_pretrained(base, str(ours))
    plain.load_adapter(str(ours / "second"), "second")
    expected = full_parameters(model)
    assert_same_bits(dict(plain.named_parameters()), expected)

    # A sharded model reads it, whatever its stage.
    for stage in (0, 3):
        fresh = shard(lora_llama(BF16, names, **embedding), stage=stage)
        load_adapter(fresh, ours)
        load_adapter(fresh, ours / "second", "second")
        assert_same_bits(full_parameters(fresh), expected)
        assert all(isinstance(p, ShardTensor) for p in fresh.parameters())
        assert torch.equal(logits(fresh), logits(plain))
        assert len(set(losses_of(fresh))) == 2  # it goes on learning

    # And one of fully_shard, which saves the same.
    fresh = by_calls(lora_llama(BF16, names, **embedding))
    load_adapter(fresh, ours)
    load_adapter(fresh, ours / "second", "second")
    assert_same_bits(full_parameters(fresh), expected)
    assert len(set(losses_of(fresh))) == 2
    load_adapter(fresh, ours)
    save_adapter(fresh, Path(tmp_path, "calls"))
    dist.barrier()
    file = "adapter_model.safetensors"
    assert Path(tmp_path, "calls", file).read_bytes() == (ours / file).read_bytes()

    # So does PEFT's own call, where parameters are cut by rows.
    fresh = shard(lora_llama(BF16, names, **embedding), stage=3)
    for name, path in zip(names, (ours, ours / "second"), strict=True):
        fresh.load_adapter(str(path), name)
    assert_same_bits(full_parameters(fresh), expected)


@on_ranks(2)
def test_adapters_that_do_not_fit_change_nothing_and_say_why(rank, tmp_path):
    folder = str(tmp_path)
    model = shard(lora_llama(targets=("q_proj",)), stage=3)
    before = full_parameters(model)
    for other, why in (
        (lora_llama(targets=("v_proj",)), "v_proj"),  # other layers
        (lora_llama(targets=("q_proj", "v_proj")), "v_proj"),  # more layers
    ):
        if rank == 0:
            other.save_pretrained(folder)
        dist.barrier()
        with pytest.raises(ConfigError, match=f"does not fit adapter 'default'.*{why}"):
            load_adapter(model, folder)
        dist.barrier()
    if rank == 0:
        path = Path(folder, "adapter_model.safetensors")
        save_file({k: v[:1].clone() for k, v in load_file(path).items() if "q_proj" in k}, path)
    dist.barrier()
    with pytest.raises(ConfigError, match="size mismatch"):
        load_adapter(model, folder)
    assert_same_bits(full_parameters(model), before)
    with pytest.raises(ConfigError, match="'nobody': the model has no such adapter; it has 'd"):
        save_adapter(model, folder, ["nobody"])
    with pytest.raises(CheckpointError, match=r"rank 0: .*should be a directory"):
        save_adapter(model, Path(folder, "adapter_model.safetensors"))
    with pytest.raises(ConfigError, match="Stack is no PeftModel"):
        save_adapter(shard(Stack(HandLora)), folder)
    with pytest.raises(ConfigError, match="not sharded"):
        save_adapter(lora_llama(), folder)
    with pytest.raises(StateError, match="added or replaced after shard"):
        model.add_adapter("late", peft.LoraConfig(r=4, target_modules=["q_proj"]))
        model(input_ids=IDS)  # it is frozen until it is active
        model.set_adapter("late")
        model(input_ids=IDS)


@on_ranks(2)
def test_a_folder_that_one_rank_cannot_read_is_refused_on_all_ranks(rank, tmp_path):
    """A folder that one rank alone does not see is refused on both, and both can go on."""
    model = shard(lora_llama(targets=("q_proj",)), stage=3)
    here = Path(tmp_path, f"of rank {rank}")
    if rank == 0:
        lora_llama(targets=("q_proj",)).save_pretrained(str(here))
    dist.barrier()
    with pytest.raises(ConfigError, match=r"rank 1: .*of rank 1 is no folder with an adapter_mod"):
        load_adapter(model, here)
    if rank == 1:
        here.mkdir()
        (here / "adapter_model.safetensors").write_bytes(b"cut short")
    with pytest.raises(CheckpointError, match=r"rank 1: Safetensor"):
        load_adapter(model, here)
    if rank == 1:
        lora_llama(targets=("v_proj",)).save_pretrained(str(here))
    before = full_parameters(model)
    with pytest.raises(ConfigError, match=r"rank 1: .*does not fit adapter 'default'.*v_proj"):
        load_adapter(model, here)
    assert_same_bits(full_parameters(model), before)
    with pytest.raises(ConfigError, match=r"mistyped is no folder"):
        load_adapter(model, Path(tmp_path, "mistyped"))
    load_adapter(model, Path(tmp_path, "of rank 0"))
    assert len(set(losses_of(model))) == 2


TIED = {
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [1, 5]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
}


def tied_llama(seed, options):
    torch.manual_seed(0)
    base = make_llama()
    base.config.tie_word_embeddings = True
    base.tie_weights()
    assert base.lm_head.weight is base.model.embed_tokens.weight
    torch.manual_seed(seed)
    return peft.get_peft_model(base, peft.LoraConfig(r=4, init_lora_weights=False, **options))


@on_ranks(2)
def test_adapters_of_tied_embeddings_are_loaded_from_what_was_saved(tmp_path):
    for name, options in TIED.items():
        model = shard(tied_llama(1, options), stage=3)
        losses_of(model)
        save_adapter(model, Path(tmp_path, name))
        dist.barrier()
        fresh = shard(tied_llama(2, options), stage=3)
        load_adapter(fresh, Path(tmp_path, name))
        assert_same_bits(full_parameters(fresh), full_parameters(model))


PROMPTS = {
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "layers": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


def prompted_llama(seed, name):
    torch.manual_seed(0)
    base = make_llama()
    torch.manual_seed(seed)
    return peft.get_peft_model(base, PROMPTS[name]())


@on_ranks(2)
def test_prompts_are_saved_as_stock_peft_saves_them_and_loaded(rank, tmp_path):
    if rank == 0:
        lora_llama().save_pretrained(str(tmp_path / "lora"))
    for name in PROMPTS:
        path, plain = tmp_path / name, prompted_llama(1, name)
        losses = losses_of(DistributedDataParallel(plain))
        # The encoder, too, may be a unit of its own: it runs when its prompt is saved.
        encoder = [type(plain.prompt_encoder["default"]).__name__]
        for units in (None, ["LlamaDecoderLayer", *encoder]):
            model = shard(prompted_llama(1, name), stage=3, units=units)
            assert losses_of(model) == losses
            save_adapter(model, path)
            dist.barrier()
            expected = peft.get_peft_model_state_dict(plain)
            assert_same_bits(load_file(path / "adapter_model.safetensors"), expected)
            fresh = shard(prompted_llama(2, name), stage=3, units=units)
            if name == "layers":
                with pytest.raises(ConfigError, match=r"computes its prompt by layers.*load\(\)"):
                    load_adapter(fresh, path)
                continue
            load_adapter(fresh, path)
            assert_same_bits(full_parameters(fresh), dict(plain.named_parameters()))
            with pytest.raises(ConfigError, match="does not fit adapter 'default'"):
                load_adapter(fresh, tmp_path / "lora")
            assert_same_bits(full_parameters(fresh), dict(plain.named_parameters()))


@on_ranks(2)
def test_adapters_of_parameters_are_refused_in_the_first_forward_pass():
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=["q_proj.weight"])
    model = shard(peft.get_peft_model(make_llama(), config), stage=3)
    with pytest.raises(ShardError, match="written inside the forward pass"):
        model(input_ids=IDS)


@on_ranks(2)
def test_switching_and_disabling_adapters_is_that_of_the_plain_model():
    """Train one adapter, then the other; look at the base in between."""
    plain = lora_llama(adapters=("first", "second"))
    base = logits(lora_llama(adapters=("first", "second")).unload())
    trace = []
    for name in ("first", "second", "first"):
        plain.set_adapter(name)
        trace += [losses_of(DistributedDataParallel(plain)), logits(plain)]
    for options in ({"stage": 1}, {"stage": 3}):
        model, found = shard(lora_llama(adapters=("first", "second")), **options), []
        for name in ("first", "second", "first"):
            model.set_adapter(name)
            found += [losses_of(model), logits(model)]
            with model.disable_adapter():
                assert torch.equal(logits(model), base)
            assert torch.equal(logits(model), found[-1])
        for ours, theirs in zip(found, trace, strict=True):
            assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))
        assert_same_bits(full_parameters(model), dict(plain.named_parameters()))


@on_ranks(2)
def test_merging_is_that_of_the_plain_model():
    for dtype, options in ((torch.float32, {"stage": 3, "layout": "flat"}), (BF16, {"stage": 1})):
        model, plain = shard(lora_llama(dtype), **options), lora_llama(dtype)
        for work in ("merge_adapter", "unmerge_adapter"):  # each rank merges its own rows
            getattr(model, work)()
            getattr(plain, work)()
            assert torch.equal(logits(model), logits(plain))
            assert_same_bits(full_parameters(model), dict(plain.named_parameters()))
        assert_same_bits(full_parameters(model), dict(plain.named_parameters()))
        expected = plain.merge_and_unload().state_dict()
        with gathered(model, writeback=True):
            merged = model.merge_and_unload()
            assert_same_bits(merged.state_dict(), expected)
        assert torch.equal(logits(model), logits(plain))


@on_ranks(2)
def test_a_merge_that_would_be_lost_is_refused():
    model = shard(lora_llama(), stage=3)
    with (
        pytest.raises(StateError, match=r"q_proj\.base_layer\.weight.*writeback=True"),
        gathered(model),
    ):
        model.merge_adapter()


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_activation_checkpointing_over_a_frozen_base_takes_the_plain_steps(reentrant):
    def make():
        model = lora_llama(BF16)
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    losses = losses_of(DistributedDataParallel(make()))
    for stage in (1, 3):
        assert losses_of(shard(make(), stage=stage)) == losses


@pytest.mark.slow
def test_the_example_learns_and_its_adapter_is_peft_s(tmp_path):
    out = run_as_in_the_gallery("lora.py", "--folder", tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", out)]
    assert len(losses) == 4 and losses == sorted(losses, reverse=True)
    assert (tmp_path / "adapter_config.json").exists()
    state = load_file(tmp_path / "adapter_model.safetensors")
    trained, every, held = map(int, re.findall(r"\d+", out.splitlines()[-1]))
    assert trained == sum(t.numel() for t in state.values())
    assert held == (2 * (every - trained) + 4 * trained) // 2  # bf16 and fp32, on two ranks

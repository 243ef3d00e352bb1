"""Exports are read by those that they are for, to the bit; one that fails leaves nothing."""

import errno
import itertools
import json
import os
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from checkpoint.disk import FaultyFiles
from convert.sources import MemorySource, all_bits, bits, odd_tensors, source_of, whole_tensors
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.source import OptimizerInfo
from shardwise.convert import export
from shardwise.convert.export import export_dcp, export_huggingface, split_into_shards
from shardwise.convert.huggingface import open_huggingface
from shardwise.errors import CheckpointError, ConfigError, DamagedCheckpoint

FILES = Files()
INDEX = "model.safetensors.index.json"
IDS = torch.arange(24).view(2, 12)

# Importing a model class of transformers pulls in packages that warn about each other.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


# -- the files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_shard_bytes", [1, 60, 10**9])
def test_what_is_exported_comes_back_to_the_bit(tmp_path, max_shard_bytes):
    tensors = odd_tensors()
    told = []
    done = export_huggingface(
        MemorySource(tensors),
        tmp_path / "out",
        files=FILES,
        max_shard_bytes=max_shard_bytes,
        progress=told.append,
    )
    total_bytes = sum(t.nbytes for t in tensors.values())
    assert (done.total_bytes, done.num_tensors, sum(told)) == (total_bytes, 12, total_bytes)
    assert (done.files == ("model.safetensors",)) == (max_shard_bytes == 10**9)
    on_disk = set(os.listdir(tmp_path / "out"))
    assert on_disk == set(done.files) | ({INDEX} if len(done.files) > 1 else set())
    assert all_bits(whole_tensors(open_huggingface(tmp_path / "out"))) == all_bits(tensors)
    found = {}
    for name in done.files:  # by the library, which finds tensors aligned
        data = (tmp_path / "out" / name).read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:begin])
        assert header.pop("__metadata__") == {"format": "pt"}
        for key, entry in header.items():
            assert (begin + entry["data_offsets"][0]) % tensors[key].element_size() == 0, key
        found |= load_file(tmp_path / "out" / name)
    assert all_bits(found) == all_bits(tensors)


def test_only_parameters_and_buffers_are_exported_and_a_shared_one_once(tmp_path):
    source = MemorySource({"embed": torch.ones(3, 2), "head": torch.ones(3, 2)})
    source.tied = {"head": "embed"}
    source.add("buffer", "mean", torch.zeros(3))
    source.add("optimizer", "embed", torch.ones(3, 2), "exp_avg")
    source.add("extra", "loader", torch.ones(5))
    export_huggingface(source, tmp_path / "out", files=FILES)
    assert [t.name for t in open_huggingface(tmp_path / "out").tensors] == ["embed", "mean"]
    assert source.total_read_bytes == 4 * 9


def test_one_piece_of_a_tensor_is_in_memory_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "_PIECE_BYTES", 4096)
    tensors = {"big": torch.randn(100, 1001), "small": torch.randn(7).double()}
    source = MemorySource(tensors)
    told = []
    export_huggingface(source, tmp_path / "out", files=FILES, progress=told.append)
    assert source.largest_read_bytes == 4096
    assert source.total_read_bytes == sum(t.nbytes for t in tensors.values())
    assert max(told) == 4096
    assert all_bits(whole_tensors(open_huggingface(tmp_path / "out"))) == all_bits(tensors)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=12), st.integers(1, 20))
def test_files_are_split_as_the_hub_splits_them(sizes, max_bytes):
    hub = pytest.importorskip("huggingface_hub", reason="it comes with transformers")
    split = hub.split_state_dict_into_shards_factory(
        {str(i): size for i, size in enumerate(sizes)},
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_bytes,
    )
    expected = [[int(name) for name in names] for names in split.filename_to_tensors.values()]
    assert split_into_shards(sizes, max_bytes) == expected


# -- casts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["BF16", "bfloat16", "torch.bfloat16"])
def test_a_cast_changes_floating_tensors_as_torch_does_and_no_others(tmp_path, spelling):
    tensors = odd_tensors()
    done = export_huggingface(
        MemorySource(tensors), tmp_path / "out", files=FILES, dtype=spelling, max_shard_bytes=50
    )
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    expected = {n: t.bfloat16() if t.dtype in floats else t for n, t in tensors.items()}
    assert all_bits(whole_tensors(open_huggingface(tmp_path / "out"))) == all_bits(expected)
    assert done.total_bytes == sum(t.nbytes for t in expected.values())
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"] == {"total_size": done.total_bytes}


def test_a_value_that_does_not_fit_the_new_dtype_is_refused_and_not_made_infinite(tmp_path):
    source = MemorySource({"fine": torch.ones(2), "large": torch.tensor([1.0, 70_000.0])})
    with pytest.raises(CheckpointError, match=r"'large' of F32 holds values beyond .* F16"):
        export_huggingface(source, tmp_path / "out", files=FILES, dtype="F16")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("wrong", [{"dtype": "int8"}, {"dtype": "F4"}, {"max_shard_bytes": 0}])
def test_wrong_arguments_are_refused_before_anything_is_written(tmp_path, wrong):
    with pytest.raises(ConfigError, match="expected"):
        export_huggingface(MemorySource({"w": torch.ones(2)}), tmp_path / "a", files=FILES, **wrong)
    assert os.listdir(tmp_path) == []


# -- the target -----------------------------------------------------------------------------------


def test_a_missing_target_is_made_and_an_empty_one_is_filled(tmp_path):
    source = MemorySource({"w": torch.ones(2)})
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "empty", tmp_path / "a" / "b" / "new"):
        export_huggingface(source, target, files=FILES)
        assert os.listdir(target) == ["model.safetensors"]
        assert os.listdir(target.parent) == [target.name] or target.parent == tmp_path


@pytest.mark.parametrize("kind", ["full", "file", "link"])
def test_a_target_in_use_is_refused_and_left_alone(tmp_path, kind):
    target = tmp_path / "out"
    (tmp_path / "elsewhere").mkdir()
    if kind == "full":
        target.mkdir()
        (target / "mine").write_text("keep")
    elif kind == "file":
        target.write_text("keep")
    else:
        target.symlink_to("elsewhere")
    source = MemorySource({"w": torch.ones(2)})
    for write in (
        lambda: export_huggingface(source, target, files=FILES),
        lambda: export_dcp(source, target),
    ):
        with pytest.raises(CheckpointError, match="is there already"):
            write()
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "out"]
    assert source.total_read_bytes == 0


def test_a_source_without_parameters_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="memory holds no parameter"):
        export_huggingface(MemorySource(), tmp_path / "out", files=FILES)


def test_a_disk_without_room_is_refused_before_it_is_filled(tmp_path):
    class Full(Files):
        def free_bytes(self, path):
            return 7

    source = MemorySource({"w": torch.ones(2)})
    with pytest.raises(CheckpointError, match="takes 8 bytes, 7 are free"):
        export_huggingface(source, tmp_path / "out", files=Full())
    assert source.total_read_bytes == 0
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_export_that_fails_anywhere_leaves_nothing_or_all(tmp_path, error):
    tensors = {"a": torch.randn(5), "b": torch.randn(3, 2), "c": torch.tensor(1)}
    for n in range(100):
        target, count, failed = tmp_path / str(n) / "out", itertools.count(), True

        def fail(n=n, count=count):
            if next(count) == n:
                raise error(errno.EIO, "I/O error")

        files = FaultyFiles(FILES, before=fail)
        try:
            export_huggingface(MemorySource(tensors), target, files=files, max_shard_bytes=24)
            failed = False
        except KeyboardInterrupt:
            assert error is KeyboardInterrupt
        except CheckpointError as raised:
            assert error is OSError
            assert "I/O error (errno 5)" in str(raised) and str(target) in str(raised)
        operations = {operation for operation, _ in files.operations}
        left = os.listdir(target.parent) if target.parent.exists() else []
        assert left == (["out"] if "rename" in operations else []), files.operations
        if left:
            assert all_bits(whole_tensors(open_huggingface(target))) == all_bits(tensors)
        if not failed:
            break
    assert not failed
    assert {"make_folder", "create", "write", "sync", "rename", "sync_folder"} <= operations


def test_a_damaged_source_leaves_no_export(tmp_path):
    class Damaged(MemorySource):
        def read(self, tensor, lo, hi):
            if tensor.name == "b":
                raise DamagedCheckpoint("b")
            return super().read(tensor, lo, hi)

    source = Damaged({"a": torch.ones(2), "b": torch.ones(2)})
    for write in (
        lambda: export_huggingface(source, tmp_path / "out", files=FILES),
        lambda: export_dcp(source, tmp_path / "out"),
    ):
        with pytest.raises(DamagedCheckpoint, match="b"):
            write()
        assert os.listdir(tmp_path) == []


# -- transformers ---------------------------------------------------------------------------------


def llama(*, tied=False):
    transformers = pytest.importorskip("transformers", reason="transformers is in the test extra")
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config).eval()


@torch.no_grad()
def logits(model):
    return model(IDS).logits


@pytest.mark.parametrize(("tied", "max_shard_bytes"), [(False, 10**9), (True, 3000)])
def test_transformers_loads_an_export_with_the_same_logits_to_the_bit(
    tmp_path, tied, max_shard_bytes
):
    model = llama(tied=tied)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=max_shard_bytes)
    source = source_of(model)
    assert source.tied == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    done = export_huggingface(
        source,
        tmp_path / "ours",
        files=FILES,
        max_shard_bytes=max_shard_bytes,
        config_from=tmp_path / "theirs",
    )
    assert sorted(os.listdir(tmp_path / "ours")) == sorted(os.listdir(tmp_path / "theirs"))
    if len(done.files) > 1:
        theirs = json.loads((tmp_path / "theirs" / INDEX).read_text())
        ours = json.loads((tmp_path / "ours" / INDEX).read_text())
        assert ours["weight_map"] == theirs["weight_map"]
        assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    loaded, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values()), info
    assert bits(logits(loaded)) == bits(logits(model))
    theirs = open_huggingface(tmp_path / "theirs")  # in, and out again
    export_huggingface(theirs, tmp_path / "again", files=FILES, config_from=tmp_path / "theirs")
    assert all_bits(whole_tensors(open_huggingface(tmp_path / "again"))) == all_bits(
        whole_tensors(theirs)
    )


@pytest.mark.parametrize("family", ["Bert", "GPT2", "T5"])
def test_the_names_are_those_that_transformers_writes_whatever_is_tied(tmp_path, family):
    transformers = pytest.importorskip("transformers", reason="transformers is in the test extra")
    small = {"vocab_size": 31, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    options, kind = {
        "Bert": ({**small, "intermediate_size": 24}, "ForMaskedLM"),
        "GPT2": ({**small, "bos_token_id": 0, "eos_token_id": 0}, "LMHeadModel"),
        "T5": (
            {"vocab_size": 31, "d_model": 16, "d_kv": 8, "d_ff": 24},
            "ForConditionalGeneration",
        ),
    }[family]
    config = getattr(transformers, f"{family}Config")(**options)
    model = getattr(transformers, f"{family}{kind}")(config)
    model.save_pretrained(tmp_path / "theirs")
    source = source_of(model)
    assert source.tied
    export_huggingface(source, tmp_path / "ours", files=FILES, config_from=tmp_path / "theirs")
    theirs, ours = (open_huggingface(tmp_path / folder) for folder in ("theirs", "ours"))
    assert all_bits(whole_tensors(ours)) == all_bits(whole_tensors(theirs))
    loaded, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values()), info
    assert all_bits(loaded.state_dict()) == all_bits(model.state_dict())


def test_joined_experts_of_a_mixture_are_loaded_under_the_names_of_the_module(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is in the test extra")
    config = transformers.MixtralConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
    )
    model = transformers.MixtralForCausalLM(config).eval()
    config.save_pretrained(tmp_path / "config")
    export_huggingface(
        source_of(model), tmp_path / "out", files=FILES, config_from=tmp_path / "config"
    )
    loaded, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert bits(logits(loaded)) == bits(logits(model))


def test_the_tokenizer_and_the_config_come_along_through_links_but_no_code(tmp_path):
    theirs, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    theirs.mkdir(parents=True)
    (theirs / "vocab.txt").symlink_to(blobs / "gone")
    blobs.mkdir()
    for name in ("config.json", "tokenizer.json", "modeling_evil.py", "other.json"):
        (blobs / name).write_text(f"the text of {name}")
        (theirs / name).symlink_to(blobs / name)
    source = MemorySource({"w": torch.ones(2)})
    export_huggingface(source, tmp_path / "out", files=FILES, config_from=theirs)
    ours = tmp_path / "out"
    assert sorted(os.listdir(ours)) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (ours / "tokenizer.json").read_text() == "the text of tokenizer.json"
    assert not (ours / "tokenizer.json").is_symlink()
    (theirs / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        export_huggingface(source, tmp_path / "new", files=FILES, config_from=theirs)
    assert not (tmp_path / "new").exists()


def test_a_config_from_elsewhere_or_beyond_all_sizes_is_not_copied(tmp_path):
    theirs, source = tmp_path / "theirs", MemorySource({"w": torch.ones(2)})
    theirs.mkdir()
    (tmp_path / "secret").write_text("x")
    (theirs / "config.json").symlink_to("../secret")
    with pytest.raises(CheckpointError, match=r"config\.json is a link to .*secret"):
        export_huggingface(source, tmp_path / "out", files=FILES, config_from=theirs)
    (theirs / "config.json").unlink()
    (theirs / "config.json").touch()
    os.truncate(theirs / "config.json", (64 << 20) + 1)
    with pytest.raises(CheckpointError, match=r"config\.json has 67108865 bytes"):
        export_huggingface(source, tmp_path / "out", files=FILES, config_from=theirs)
    assert not (tmp_path / "out").exists()


# -- torch's own format ---------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.norm(self.embed(ids)))


def trained(seed, num_steps):
    torch.manual_seed(seed)
    model = Tied()
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    weights = [p for n, p in model.named_parameters() if not n.endswith("bias")]
    groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0, "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=0.1 / (1 + seed), betas=(0.8, 0.9))
    take_steps(model, optimizer, num_steps)
    return model, optimizer


def take_steps(model, optimizer, num_steps):
    for step in range(num_steps):
        model((torch.arange(7) + step) % 11).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def load_dcp(nested, folder):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(nested, storage_reader=dcp.FileSystemReader(folder), no_dist=True)


def test_a_plain_script_resumes_from_the_dcp_export_to_the_bit(tmp_path):
    model, optimizer = trained(seed=0, num_steps=3)
    source = source_of(model, optimizer)
    source.add("extra", "loader", torch.ones(3))
    export_dcp(source, tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == [".metadata", "__0_0.distcp"]
    assert os.listdir(tmp_path) == ["out"]

    other, other_optimizer = trained(seed=1, num_steps=1)
    model_state, optimizer_state = get_state_dict(other, other_optimizer)
    nested = {"model": model_state, "optim": optimizer_state}
    load_dcp(nested, tmp_path / "out")
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict=nested["model"],
        optim_state_dict=nested["optim"],
    )
    assert all_bits(other.state_dict()) == all_bits(model.state_dict())
    assert other_optimizer.param_groups[1]["lr"] == 0.5
    assert other_optimizer.param_groups[0]["lr"] == 0.1
    for each in ((model, optimizer), (other, other_optimizer)):
        take_steps(*each, num_steps=2)
    assert all_bits(other.state_dict()) == all_bits(model.state_dict())


def test_weights_alone_and_values_of_the_state_that_are_no_tensors(tmp_path):
    source = MemorySource({"w": torch.arange(6.0).view(2, 3)})
    export_dcp(source, tmp_path / "weights")
    nested = {"model": {"w": torch.zeros(2, 3)}}
    load_dcp(nested, tmp_path / "weights")
    assert torch.equal(nested["model"]["w"], torch.arange(6.0).view(2, 3))
    group = {"params": ["w"], "lr": 0.25}
    source.optimizer = OptimizerInfo("Own", (group,), {"w": {"step": 12, "name": "x"}})
    export_dcp(source, tmp_path / "both")
    wanted = {
        "optim": {
            "state": {"w": {"step": 0, "name": ""}},
            "param_groups": [{"params": ["?"], "lr": 0.0}],
        }
    }
    load_dcp(wanted, tmp_path / "both")
    assert wanted["optim"] == {"state": {"w": {"step": 12, "name": "x"}}, "param_groups": [group]}


def test_a_failure_inside_torch_is_an_error_of_ours_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", full)
    with pytest.raises(CheckpointError, match="No space left"):
        export_dcp(MemorySource({"w": torch.ones(2)}), tmp_path / "out")
    assert os.listdir(tmp_path) == []

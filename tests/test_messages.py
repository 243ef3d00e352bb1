"""Slips that people make, read as they read them: what was expected, what came, what to do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import shardwise
from models import Block
from ranks import HANG_S
from shardwise.config import PRECISIONS, Precision, Schedule, Units, resolve_config
from shardwise.engine.api import engine_of
from shardwise.errors import ConfigError
from shardwise.plan.accounting import Accounting
from shardwise.plan.candidate import Candidate
from shardwise.plan.request import PlanRequest
from shardwise.train.config import TrainConfig, load_config

SOURCES = Path(__file__).parents[1] / "src"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block(4) for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


SAME = {
    "fp32": ["fp32", "float32", "float", torch.float32, torch.float],
    "bf16": ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16, "BF16"],
    "fp16": ["fp16", "float16", "half", torch.float16, torch.half],
}


@pytest.mark.parametrize(("name", "said"), [(n, s) for n, all_ in SAME.items() for s in all_])
def test_a_precision_has_torchs_names_too(name, said, tmp_path):
    assert resolve_config(3, "rows", said).precision == PRECISIONS[name]
    assert Candidate(precision=said).precision == Accounting(1, 2, precision=said).precision == name
    text = str(said)
    path = tmp_path / "run.yaml"
    path.write_text(f"precision: {text}\n")
    ours = load_config(path, {})
    assert ours == load_config(None, {"precision": text}) == TrainConfig(precision=name)
    assert PlanRequest.model_validate({"precision": text}).precision == name
    # beside a file that says the same in our words
    other = tmp_path / "ds.json"
    assert load_config(path, {}, (other, {"precision": name})).precision == name


def names(model):
    return [unit.name for unit in engine_of(model).units]


def test_one_unit_may_stand_alone_and_a_list_of_modules_for_its_own():
    blocks = ["", "layers.0", "layers.1"]
    for units in ("Block", Block, ["Block"], {Block}, (kind for kind in [Block])):
        assert names(shardwise.shard(Net(), units=units)) == blocks
    cases = [
        (lambda model: model.layers, blocks),
        (lambda model: model.layers[1], ["", "layers.1"]),
        (lambda model: model.head, ["", "head"]),
        (lambda model: nn.ModuleDict({"any": model.head}), ["", "head"]),
        (lambda model: [], [""]),
    ]
    for choose, expected in cases:
        model = Net()
        assert names(shardwise.shard(model, units=choose(model))) == expected


def sharded():
    return shardwise.shard(Net())


SLIPS = [
    (lambda: shardwise.shard("x"), "model: expected a torch.nn.Module, got 'x', which is of type"),
    (lambda: shardwise.shard(None), "model: expected a torch.nn.Module, got None"),
    (lambda: shardwise.shard(Net), "got the class Net; make one of it: Net(...)"),
    (lambda: shardwise.shard(nn.parallel.DistributedDataParallel(Net())), "which is its .module"),
    (lambda: shardwise.shard(sharded().layers[0]), "'up.weight' is sharded already, with a"),
    (lambda: shardwise.shard(Net(), units="block"), "block matches no module; did you mean Block?"),
    (lambda: shardwise.shard(Net(), units=5), "units=5: expected module classes, their names, or"),
    (lambda: shardwise.shard(Net(), units=[5]), "units: expected module classes, their names, or"),
    (lambda: shardwise.shard(Net(), precision="bf-16"), "did you mean 'bf16'?"),
    (lambda: shardwise.shard(Net(), precision=torch.int8), "precision=torch.int8: expected one of"),
    (
        lambda: Precision("bf16", gather="int8"),
        "'bf16' means Precision(torch.bfloat16, torch.float32, torch.float32)",
    ),
    (lambda: Precision(gather="int7"), "precision.gather='int7': expected 'int8', 'fp8', 'int4'"),
    (lambda: shardwise.shard(Net(), stage="3"), "stage='3': expected 0, 1, 2 or 3"),
    (lambda: Schedule(prefetch_bytes="1GB"), "expected 0 (blocking) or more bytes"),
    (lambda: Schedule(bucket_bytes=None), "bucket_bytes=None: expected 0 (each"),
    (lambda: shardwise.shard(Net(), mesh=(1, 1)), "mesh=(1, 1): expected shardwise.Axes(), a Dev"),
    (lambda: Units(init=5), "init=5: expected a function that takes a module"),
    (lambda: shardwise.debug.stats("x"), "model: expected a torch.nn.Module, got 'x'"),
    (lambda: shardwise.fully_shard("x"), "model: expected a torch.nn.Module, got 'x'"),
    (lambda: shardwise.fully_shard(Net), "got the class Net"),
    (lambda: shardwise.fully_shard([]), "or a list of some, got an empty list"),
    (
        lambda: shardwise.fully_shard(Net(), mp_policy=torch.bfloat16),
        "mp_policy=torch.bfloat16: expected torch's MixedPrecisionPolicy",
    ),
    (lambda: shardwise.fully_shard(Net(), mesh=8), "mesh=8: expected shardwise.Axes, torch's Dev"),
    (lambda: shardwise.fully_shard(Net(), offload_policy="cpu"), "torch's OffloadPolicy or None"),
]


@pytest.mark.parametrize(("slip", "said"), SLIPS, ids=[said[:40] for _, said in SLIPS])
def test_a_slip_is_answered_with_what_was_expected(slip, said):
    with pytest.raises(ConfigError) as refused:
        slip()
    assert said in str(refused.value)


def test_a_parameter_of_a_class_that_does_not_say_how_it_is_gathered_is_named():
    for shard in (shardwise.shard, shardwise.fully_shard):
        model = Net()
        plain = model.head.weight.detach()
        model.head.weight = nn.Parameter(TwoTensor(plain, plain), requires_grad=False)
        with pytest.raises(ConfigError, match=r"'head.weight' is a TwoTensor, a class that wraps"):
            shard(model)


class Int8Params(nn.Parameter):
    """The class name of LLM.int8's weights, in bitsandbytes."""


def test_a_weight_of_llm_int8_is_refused_by_name():
    for shard in (shardwise.shard, shardwise.fully_shard):
        model = Net()
        weight = Int8Params(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False)
        model.head.weight = weight
        with pytest.raises(ConfigError, match=r"'head.weight' is an Int8Params.*Linear4bit"):
            shard(model)
        assert model.head.weight is weight


def test_no_precision_keeps_each_parameters_dtype():
    model = Net().bfloat16()
    shardwise.shard(model, precision=None)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_slip_on_the_command_line_is_answered_without_torch(tmp_path):
    """All of them in one process: what is imported once stays, so none may import torch."""
    (tmp_path / "typo.yaml").write_text("stge: 1\n")
    (tmp_path / "typo.json").write_text('{"zero_optimization": {"stge": 3}}')
    lines = {
        "trian": "Did you mean 'train'?",
        "train --staeg 3": "No such option: --staeg",
        "train --ranks 2 --dp-replicate 3": "dp_replicate=3 does not divide 2 ranks",
        "train --stage 9": "flag --stage: stage: expected 0, 1, 2 or 3, got 9",
        "train --precision bfloat": "precision: expected 'fp32', 'bf16' or 'fp16', got 'bfloat'",
        "train typo.yaml": "typo.yaml: unknown key 'stge'; did you mean 'stage'?",
        "train gone.yaml": "gone.yaml: cannot be read: No such file or directory",
        "train --deepspeed typo.json": "'zero_optimization.stge'; did you mean 'stage'?",
        "train --data gone.txt": "expected a text file or a folder of text, found none at gone",
        "train --tokenizer gone.json": "tokenizer: gone.json cannot be read",
        "convert gone.json": "gone.json: cannot be read",
        "convert typo.json --too": "No such option: --too",
        "report gone": "gone: no observed run, as there is no gone/observed/run.json",
        "top gone --onc": "No such option: --onc",
        "ckpt verfy x": "Did you mean 'verify'?",
        "ckpt verify gone": "gone",
        "ckpt export gone there": "gone",
        "ckpt import gone there": "'gone' does not exist",
        "plan --staeg 3": "No such option: --staeg",
        "plan lama-3-8b": "no preset 'lama-3-8b'; did you mean 'llama-3-8b'",
        "plan gone.json": "gone.json: cannot be read",
        "plan gone.py:make": "gone.py: cannot be read",
        "plan llama-3-8b --gpu h10": "accelerator 'h10' is not in the catalogue",
        "plan llama-3-8b --deepspeed typo.json": "did you mean 'stage'?",
        "simulate llama-3-8b --sweep a": "sweep: expected a valid integer",
        "doctor gone": "gone: there is no such folder",
        "explain SW99": "'SW99' is not the code of a finding",
        "bench --calibrat": "No such option: --calibrat",
        "bench --output gone/x": "there is no folder gone",
    }
    code = (
        "import contextlib, io, json, sys\n"
        "from shardwise.cli.main import app\n"
        "found = {}\n"
        "for line in json.loads(sys.argv[1]):\n"
        "    said = io.StringIO()\n"
        "    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):\n"
        "        try:\n"
        "            app(line.split())\n"
        "        except SystemExit as ended:\n"
        "            code = ended.code\n"
        "    found[line] = [code, said.getvalue(), 'torch' in sys.modules]\n"
        "print(json.dumps(found))\n"
    )
    path = os.pathsep.join([str(SOURCES), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, "-c", code, json.dumps(list(lines))],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
        timeout=HANG_S,
        check=True,
    )
    for line, (exit_code, said, has_torch) in json.loads(ran.stdout).items():
        assert (lines[line] in said, has_torch) == (True, False), (line, said)
        assert exit_code in (1, 2), line

"""Cells of the memory matrix: a model as it is planned, and the same model on real ranks.

Imported by the test of the matrix and by ``benchmarks/predicted_memory.py``.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from shardwise.plan.candidate import Candidate
from shardwise.plan.model.models import TracedModel, huggingface_source, module_source
from shardwise.plan.step.play import play
from shardwise.train.config import TrainConfig
from shardwise.train.decoder import Decoder
from step_counts import measure, planned_counts

SEQ = 128
VOCAB = 2048
LLAMA_LIKE = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": LLAMA_LIKE,
    "qwen3": LLAMA_LIKE,
    "gemma": LLAMA_LIKE | {"hidden_activation": "gelu_pytorch_tanh"},
    "mistral": LLAMA_LIKE | {"sliding_window": 64},
    "gpt2": {
        "vocab_size": VOCAB,
        "n_embd": 256,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "loss_type": "ForCausalLM",
    },
}
MODELS = ("decoder", *CONFIGS)


@dataclass(frozen=True)
class Cell:
    """One setting that is predicted and measured."""

    model: str
    stage: int
    checkpointed: bool
    precision: str = "fp32"
    micro_batch: int = 2

    def candidate(self, num_ranks):
        return Candidate(
            stage=self.stage,
            num_shards=num_ranks,
            precision=self.precision,
            micro_batch=self.micro_batch,
            activation_checkpointing="full" if self.checkpointed else "none",
            transport="point_to_point",
        )


def cells_of(model, precision="fp32"):
    """Return all cells of a model."""
    return [
        Cell(model, stage, checkpointed, precision)
        for checkpointed in (False, True)
        for stage in (0, 1, 2, 3)
    ]


def build_decoder(checkpointed):
    sizes = {"dim": 256, "layers": 3, "heads": 4, "kv_heads": 2, "seq": SEQ}
    return Decoder(TrainConfig(**sizes, activation_checkpointing=checkpointed), VOCAB)


# -- predicted
@cache
def planned(model):
    """Return the tapes of a model, as `shardwise plan` gets them."""
    if model == "decoder":
        return TracedModel(module_source(model, build_decoder, SEQ))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps({"model_type": model, **CONFIGS[model]}))
        return TracedModel(huggingface_source(path), SEQ)


def predict(cell, num_ranks):
    """Trace and play; return what `measure` counts, and all else."""
    candidate = cell.candidate(num_ranks)
    played = play(planned(cell.model).tape(candidate), candidate)
    return planned_counts(played, candidate), played


# -- measured, in the ranks
def build(cell):
    """Return the plain model with weights, and what runs a new batch through it."""
    shape = (cell.micro_batch, SEQ)
    if cell.model == "decoder":
        targets = torch.zeros(shape, dtype=torch.int64)
        return build_decoder(cell.checkpointed), lambda m: m(torch.zeros_like(targets), targets)
    with warnings.catch_warnings():  # importing model classes pulls in packages that warn
        warnings.simplefilter("ignore")
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM

        settings = {**CONFIGS[cell.model], "use_cache": False}
        config = CONFIG_MAPPING[cell.model].from_dict(settings)
        options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
        model = AutoModelForCausalLM.from_config(config, **options)
    if cell.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def loss_of(model):
        ids = torch.zeros(shape, dtype=torch.int64)
        return model(input_ids=ids, labels=ids).loss

    return model.train(), loss_of


def measure_cell(cell, num_ranks, traces=True):
    """Return the counts of the second step, and its peak by the allocator's own trace, if any."""
    plain, loss_of = build(cell)
    counts = measure(plain, loss_of, cell.candidate(num_ranks), traces=traces)
    counts.pop("rest", None)
    return counts


def measure_all(rank, num_ranks, cells):
    """Return what this rank measures in each cell; a peak on rank 0 alone."""
    return [measure_cell(cell, num_ranks, traces=rank == 0) for cell in cells]

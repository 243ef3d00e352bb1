"""A checkpoint in memory for tests, which counts what is read of it."""

import os

import torch

from shardwise.checkpoint.container import dtype_name
from shardwise.checkpoint.source import OptimizerInfo, TensorInfo


class MemorySource:
    """A `Source` of given tensors; they are read in the order in which they were added."""

    def __init__(self, params=None, *, tied=None, optimizer=None):
        self.where = "memory"
        self.tensors = []
        self.step = None
        self.optimizer = optimizer
        self.extra = {}
        self.left_out = []
        self.tied = dict(tied or {})
        self.largest_read_bytes = 0
        self.total_read_bytes = 0
        self._data = {}
        for name, tensor in (params or {}).items():
            self.add("param", name, tensor)

    def add(self, kind, name, tensor, state=""):
        dtype = dtype_name(tensor.dtype, name)
        info = TensorInfo(kind, name, dtype, tuple(tensor.shape), state)
        self.tensors.append(info)
        self._data[info.key] = tensor.detach().flatten()

    def read(self, tensor, lo, hi):
        piece = self._data[tensor.key][lo:hi].clone()
        self.largest_read_bytes = max(self.largest_read_bytes, piece.nbytes)
        self.total_read_bytes += piece.nbytes
        return piece


def source_of(model, optimizer=None, values=None):
    """Describe a plain model as other formats would, with an optimizer also the rest of its state.

    ``values`` are those of the optimizer's state that are no tensors.
    """
    params = dict(model.named_parameters())
    names = {id(p): name for name, p in params.items()}
    everywhere = model.named_parameters(remove_duplicate=False)
    tied = {name: names[id(p)] for name, p in everywhere if name not in params}
    source = MemorySource(params, tied=tied)
    if optimizer is None:
        return source
    groups = tuple(
        {**group, "params": [names[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    )
    source.optimizer = OptimizerInfo("AdamW", groups, values or {})
    for name, buffer in model.named_buffers():
        if name in model.state_dict():
            source.add("buffer", name, buffer)
    for param, state in optimizer.state.items():
        for key, value in state.items():
            source.add("optimizer", names[id(param)], value, key)
    return source


def whole_tensors(source):
    return {t.key: source.read(t, 0, t.numel).view(t.shape) for t in source.tensors}


def infos_of(source):
    """Return the tensors by (name, state); each is there once."""
    infos = {(info.name, info.state): info for info in source.tensors}
    assert len(infos) == len(source.tensors)
    return infos


def check_slices(source, info, expected):
    flat = expected.reshape(-1)
    assert info.shape == tuple(expected.shape)
    for lo in range(0, flat.numel() + 1, 3):
        for hi in {lo, min(lo + 4, flat.numel()), flat.numel()}:
            got = source.read(info, lo, hi)
            assert got.dtype == expected.dtype
            assert torch.equal(got, flat[lo:hi]), (info, lo, hi)


class Command:
    """Runs a shell command when it is unpickled."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def bits(tensor):
    flat = tensor.detach().flatten()
    return tensor.dtype, tensor.shape, flat.view(torch.uint8).numpy().tobytes()


def all_bits(tensors):
    return {name: bits(tensor) for name, tensor in tensors.items()}


def odd_tensors():
    """Many dtypes and shapes; small elements first, so that offsets would not be aligned."""
    nan = torch.tensor([float("nan"), -0.0, float("inf")])
    return {
        "flag": torch.tensor([True, False, True]),
        "byte": torch.arange(5, dtype=torch.uint8),
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(-2.5),
        "count": torch.tensor(2**40 + 1),
        "half": torch.randn(3, 5).half(),
        "brain": torch.randn(7, 2, 3).bfloat16(),
        "plain": torch.randn(11, 4),
        "double": torch.randn(2).double(),
        "odd": nan,
        "wave": torch.randn(3, dtype=torch.complex64),
        "eight": torch.randn(9).to(torch.float8_e4m3fn),
    }

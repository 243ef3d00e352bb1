"""Values as JSON: every type and every bit comes back, and hostile JSON is refused."""

import json
import math
import os
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor

from ranks import on_ranks
from shardwise.checkpoint.values import decode, encode
from shardwise.errors import CheckpointError
from shardwise.strict_json import dumps, loads

NUMPY_DTYPES = [
    *("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"),
    *(">i4", ">f8", ">c16"),
]


def same(one, other):
    """Compare types and bits; nan equals nan of the same bits, and 0.0 is not -0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.generic | np.ndarray):
        shapes = one.dtype.str == other.dtype.str and one.shape == other.shape
        return shapes and one.tobytes() == other.tobytes()
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, dict):
        factories = [getattr(x, "default_factory", None) for x in (one, other)]
        parts = [[*x.keys(), *x.values()] for x in (one, other)]
        return factories[0] is factories[1] and same(*parts)
    if isinstance(one, set | frozenset):
        left = list(other)
        for member in one:
            twin = next((i for i, found in enumerate(left) if same(member, found)), None)
            if twin is None:
                return False
            del left[twin]
        return not left
    if isinstance(one, list | tuple | deque):
        if getattr(one, "maxlen", None) != getattr(other, "maxlen", None):
            return False
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def there_and_back(value):
    encoded, tensors = encode(value, "extra")
    return decode(loads(dumps(encoded), "manifest.json"), tensors.__getitem__)


def numpy_arrays(name):
    dtype = np.dtype(name)
    shapes = st.lists(st.integers(0, 3), max_size=3)

    def build(shape):
        size = math.prod(shape) * dtype.itemsize
        raw = st.binary(min_size=size, max_size=size)
        if dtype.kind == "b":
            raw = raw.map(lambda data: bytes(byte & 1 for byte in data))
        return raw.map(lambda data: np.frombuffer(data, dtype).reshape(shape))

    return shapes.flatmap(build)


floats = st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("d", struct.pack("Q", bits))[0])
any_float = st.one_of(floats, st.floats())
halves = st.text(st.sampled_from("a\ud800\udfff\U0001f600"), max_size=3)  # of characters
texts = st.one_of(st.text(), halves)
arrays = st.sampled_from(NUMPY_DTYPES).flatmap(numpy_arrays)
scalars = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.integers(-(2**70), 2**70), any_float, texts),
    *(st.binary(max_size=9), st.builds(complex, any_float, any_float)),
    *(
        st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e5m2, torch.bool]),
        st.sampled_from([torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")]),
        st.lists(st.integers(0, 2**40), max_size=3).map(torch.Size),
    ),
)
keys = st.recursive(
    st.one_of(
        *(texts, st.integers(), any_float, st.booleans(), st.none(), st.just("$")),
        st.sampled_from([torch.float32, frozenset({1, ("a",)}), b"$", 1 + 2j]),
    ),
    lambda inner: st.lists(inner, max_size=2).map(tuple),
    max_leaves=4,
)
tensors = st.sampled_from(
    [torch.arange(6.0).reshape(2, 3), torch.tensor(3, dtype=torch.int8), torch.empty(0)]
)


def containers(inner):
    dicts = st.dictionaries(keys, inner, max_size=3)
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(deque),
        st.lists(inner, max_size=3).map(lambda members: deque(members, maxlen=2)),
        st.sets(keys, max_size=3),
        st.frozensets(keys, max_size=3),
        st.dictionaries(texts, inner, max_size=3),
        dicts,
        dicts.map(OrderedDict),
        dicts.map(Counter),
        st.builds(defaultdict, st.sampled_from([None, int, list, dict, set]), dicts),
    )


values = st.recursive(
    st.one_of(scalars, arrays, arrays.filter(lambda a: a.ndim == 0).map(lambda a: a[()]), tensors),
    containers,
    max_leaves=12,
)


@settings(max_examples=200)
@given(values)
def test_every_value_comes_back_with_its_type_and_its_bits(value):
    assert same(there_and_back(value), value)


ODD_NAME = os.fsdecode(b"a\xff")  # of a file, no utf-8
ODD_NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF8DEADBEEF0001))[0]
ODD_VALUES = [
    *({"n": n, n: 0} for n in (10**5000, -(10**5000), 2**63, 2**64, -(2**63) - 1)),
    *({ODD_NAME: [ODD_NAME, torch.ones(1)]}, [ODD_NAN]),
    *({"$": "tuple", "of": [1]}, {"$": "dict", "keys": [], "values": []}, {"$": None}),
    # Two tensors never share a place.
    {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, 1: torch.ones(2), "1": torch.ones(3)},
]


@pytest.mark.parametrize("value", ODD_VALUES, ids=range(len(ODD_VALUES)))
def test_what_could_be_taken_for_something_else_comes_back(value):
    assert same(there_and_back(value), value)


def test_what_json_can_say_stays_readable():
    state = {"last_epoch": 3, "base_lrs": [1e-3, -0.0], "name": "süß", "best": None, "on": True}
    encoded, _ = encode({"scheduler": state}, "extra")
    assert encoded == {"scheduler": state}
    assert dumps(encoded).decode() == (
        '{"scheduler":{"last_epoch":3,"base_lrs":[0.001,-0.0],"name":"süß","best":null,"on":true}}'
    )


def test_the_bytes_of_a_set_do_not_depend_on_the_process():
    encoded, _ = encode({"b", "a", "c"}, "extra")
    assert encoded == {"$": "set", "of": ["a", "b", "c"]}


def test_tensors_are_handed_out_by_their_place():
    value = {
        "scheduler": {"base": [torch.ones(2, requires_grad=True)]},
        5: (torch.zeros(1), {"exp_avg": torch.ones(3)}),
    }
    encoded, found = encode(value, "extra")
    assert list(found) == ["scheduler.base.0", "5.0", "5.1.exp_avg"]
    assert not any(tensor.requires_grad for tensor in found.values())
    assert encoded["values"][0]["base"][0] == {"$": "tensor", "of": "scheduler.base.0"}


def test_a_tensor_that_is_saved_is_not_copied():
    tensor = torch.zeros(3)
    _, found = encode([tensor], "extra")
    assert found["0"].data_ptr() == tensor.data_ptr()


def test_an_array_that_was_read_can_be_written_to():
    array = there_and_back(np.zeros((2, 3)))
    array += 1
    assert array.sum() == 6


def test_the_state_of_real_schedulers_and_generators_comes_back():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=9),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5]),
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    ]
    state = {
        "schedulers": [s.state_dict() for s in schedulers],
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "groups": optimizer.state_dict()["param_groups"],
        "numpy": [kind(3).state for kind in (np.random.PCG64, np.random.MT19937, np.random.Philox)],
        "torch": torch.Generator().get_state(),
    }
    assert same(there_and_back(state), state)


class Thing:
    """An object with state."""


Pair = namedtuple("Pair", "one two")


@pytest.mark.parametrize(
    ("bad", "parts"),
    [
        (lambda step: step, ["function", "state_dict()"]),
        (Thing(), ["Thing", "state_dict()"]),
        (Thing, ["type"]),
        (Pair(1, 2), ["Pair"]),
        (partial(int), ["partial"]),
        (torch.Generator(), ["Generator"]),
        (nn.Parameter(torch.ones(1)), ["Parameter", "detach()"]),
        (torch.ones(2).to_sparse(), ["sparse"]),
        (torch.ones(2, device="meta"), ["meta"]),
        (torch.qint8, ["qint8", "text"]),
        (defaultdict(lambda: 0), ["default_factory", "dict(...)"]),
        ({torch.ones(1): 1}, ["a tensor cannot be a key"]),
        ({(1, Thing()): 1}, ["a key or member of", "Thing"]),
        (np.array(["text"]), ["numpy", "plain numbers"]),
        (np.array([None]), ["numpy", "plain numbers"]),
        (np.zeros(2, np.longdouble), ["numpy", "plain numbers"]),
        (np.ma.masked_array([1]), ["MaskedArray"]),
        (np.zeros(200_000), ["1600000 bytes", "torch.from_numpy"]),
    ],
)
def test_what_is_no_data_is_refused_with_its_place_and_a_remedy(bad, parts):
    with pytest.raises(CheckpointError) as caught:
        encode({"scheduler": {"lr_lambdas": [bad]}}, "extra")
    for part in ["extra['scheduler']['lr_lambdas'][0]", *parts]:
        assert part in str(caught.value)


@on_ranks(1)
def test_a_shard_is_refused_and_belongs_into_the_model():
    ema = distribute_tensor(torch.ones(4), DeviceMesh("cpu", [0]), [Replicate()])
    with pytest.raises(CheckpointError, match=r"^extra\['ema'\]: it is a shard.*put parameters"):
        encode({"ema": ema}, "extra")


def cyclic(kind):
    value = {} if kind == "dict" else []
    if kind == "dict":
        value["self"] = (value,)
    else:
        value.append({"up": value})
    return value


@pytest.mark.parametrize("kind", ["dict", "list"])
def test_a_cycle_is_refused_and_a_shared_part_is_not(kind):
    with pytest.raises(CheckpointError, match="contains itself"):
        encode(cyclic(kind), "extra")
    shared = [1]
    assert there_and_back([shared, shared]) == [[1], [1]]


def nested(depth, wrap):
    value = 0
    for _ in range(depth):
        value = wrap(value)
    return value


WRAPS = [
    lambda value: [value],
    lambda value: (value,),
    lambda value: {"a": value},
    lambda value: {1: value},
    lambda value: frozenset({value}),
]


@pytest.mark.parametrize("wrap", WRAPS)
def test_what_is_deep_is_refused_before_it_is_written_or_comes_back(wrap):
    refused = []
    for depth in range(70):
        value = nested(depth, wrap)
        try:
            encoded, found = encode(value, "extra")
        except CheckpointError as error:
            assert "levels deep" in str(error)
            refused.append(depth)
            continue
        wrapped = loads(dumps({"extra": {"of": [encoded]}}), "manifest.json")
        assert same(decode(wrapped["extra"]["of"][0], found.__getitem__), value)
    assert refused and refused == list(range(refused[0], 70)) and refused[0] > 12


def test_a_value_of_a_thousand_levels_is_refused():
    with pytest.raises(CheckpointError, match="levels deep"):
        encode(nested(5000, lambda value: [value]), "extra")
    with pytest.raises(CheckpointError, match="nested deeper"):
        decode(nested(500, lambda value: [value]), lambda place: torch.ones(1))


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"[" * 1_000_000, "nested deeper than 64"),
        (b'{"a":' * 200_000, "nested deeper than 64"),
        (b"[" * 65 + b"]" * 65, "nested deeper than 64"),
        (b'{"a": 1, "b": 2, "a": 1}', "'a' is given twice"),
        (b'{"a": 1, "\\u0061": 1}', "'a' is given twice"),
        (b"[NaN]", "NaN"),
        (b"[-Infinity]", "Infinity"),
        (b"[1e999]", "not finite"),
        (b"9" * 4301, "4301 digits"),
        (b"9" * 1_000_000, "1000000 digits"),
        (b'["\xff"]', "utf-8"),
        (b'["\\ud800"]', "utf-8"),
        (b'"' + b'\\"' * 500_000, "Unterminated"),
        (b"", "Expecting value"),
        (b"1 2", "Extra data"),
        (b"\xef\xbb\xbf1", "BOM"),
        (b"[1,]", "Expecting value"),
    ],
    ids=range(17),
)
def test_what_is_not_strict_json_is_refused_and_the_file_is_named(data, part):
    with pytest.raises(CheckpointError, match="manifest") as caught:
        loads(data, "manifest.json")
    assert part in str(caught.value)
    assert len(str(caught.value)) < 400


def test_json_at_the_limits_is_read():
    assert loads(b"9" * 4300, "m") == int("9" * 4300)
    assert loads(b"[" * 64 + b"]" * 64, "m") == nested(63, lambda value: [value] if value else [[]])
    assert loads(b'["' + b"[" * 500 + b'\\"' + b"[" * 500 + b'"]', "m")
    assert loads(b'["\\ud83d\\ude00"]', "m") == ["\U0001f600"]


@settings(max_examples=150)
@given(st.one_of(st.binary(max_size=30), st.text('[]{}",\\:019.eE-+truflsn \n', max_size=30)))
def test_reading_any_bytes_gives_a_value_or_a_checkpoint_error(data):
    raw = data if isinstance(data, bytes) else data.encode()
    try:
        value = loads(raw, "m")
    except CheckpointError:
        return
    assert value == json.loads(raw)


HOSTILE = [
    {"$": "os.system", "of": "true"},
    {"$": ["tuple"], "of": []},
    {"$": None},
    {"$": "tuple"},
    {"$": "tuple", "of": 3},
    {"$": "tuple", "of": "ab"},
    {"$": "tuple", "of": [], "more": 1},
    {"$": "tuple", "of": [], "self": 1},
    {"$": "set", "of": [[1]]},
    {"$": "set", "of": [1, True]},
    {"$": "deque", "of": [1, 2], "maxlen": 1},
    {"$": "deque", "of": [], "maxlen": -1},
    {"$": "deque", "of": [], "maxlen": 10**30},
    {"$": "deque", "of": [], "maxlen": True},
    {"$": "dict", "keys": [1, 1], "values": [1, 2]},
    {"$": "dict", "keys": [1], "values": []},
    {"$": "dict", "keys": [{}], "values": [1]},
    {"$": "dict", "keys": {}, "values": []},
    {"$": "defaultdict", "keys": [], "values": [], "factory": "eval"},
    {"$": "defaultdict", "keys": [], "values": [], "factory": None},
    {"$": "int", "of": "0x"},
    {"$": "int", "of": "1_0"},
    {"$": "int", "of": 1},
    {"$": "float", "of": "00"},
    {"$": "float", "of": 1.0},
    {"$": "complex", "of": "00" * 8},
    {"$": "bytes", "of": "a"},
    {"$": "bytes", "of": "a$=="},
    {"$": "bytes", "of": "é"},
    {"$": "str", "of": "/w=="},
    {"$": "torch.dtype", "of": "Tensor"},
    {"$": "torch.device", "of": "cpu:x"},
    {"$": "torch.device", "of": "nosuch"},
    {"$": "torch.device", "of": "cuda:999"},
    {"$": "torch.Size", "of": [-1]},
    {"$": "torch.Size", "of": [2**63]},
    {"$": "torch.Size", "of": [1.0]},
    {"$": "numpy.scalar", "dtype": "object", "of": ""},
    {"$": "numpy.scalar", "dtype": "<f8", "of": ""},
    {"$": "numpy.array", "dtype": "<f8", "shape": [2], "of": "AAAAAAAAAAA="},
    {"$": "numpy.array", "dtype": "<f8", "shape": [0, 10**18, 10**18], "of": ""},
    {"$": "numpy.array", "dtype": "<f8", "shape": [0] * 100, "of": ""},
    {"$": "numpy.array", "dtype": "|b1", "shape": [1], "of": "Ag=="},
    {"$": "numpy.array", "dtype": ["<f8"], "shape": [], "of": ""},
    {"$": "tensor", "of": 1},
    {"$": "tensor", "of": "no.such"},
    {"$": "tensor"},
    (1,),
    object(),
]


@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
def test_a_tag_that_was_not_written_here_is_refused_with_its_place(value):
    with pytest.raises(CheckpointError, match=r"extra\['a'\]\[0\]: ") as caught:
        decode({"a": [value]}, {}.__getitem__, "extra")
    assert len(str(caught.value)) < 500


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["$", "of", "keys", "values", "dtype"]), inner, max_size=4),
        st.fixed_dictionaries(
            {"$": st.sampled_from([tag["$"] for tag in HOSTILE[1:45] if isinstance(tag, dict)])},
            optional={
                "of": inner,
                "keys": st.lists(inner, max_size=2),
                "values": st.lists(inner, max_size=2),
                "dtype": st.sampled_from(["<f8", "|b1", "|O", ""]),
                "shape": st.lists(st.integers(-1, 2**64), max_size=3),
                "maxlen": st.one_of(st.none(), st.integers()),
                "factory": st.sampled_from(["list", "none", "eval"]),
            },
        ),
    ),
    max_leaves=8,
)


@settings(max_examples=200)
@given(json_values)
def test_decoding_any_json_gives_what_can_be_saved_or_a_checkpoint_error(value):
    try:
        decoded = decode(value, lambda place: torch.ones(2))
    except CheckpointError:
        return
    assert same(there_and_back(decoded), decoded)

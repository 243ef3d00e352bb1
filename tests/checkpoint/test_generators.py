"""Random generators: what they draw after being set is what they drew after being read."""

import base64
import hashlib
import json
import random

import numpy as np
import pytest
import torch

from shardwise.checkpoint.generators import derive_generators, read_generators, set_generators
from shardwise.errors import CheckpointError
from shardwise.strict_json import dumps, loads

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_generators():
    """Leave the generators of the test process as they were."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    yield
    torch.set_rng_state(before[0]), np.random.set_state(before[1]), random.setstate(before[2])


def draw():
    """Draw from everything that has a state; an odd count of gaussians leaves one half used."""
    parts = [
        *(torch.rand(5).tolist(), torch.randn(3).tolist(), torch.randn(40).tolist()),
        *(torch.randn(3, dtype=torch.float64).tolist(), torch.randperm(7).tolist()),
        *(np.random.rand(3).tolist(), np.random.randn(3).tolist(), np.random.permutation(7)),
        *(random.random(), random.gauss(0, 1), random.sample(range(99), 5)),
    ]
    return hashlib.sha256(str(parts).encode()).hexdigest()


def scramble():
    torch.manual_seed(99), np.random.seed(99), random.seed(99)


@pytest.mark.parametrize("num_draws", [0, 1, 2, 7, 300])
def test_draws_go_on_to_the_bit(num_draws):
    for _ in range(num_draws):
        draw()
    saved = loads(dumps(read_generators(CPU)), "manifest.json")
    expected = [draw() for _ in range(200)]
    scramble()
    set_generators(saved, CPU)
    assert [draw() for _ in range(200)] == expected


def test_reading_draws_nothing():
    saved = read_generators(CPU)
    assert read_generators(CPU) == saved
    expected = draw()
    set_generators(saved, CPU)
    read_generators(CPU)
    assert draw() == expected


def changed(value, part, edit):
    """Edit the bytes of one state."""
    data = bytearray(base64.b64decode(value[part]))
    return value | {part: base64.b64encode(edit(data)).decode()}


def with_word(place, word):
    return lambda data: data[:place] + word.to_bytes(4, "little") + data[place + 4 :]


@pytest.mark.parametrize(
    ("part", "edit"),
    [
        ("torch", lambda data: data[:-1]),
        ("torch", lambda data: data + b"\0"),
        ("torch", lambda data: b""),
        ("torch", lambda data: bytes(b ^ 0xFF for b in data)),
        ("numpy", lambda data: data[:-1]),
        ("numpy", lambda data: data + b"\0"),
        ("numpy", with_word(4 * 624, 625)),
        ("numpy", with_word(4 * 625, 2)),
        ("numpy", lambda data: data[:-8] + b"\0\0\0\0\0\0\xf8\x7f"),
        ("python", lambda data: data[:-1]),
        ("python", with_word(4 * 624, 625)),
        ("python", with_word(4 * 625, 7)),
    ],
)
def test_a_bad_part_is_named_and_nothing_is_changed(part, edit):
    saved = read_generators(CPU)
    scramble()
    before = read_generators(CPU)
    bad = changed(saved, part, edit)
    for call in (set_generators, lambda value, device: derive_generators(value, 1, device)):
        with pytest.raises(CheckpointError, match=f"the {part} generator"):
            call(bad, CPU)
        assert read_generators(CPU) == before


MORE = dict.fromkeys(("torch", "accelerator", "numpy", "python", "more"), "")


@pytest.mark.parametrize("value", [None, [], "x", {}, {"torch": ""}, {1: 2}, MORE])
def test_what_is_no_state_of_generators_is_refused(value):
    with pytest.raises(CheckpointError, match="generators: expected the states"):
        set_generators(value, CPU)


@pytest.mark.parametrize("part", ["torch", "accelerator", "numpy", "python"])
@pytest.mark.parametrize("wrong", [3, [1], "é", "a$==", {}])
def test_a_part_that_is_no_base64_is_refused(part, wrong):
    with pytest.raises(CheckpointError, match=f"the {part} generator"):
        set_generators(read_generators(CPU) | {part: wrong}, CPU)


def test_another_generator_of_numpy_is_refused_when_it_is_read():
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        with pytest.raises(CheckpointError, match="MT19937, got PCG64"):
            read_generators(CPU)
    finally:
        np.random.set_bit_generator(before)


def derived(saved, rank):
    scramble()
    derive_generators(saved, rank, CPU)
    return json.dumps(read_generators(CPU))


def test_a_new_rank_draws_the_same_in_each_resume_and_as_no_other_rank():
    saved = read_generators(CPU)
    states = [derived(saved, rank) for rank in range(50)]
    assert states == [derived(saved, rank) for rank in range(50)]
    for part in ("torch", "numpy", "python"):
        assert len({json.loads(state)[part] for state in states}) == 50
    draw()
    later = [derived(read_generators(CPU), rank) for rank in range(3)]
    assert not set(states) & set(later)


def test_the_derived_streams_follow_from_every_part_of_the_saved_state():
    saved = read_generators(CPU)
    states = {derived(saved, 1)}
    for advance in (lambda: torch.rand(1), lambda: np.random.rand(), lambda: random.random()):
        set_generators(saved, CPU)
        advance()
        states.add(derived(read_generators(CPU), 1))
    assert len(states) == 4


def test_a_state_saved_beside_an_accelerator_can_go_on_without_one():
    saved = read_generators(CPU)
    expected = draw()
    scramble()
    set_generators(saved | {"accelerator": base64.b64encode(bytes(16)).decode()}, CPU)
    assert draw() == expected


@pytest.mark.gpu
def test_draws_on_the_accelerator_go_on_to_the_bit():
    gpu = torch.device("cuda", torch.cuda.current_device())
    torch.randn(5, device=gpu)
    saved = read_generators(gpu)
    expected = torch.randn(5, device=gpu).tolist()
    scramble()
    set_generators(saved, gpu)
    assert torch.randn(5, device=gpu).tolist() == expected
    with pytest.raises(CheckpointError, match="the accelerator generator"):
        set_generators(saved | {"accelerator": "AAAA"}, gpu)
    streams = []
    for value, rank in ((saved, 1), (saved, 2), (saved, 1)):
        derive_generators(value, rank, gpu)
        streams.append(torch.randn(5, device=gpu).tolist())
    assert streams[0] == streams[2] != streams[1]


@pytest.mark.gpu
def test_an_accelerator_without_a_saved_state_is_seeded_the_same_each_time():
    gpu = torch.device("cuda", torch.cuda.current_device())
    saved = read_generators(CPU)
    streams = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        set_generators(saved, gpu)
        streams.append(torch.randn(5, device=gpu).tolist())
    assert streams[0] == streams[1]

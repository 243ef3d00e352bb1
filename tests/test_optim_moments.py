"""How moments are kept: codes of 8 bits that decode and encode alike, and rounding by chance."""

from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.optim import AdamW
from shardwise.optim import codes as of_codes
from shardwise.optim.codes import Scratch, meanings, round_by_chance
from shardwise.optim.kinds import ROW
from shardwise.optim.moments import InBfloat16, InBlocks, Span, kind_of
from shardwise.optim.slices import Place

CPU = torch.device("cpu")
SIGNS = (True, False)


def decoded(codes, scales, is_signed):
    out = torch.empty(codes.numel())
    of_codes.decode(codes.view(-1), scales, is_signed, out, Scratch())
    return out.view(codes.shape)


def encode(values, is_signed):
    codes, scales = torch.empty(values.shape, dtype=torch.uint8), torch.empty(len(values))
    of_codes.encode(values.view(-1), is_signed, codes.view(-1), scales, Scratch())
    return codes, scales


def random_bits(begin, end, step, which):
    return of_codes.random_bits(begin, end, step, which, torch.empty(6 * ROW, dtype=torch.int32))


@pytest.mark.parametrize("is_signed", SIGNS)
def test_every_code_has_a_meaning_of_its_own_and_code_0_is_zero(is_signed):
    found = meanings(is_signed, CPU)
    assert found.shape == (256,) and found[0] == 0 and found.max() == 1
    assert len(found.unique()) == 256 - is_signed  # of signed ones there is one zero
    assert found.min() == (-1 if is_signed else 0)
    assert found[found > 0].min() == torch.tensor(1e-6 if is_signed else 1e-7)


@pytest.mark.parametrize("is_signed", SIGNS)
@settings(max_examples=40, deadline=None)
@given(exponent=st.floats(-99, 126), seed=st.integers(0, 9))
def test_encoding_what_was_decoded_changes_no_bit(is_signed, exponent, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (3, 256), generator=generator, dtype=torch.uint8)
    codes[0] = torch.arange(256)
    if is_signed:
        codes[codes == 128] = 0  # the code that nothing gets
    codes[:, 7] = 127 if is_signed else 255  # some element is the largest one
    scales = torch.full((3,), 2.0**exponent) * (1 + torch.rand(3, generator=generator) / 2)
    values = decoded(codes, scales, is_signed)
    again, same = encode(values, is_signed)
    assert torch.equal(again, codes) and torch.equal(same, scales)


@pytest.mark.parametrize("is_signed", SIGNS)
def test_numbers_get_the_code_that_is_nearest_to_11_bits(is_signed):
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(64, 256, generator=generator).mul(4).exp()
    values = values * torch.randn(64, 256, generator=generator).sign() if is_signed else values
    codes, scales = encode(values, is_signed)
    assert torch.equal(scales, values.abs().amax(1))
    ratios = values.double() / scales.double()[:, None]
    means = meanings(is_signed, CPU).double()
    distances = (ratios[..., None] - means).abs()
    if not is_signed:
        distances[..., 0][ratios > 2.0**-40] = inf  # which never becomes zero
    excess = distances.gather(2, codes.long()[..., None])[..., 0] - distances.amin(2)
    assert (excess <= ratios.abs() * 2.0**-10).all()


def test_a_small_square_never_becomes_zero():
    values = torch.tensor([[1.0, 1e-11, 0.0, 1e-7]]).repeat(1, 4)
    codes, scales = encode(values, is_signed=False)
    assert decoded(codes, scales, False)[0, :4].tolist() == pytest.approx([1.0, 1e-7, 0.0, 1e-7])


@pytest.mark.parametrize("is_signed", SIGNS)
@pytest.mark.parametrize("bad", [nan, inf])
def test_what_is_no_number_is_none_when_it_comes_back(bad, is_signed):
    values = torch.ones(2, 16)
    values[0, 3] = bad
    found = decoded(*encode(values, is_signed), is_signed)
    assert found[0].isnan().all() and torch.equal(found[1], values[1])


def test_a_block_of_next_to_nothing_is_zeros():
    codes, scales = encode(torch.full((1, 16), 1e-38), is_signed=True)
    assert not codes.any() and not scales.any()
    assert not decoded(codes, scales, True).any()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 300), st.integers(0, 200), st.sampled_from([16, 64]), st.integers(0, 99))
def test_blocks_that_a_slice_has_whole_are_those_of_the_whole(first, numel, block, seed):
    kind, whole = InBlocks(block), torch.randn(600, generator=torch.Generator().manual_seed(seed))
    place, like = Place(first, 600), torch.empty(numel)
    held, all_held = kind.empty(place, like), kind.empty(Place(0, 600), whole)
    assert kind.fits(held, place, like)
    kind.write(whole.clone(), all_held, Span(0, 0, 600, 1), 0, Scratch())
    end = first + numel
    for lo in range(0, numel, 150):  # spans may not divide blocks, as those of a step do not
        lo = max(0, -(-(first + lo) // block) * block - first) if lo else 0
        hi = min(numel, max(0, -(-(first + lo + 150) // block) * block - first))
        if lo < hi:
            span, part = Span(first, lo, hi, 1), whole[first + lo : first + hi]
            kind.write(part.clone(), held, span, 0, Scratch())
            error = (kind.read(held, span, 0, Scratch()) - part).abs().max()
            assert error < 0.05 * whole.abs().max()
    full = range(-(-first // block) * block, end // block * block)
    if len(full):
        inside = slice(full.start - first, full.stop - first)
        assert torch.equal(held["_codes"][inside], all_held["_codes"][full.start : full.stop])


# Rounding by chance.


def test_a_number_goes_up_as_often_as_makes_the_mean_right():
    values = torch.rand(1 << 16, generator=torch.Generator().manual_seed(0)) + 0.5
    values = torch.cat([values, -values])
    total = torch.zeros(len(values))
    for step in range(64):
        out = torch.empty(len(values), dtype=torch.bfloat16)
        round_by_chance(values.clone(), random_bits(0, len(values), step, 1), out)
        assert (out.float() - values).abs().max() < 2**-7
        total += out.float()
    error = (total / 64 - values) * values.sign()
    # An error of one rounding is at most 2^-7, spread evenly: 2^-7 / sqrt(6) at most, for one.
    deviation = 2**-7 / 6**0.5 / 64**0.5
    assert abs(error.mean()) < 5 * deviation / len(values) ** 0.5
    assert error.abs().max() < 6 * deviation


def test_what_bfloat16_has_is_not_rounded():
    values = torch.tensor([0.0, -0.0, 1.5, -3e38, inf, -inf, nan]).bfloat16()
    for step in range(50):
        out = torch.empty_like(values)
        round_by_chance(values.float(), random_bits(0, 7, step, 0), out)
        assert torch.equal(out.view(torch.int16), values.view(torch.int16))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 3 * ROW), st.integers(1, 2 * ROW), st.integers(1, 10**6), st.integers(0, 1))
def test_random_bits_depend_on_the_element_and_the_step_alone(begin, numel, step, which):
    whole = random_bits(0, 5 * ROW, step, which)
    assert torch.equal(random_bits(begin, begin + numel, step, which), whole[begin:][:numel])
    assert whole.min() >= 0 and whole.max() < 1 << 16


def test_random_bits_are_the_same_in_every_version_of_this_library():
    found = random_bits(ROW - 2, ROW + 2, 3, 0).tolist()
    assert found == [38511, 49547, 17173, 53883]


def test_the_random_bits_of_an_element_are_uniform_over_steps_and_independent():
    num_steps = 4000
    bits = [[random_bits(5, 7, s, w) for s in range(num_steps)] for w in (0, 1)]
    series = torch.stack([torch.stack(rows) for rows in bits]).double()  # [moment, step, element]
    deviation = 2**16 / 12**0.5
    assert ((series.mean(1) - 2**15).abs() < 4 * deviation / num_steps**0.5).all()
    assert ((series.std(1) - deviation).abs() < 0.05 * deviation).all()
    pairs = [(series[w, 1:, 0], series[w, :-1, 0]) for w in (0, 1)]  # a step and the one before it
    pairs.append((series[0, :, 0], series[1, :, 0]))  # both moments
    for pair in pairs:
        assert torch.corrcoef(torch.stack(pair))[0, 1].abs() < 4 / num_steps**0.5


def second_moments(moments, steps):
    param = torch.nn.Parameter(torch.zeros(4096))
    optimizer = AdamW([param], lr=0.0, weight_decay=0.0, moments=moments)
    for step in range(steps):
        param.grad = torch.full_like(param, 1.0 if step < 100 else 0.1)
        optimizer.step()
    return optimizer.state[param]["exp_avg_sq"].double()


def test_moments_in_bf16_do_not_stay_where_they_are():
    """To the nearest, a change of a thousandth is lost, and the mean never falls."""
    right, found = second_moments("fp32", 1500), second_moments("bf16", 1500)
    assert found.mean() == pytest.approx(right.mean().item(), rel=0.005)
    stuck = torch.tensor(0.0).bfloat16()
    for step in range(1500):
        grad = 1.0 if step < 100 else 0.1
        stuck = (0.999 * stuck.float() + 0.001 * grad**2).bfloat16()
    assert stuck > 2 * right.mean()


@pytest.mark.parametrize(("moments", "block"), [("int8", 256), ("8bit", 100), ("8bit", 8)])
def test_other_kinds_and_other_blocks_are_refused(moments, block):
    with pytest.raises(ConfigError, match=r"^(moments='int8'|block=\d+): expected "):
        kind_of(moments, block)
    assert isinstance(kind_of("bf16", 128), InBfloat16)

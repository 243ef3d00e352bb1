"""Tolerances that count roundings: none so wide that a wrong gradient passes, none too narrow."""

import os

import pytest
import torch
from torch import nn

import ranks
from roundings import (
    SHARP,
    SMOOTH_EPS,
    apart,
    assert_all_rounded_alike,
    assert_rounded_alike,
    of_gradient,
    unit,
)

pytestmark = pytest.mark.kernels


def test_the_kernels_are_those_that_were_asked_for():
    best = torch.backends.cpu.get_cpu_capability().lower()
    assert os.environ.get("ATEN_CPU_CAPABILITY", best) == best
    assert torch.get_num_threads() == ranks.NUM_THREADS


@pytest.mark.parametrize("terms", [1, 7, 100, 2000])
def test_a_sum_in_any_order_is_alike_and_one_term_that_is_wrong_is_not(terms):
    for seed in range(30):
        numbers = torch.randn(terms, generator=torch.Generator().manual_seed(seed))
        scale = numbers.abs().sum().item()
        one_by_one = torch.zeros(())
        for number in numbers[torch.randperm(terms)]:
            one_by_one = one_by_one + number
        exact = numbers.double().sum().float()
        assert_rounded_alike(one_by_one, exact, terms, scale=scale)
        assert_rounded_alike(numbers.sum(), exact, terms, scale=scale)
        with pytest.raises(AssertionError, match="roundings make"):
            assert_rounded_alike(one_by_one + SHARP * scale, exact, terms, scale=scale)


def test_roundings_add_up_one_by_one_and_later_by_their_root():
    for dtype in (torch.float32, torch.float64):
        assert apart(1, dtype) == 2 * unit(dtype)
        assert apart(16, dtype) == 32 * unit(dtype)
        assert apart(1600, dtype) == 320 * unit(dtype)
    assert apart(1, torch.bfloat16) > SHARP  # nothing is sharp there


def test_a_number_of_roundings_that_hides_a_wrong_gradient_is_refused():
    most = 10_000
    assert SHARP / 2.2 < apart(most) < SHARP / 2
    with pytest.raises(ValueError, match=r"hide an error of 0\.0001"):
        apart(2 * most)
    assert apart(10**9, torch.float64) < 1e-10


@pytest.mark.parametrize("roundings", [1, 300, 10_000])
@pytest.mark.parametrize("size", [(1,), (3, 5), (300, 7)])
def test_a_gradient_that_is_wrong_by_1e_4_is_found(roundings, size):
    grad = torch.randn(size) * 1e-6  # however small it is
    assert_rounded_alike(grad, grad.clone(), roundings)
    with pytest.raises(AssertionError, match=r"up\.weight differ by .* of the largest"):
        assert_all_rounded_alike({"up.weight": grad * (1 + SHARP)}, {"up.weight": grad}, roundings)
    one_wrong = grad.clone().flatten()
    one_wrong[one_wrong.abs().argmax()] *= 1 - SHARP
    with pytest.raises(AssertionError):
        assert_rounded_alike(one_wrong.view(size), grad, roundings)


def test_what_is_no_number_or_is_missing_or_has_another_form_is_not_alike():
    grad = torch.ones(3)
    for other in (grad * float("nan"), torch.ones(4), torch.ones(3, dtype=torch.float64)):
        with pytest.raises(AssertionError):
            assert_rounded_alike(other, grad, 10)
    with pytest.raises(AssertionError, match="None"):
        assert_all_rounded_alike({"a": None}, {"a": grad}, 10)
    with pytest.raises(AssertionError):
        assert_rounded_alike(torch.full((3,), 1e-30), torch.zeros(3), 10)  # no scale, no room
    assert_all_rounded_alike({"a": None, "b": grad}, {"a": None, "b": grad}, 10)
    assert_rounded_alike(0.1 + 0.2, 0.3, 1)


def gradients(model, batch):
    model.zero_grad()
    model(batch).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("width", [8, 64])
def test_the_roundings_of_a_gradient_are_counted_forward_and_back(width):
    """fp32 against fp64: the whole error of one side."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.Tanh())]
    model, batch = nn.Sequential(*layers), torch.randn(12, width)
    found = gradients(model, batch)
    exact = gradients(model.double(), batch.double())
    roundings = of_gradient(*[width] * 4, over=12)
    exact = {name: grad.float() for name, grad in exact.items()}
    assert_all_rounded_alike(found, exact, roundings)
    for name in found:
        wrong = {**found, name: found[name] * (1 + SHARP)}
        with pytest.raises(AssertionError, match=name):
            assert_all_rounded_alike(wrong, exact, roundings)


def test_adam_makes_a_rounding_visible_and_hides_a_wrong_gradient_unless_its_eps_is_large():
    """What Note [Losses after steps of Adam] says."""
    tiny = torch.tensor([unit(), -unit(), 1e-3])

    def step(grad, eps):
        param = nn.Parameter(torch.zeros(3))
        param.grad = grad
        torch.optim.Adam([param], lr=1.0, eps=eps).step()
        return param.detach()

    other_roundings = tiny * torch.tensor([-1.0, -1.0, 1.0])
    assert (step(tiny, 1e-12) - step(other_roundings, 1e-12)).abs().max() > 1.9
    assert (step(tiny, SMOOTH_EPS) - step(other_roundings, SMOOTH_EPS)).abs().max() < 1e-4
    assert (step(tiny, 1e-12) - step(tiny * (1 + SHARP), 1e-12)).abs().max() < 1e-6

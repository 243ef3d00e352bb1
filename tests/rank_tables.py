"""Tables of scenarios that run on ranks: one test for all functions of a file."""

from inspect import signature

import pytest

from ranks import run_ranks, start_ranks

# By sentence: a function of (rank, world_size, ...), and numbers of ranks, each alone or with more
# arguments. A parameter ``folder`` gets the test's.


def each_of(scenarios):
    """Parametrize a test by ``run``, one for each number of ranks, which takes a folder."""

    def made(function, size, *args):
        takes_folder = "folder" in signature(function).parameters
        return lambda folder: run_ranks(function, size, *[folder][:takes_folder], *args)

    found = []
    for name, (function, cases) in scenarios.items():
        for case in cases:
            args = case if isinstance(case, tuple) else (case,)
            said = ", ".join(map(str, args))
            found.append(pytest.param(made(function, *args), id=f"{name} ({said})"))
    return pytest.mark.parametrize("run", found)


def begin_all(calls):
    """Start calls that mostly wait all at once; return what gives the results of one by its name.

    Each call is a function, its number of ranks, and its other arguments.
    """
    begun = {name: start_ranks(*call) for name, call in calls.items()}

    def results(name):
        outcomes = begun[name].wait()
        assert all(outcome.ok for outcome in outcomes), [each.describe() for each in outcomes]
        return [outcome.result for outcome in outcomes]

    return results

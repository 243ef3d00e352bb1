"""The garbage collector is held back, and is afterwards as it was."""

import gc

import pytest

from inner import collector_paused


@pytest.fixture(params=[True, False], ids=["on", "off"])
def was_on(request):
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_it_is_as_it_was_after_a_return_and_after_an_error(was_on):
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled() is was_on
    with pytest.raises(KeyError), collector_paused():
        raise KeyError
    assert gc.isenabled() is was_on


def test_one_inside_another_ends_with_the_outer_one(was_on):
    with collector_paused():
        with collector_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled() is was_on


def test_a_decorated_call_pauses_each_time(was_on):
    @collector_paused()
    def is_on():
        return gc.isenabled()

    assert [is_on(), is_on()] == [False, False]
    assert gc.isenabled() is was_on

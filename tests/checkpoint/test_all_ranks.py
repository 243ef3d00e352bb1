"""Work on all ranks at once: all succeed, or all raise one error naming the first failing rank."""

import errno
import gc
from pathlib import Path

import pytest

from disk import Lockstep, os_error
from shardwise.checkpoint.all_ranks import (
    collector_paused,
    explain,
    on_all_ranks,
    rows_of_all_ranks,
)
from shardwise.comm.control import SoloControl
from shardwise.errors import CheckpointError, ConfigError, DamagedCheckpoint, StateError


def failing(**errors):
    """Return a call whose work raises on the ranks r0, r1, ... that are named."""

    def call(control):
        def work():
            error = errors.get(f"r{control.rank}")
            if error is not None:
                raise error
            return bytes([control.rank, 7])

        return rows_of_all_ranks(control, work, 2)

    return call


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_rows_come_back_in_rank_order_with_one_exchange(num_ranks):
    ranks = Lockstep()
    rows = [bytes([rank, 7]) for rank in range(num_ranks)]
    assert ranks.run(num_ranks, failing()) == [rows] * num_ranks
    assert set(ranks.num_calls.values()) == {1}


def test_the_result_of_the_work_comes_back_on_its_own_rank():
    assert Lockstep().run(2, lambda control: on_all_ranks(control, lambda: control.rank)) == [0, 1]


A, B, C = map(ValueError, "abc")
FAILURES = [
    ({"r1": CheckpointError("the disk is on fire")}, "rank 1: the disk is on fire"),
    ({"r0": KeyError("a")}, "rank 0: KeyError: 'a'"),
    ({"r2": A, "r3": B}, "rank 2: ValueError: a (one other rank failed too)"),
    ({"r1": A, "r2": B, "r3": C}, "rank 1: ValueError: a (2 other ranks failed too)"),
]


@pytest.mark.parametrize(("errors", "text"), FAILURES)
def test_a_failure_is_one_error_on_every_rank_that_names_the_first_and_counts_the_others(
    errors, text
):
    ranks = Lockstep()
    found = ranks.run(4, failing(**errors))
    assert {(type(error), str(error)) for error in found} == {(CheckpointError, text)}
    assert set(ranks.num_calls.values()) == {2}


@pytest.mark.parametrize("kind", [CheckpointError, DamagedCheckpoint, ConfigError, StateError])
def test_the_kind_of_the_first_error_is_kept_on_every_rank(kind):
    found = Lockstep().run(3, failing(r1=kind("a"), r2=OSError("b")))
    assert [type(error) for error in found] == [kind] * 3
    assert isinstance(found[1].__cause__, kind) and found[0].__cause__ is None


def test_one_rank_alone_is_not_numbered():
    with pytest.raises(DamagedCheckpoint, match=r"^gone$"):
        on_all_ranks(SoloControl(), lambda: (_ for _ in ()).throw(DamagedCheckpoint("gone")))


@pytest.mark.parametrize("text", ["é" * 2000, "x" * 1023 + "é", "a\0b", ""])
def test_a_text_of_any_length_is_the_same_on_all_ranks(text):
    found = Lockstep().run(2, failing(r1=CheckpointError(text)))
    assert str(found[0]) == str(found[1])
    assert text.startswith(str(found[0]).removeprefix("rank 1: ")[:400])
    assert len(str(found[0]).encode()) < 1100


def test_a_rank_that_dies_on_purpose_is_not_kept_alive():
    """SystemExit and KeyboardInterrupt are no failures to be told: they end the process."""
    with pytest.raises(KeyboardInterrupt):
        on_all_ranks(SoloControl(), lambda: (_ for _ in ()).throw(KeyboardInterrupt()))


def test_an_error_of_the_system_is_told_with_its_file_number_and_remedy():
    full = os_error(errno.ENOSPC, Path("/a/b"))
    assert explain(full) == (
        "/a/b: No space left on device (errno 28); free some space, then save again"
    )
    full.wanted = "This file wants 9 bytes, 3 are free there"
    assert "(errno 28). This file wants 9 bytes, 3 are free there; free some" in explain(full)
    assert explain(os_error(errno.EIO, Path("/a"))) == "/a: Input/output error (errno 5)"
    assert explain(OSError("odd")) == "OSError: odd"


# -- the garbage collector is held back, and is afterwards as it was


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

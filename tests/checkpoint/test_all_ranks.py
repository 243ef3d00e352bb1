"""Work on all ranks at once: all succeed, or all raise one error naming the first failing rank."""

import errno
from pathlib import Path

import pytest

from disk import Lockstep, os_error
from inner import explain, on_all_ranks, rows_of_all_ranks
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


def test_one_failure_is_the_same_error_on_every_rank_with_a_second_exchange():
    ranks = Lockstep()
    found = ranks.run(3, failing(r1=CheckpointError("the disk is on fire")))
    assert [type(error) for error in found] == [CheckpointError] * 3
    assert {str(error) for error in found} == {"rank 1: the disk is on fire"}
    assert set(ranks.num_calls.values()) == {2}


@pytest.mark.parametrize(
    ("errors", "text"),
    [
        (
            {"r2": ValueError("a"), "r3": ValueError("b")},
            "rank 2: ValueError: a (and one other rank)",
        ),
        (
            {"r1": ValueError("a"), "r2": ValueError("b"), "r3": ValueError("c")},
            "rank 1: ValueError: a (and 2 other ranks failed)",
        ),
    ],
)
def test_the_first_failing_rank_is_named_and_the_others_are_counted(errors, text):
    assert {str(error) for error in Lockstep().run(4, failing(**errors))} == {text}


@pytest.mark.parametrize("kind", [CheckpointError, DamagedCheckpoint, ConfigError, StateError])
def test_the_kind_of_the_first_error_is_kept_on_every_rank(kind):
    found = Lockstep().run(3, failing(r1=kind("a"), r2=OSError("b")))
    assert [type(error) for error in found] == [kind] * 3
    assert isinstance(found[1].__cause__, kind) and found[0].__cause__ is None


def test_an_error_of_another_kind_becomes_a_checkpoint_error():
    found = Lockstep().run(2, failing(r0=KeyError("a")))
    assert [type(error) for error in found] == [CheckpointError] * 2
    assert str(found[1]) == "rank 0: KeyError: 'a'"


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

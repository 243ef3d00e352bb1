"""What is asked of a device and of the host next to it."""

import os

import pytest
import torch

from shardwise.device import HostTime, cores_near, run_near
from shardwise.host import cores_of


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("\n", set()), ("none", set())],
)
def test_lists_of_cores_are_read_as_the_system_writes_them(tmp_path, text, cores):
    (tmp_path / "local_cpulist").write_text(text)
    assert cores_of(tmp_path / "local_cpulist") == cores


def test_without_a_node_of_memory_next_to_the_device_all_cores_stay(tmp_path):
    assert cores_of(tmp_path / "missing") == set()
    before = os.sched_getaffinity(0)
    assert cores_near(torch.device("cpu")) == set()
    run_near(torch.device("cpu"))
    assert os.sched_getaffinity(0) == before


def test_memory_that_lasts_is_zeros_of_just_that_size():
    memory = HostTime().locked_memory(5000)
    assert (memory.nbytes, memory.dtype, int(memory.sum())) == (5000, torch.uint8, 0)
    assert HostTime().locked_memory(0).nbytes == 0

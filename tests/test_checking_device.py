"""The checking device: right programs pass, and mistakes of kinds that no engine shows are found.

Every program comes right and wrong; what the wrong one leaves out, or adds, is the mistake. Other
kinds are put into the engine in tests/engine/test_stream_order.py.
"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from checking_device import CheckingDevice, StreamError
from ranks import on_ranks, run_ranks
from shardwise.device import follow_current

PROGRAMS = {}  # with what the mistake is called


def finds(text):
    def add(program):
        PROGRAMS[program.__name__] = program, text
        return program

    return add


def reduce_all(tensor):
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    return work


def host_ones(device, numel=4, pinned=True):
    return device.host_memory(numel, torch.float32, pinned).fill_(1)


@finds("writes (4,) float32 while _allgather_base_")
def change_what_a_collective_sends(device, wrong):
    source, full = torch.ones(4), torch.empty(4)
    work = dist.all_gather_into_tensor(full, source, async_op=True)
    if wrong:
        source.add_(1)
    work.wait()
    source.add_(1)


@finds("reads (4,) float32 while allreduce_")
def look_at_flags(device, wrong):
    flags = torch.ones(4)
    work = reduce_all(flags)
    if not wrong:
        work.wait()
    assert flags.tolist()
    work.wait()


@finds("whose memory was freed")
def use_a_parameter_that_was_freed(device, wrong):
    full = torch.ones(4)
    view = full[1:]
    full.untyped_storage().resize_(0)
    full.untyped_storage().resize_(16)
    full.fill_(2)
    if wrong:
        full.untyped_storage().resize_(0)
    view.sum()


@finds("in which nothing was written")
def use_a_parameter_that_was_not_gathered(device, wrong):
    full = torch.ones(4)
    full.untyped_storage().resize_(0)
    full.untyped_storage().resize_(16)
    if not wrong:
        full.fill_(2)
    full + 1


@finds("memory of the host and of the device")
def mix_host_and_device(device, wrong):
    slices, values = host_ones(device), torch.ones(4)
    slices.add_(values if wrong else host_ones(device))
    values.mul_(torch.tensor(2.0))  # a scalar of the host may go anywhere


@finds("reads (4,) float32 while add_")
def gather_what_was_changed_through_a_slice(device, wrong):
    stream, master = device.new_stream(), torch.zeros(4)
    own = torch.empty(0).set_(master.untyped_storage()[4:12])
    own.add_(1)
    with stream.use() if wrong else follow_current(device, stream):
        master.clone()
    device.current_stream().wait(stream.record())


def run_program(rank, world_size, name, wrong):
    device = CheckingDevice()
    try:
        with device:
            PROGRAMS[name][0](device, wrong)
    except StreamError as error:
        assert device.errors and device.errors[0] in str(error)
    return device.errors


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_mistake_is_found_and_the_right_program_passes(name):
    assert run_ranks(run_program, 1, name, False) == [[]]
    (errors,) = run_ranks(run_program, 1, name, True)
    assert len(errors) == 1 and PROGRAMS[name][1] in errors[0], errors


@on_ranks(1)
def test_copies_of_memory_that_is_not_page_locked_block():
    with CheckingDevice() as device:
        slices, full = host_ones(device, pinned=False), torch.empty(4)
        full.copy_(slices, non_blocking=True)
        slices.add_(1)


@on_ranks(1)
def test_only_values_of_the_device_are_waited_for():
    """A scalar made of nothing is the host's: to look at it does not wait for the device."""
    with CheckingDevice() as device:
        values = torch.ones(4)
        factor = torch.randint(3, ())
        factor.add_(1)
        assert int(factor) and int(torch.tensor(2))
        values.mul_(factor)
        factor.add_(1)  # it was read when the product was called
        assert device.current.name not in device.host.clock
        assert values.sum().item()
        assert device.current.name in device.host.clock


@on_ranks(1)
def test_the_device_leaves_torch_as_it_was_and_hides_no_error():
    names = [(Tensor, "tolist"), (Tensor, "numpy"), (torch.UntypedStorage, "resize_")]
    before = [getattr(owner, name) for owner, name in names]
    with pytest.raises(ZeroDivisionError), CheckingDevice() as device:
        device.errors.append("this does not hide what was raised")
        raise ZeroDivisionError
    assert [getattr(owner, name) for owner, name in names] == before
    assert all(name not in vars(owner) for owner, name in names)
    assert torch._C._len_torch_dispatch_stack() == 0

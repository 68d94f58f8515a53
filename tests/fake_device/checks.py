"""What the device that is not there promises, in a process that has it (`process.py`)."""

from __future__ import annotations

import math

import torch
from fake_device.fake_cuda import DEVICE


def checks(call: None) -> list[str]:
    """The names of the checks that have passed."""
    done = []
    for check in (
        nothing_is_done_before_somebody_waits,
        streams_are_ordered_by_events_alone,
        memory_is_used_again_unless_a_stream_is_recorded,
        a_pinned_buffer_is_read_late,
        devices_do_not_mix,
        backward_runs_on_the_stream_of_forward,
    ):
        check()
        done.append(check.__name__)
    return done


def nothing_is_done_before_somebody_waits() -> None:
    there = torch.ones(3, device="cuda")
    assert math.isnan(there.host[0])
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    assert not event.query() and event.query()  # who looks again sees the device go on
    assert there.host.tolist() == [1, 1, 1]
    there.add_(1)
    before = DEVICE.counts["host wait", "MainThread"]
    assert there.sum().item() == 6
    assert DEVICE.counts["host wait", "MainThread"] == before + 1


def streams_are_ordered_by_events_alone() -> None:
    other, there = torch.cuda.Stream(), torch.ones(3, device="cuda")
    with torch.cuda.stream(other):
        assert there.isnan().all().item()
        other.wait_stream(torch.cuda.default_stream())
        assert not there.isnan().any().item()


def memory_is_used_again_unless_a_stream_is_recorded() -> None:
    other = torch.cuda.Stream()
    for recorded in (False, True):
        there = torch.ones(3, device="cuda")
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            twice = there * 2
        if recorded:
            there.record_stream(other)
        del there
        torch.zeros(3, device="cuda").cpu()  # may lie where `there` lay
        with torch.cuda.stream(other):
            assert twice.isnan().any().item() is not recorded


def a_pinned_buffer_is_read_late() -> None:
    for pinned, value in ((True, 7), (False, 1)):
        buffer = torch.ones(2, pin_memory=pinned)
        there = buffer.to("cuda", non_blocking=True)
        buffer.fill_(7)
        assert there.tolist() == [value, value]


def devices_do_not_mix() -> None:
    there = torch.ones(2, device="cuda")
    try:
        there + torch.ones(2)
    except RuntimeError as error:
        assert "same device" in str(error)
    else:
        raise AssertionError("a sum over two devices")


def backward_runs_on_the_stream_of_forward() -> None:
    stream, leaf = torch.cuda.Stream(), torch.ones(3, device="cuda", requires_grad=True)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        product = (leaf * leaf).sum()
    product.backward()  # waits on the device for the gradient, which comes from `stream`
    assert leaf.grad is not None and leaf.grad.tolist() == [2, 2, 2]

"""Frames between two ends: whole, in order and in time, whatever their sizes, and after any interruption."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenly.team import wire
from evenly.team.wire import Channel, ChannelClosedError, channel_memory, channel_sockets


@contextlib.contextmanager
def ends(ring_bytes=64, spin=0.0, nap=60.0):
    """Both ends of a channel. A lost wake-up would make a test wait for longer than it may take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "RING_BYTES", ring_bytes)
        patch.setattr(wire, "_PIECE_BYTES", max(1, ring_bytes // 4))
        patch.setattr(wire, "CHANNEL_BYTES", 2 * (wire.HEADER_BYTES + ring_bytes))
        patch.setattr(wire, "_NAP_SECONDS", nap)
        memory = channel_memory()
        sockets = channel_sockets()
        driver = Channel(sockets[0], memory, driver=True, spin=spin)
        replica = Channel(sockets[1], memory, driver=False, spin=spin)
        os.close(memory)
        try:
            yield driver, replica
        finally:
            driver.close()
            replica.close()


@contextlib.contextmanager
def beside(function, *arguments):
    """Run a function in another thread meanwhile; what it raises is raised here."""
    failure = []

    def run():
        try:
            function(*arguments)
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join(30)
    assert not thread.is_alive()
    if failure:
        raise failure[0]


def receive(channel, sizes):
    header = channel.receive()
    tensors = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    for tensor in tensors:
        channel.receive_into(tensor)
    return header, [bytes(tensor.tolist()) for tensor in tensors]


def as_tensor(data):
    return torch.tensor(list(data), dtype=torch.uint8)


FRAMES = st.lists(
    st.tuples(st.binary(max_size=200), st.lists(st.binary(max_size=200), max_size=3)), min_size=1, max_size=8
)


@settings(max_examples=100, deadline=None)
@given(frames=FRAMES, ring_bytes=st.sampled_from([16, 24, 64, 1024]), spin=st.sampled_from([0.0, 0.003]))
def test_frames_of_any_size_arrive_whole_and_in_order(frames, ring_bytes, spin):
    def write(channel):
        for header, pieces in frames:
            channel.send(header, [as_tensor(piece) for piece in pieces])

    with ends(ring_bytes, spin) as (driver, replica), beside(write, driver):
        for header, pieces in frames:
            assert receive(replica, [len(piece) for piece in pieces]) == (header, pieces)


@settings(max_examples=50, deadline=None)
@given(frames=FRAMES, take=st.lists(st.integers(0, 3), min_size=8, max_size=8))
def test_what_nobody_takes_of_a_frame_is_passed_over(frames, take):
    def write(channel):
        for header, pieces in frames:
            channel.send(header, [as_tensor(piece) for piece in pieces])

    with ends() as (driver, replica), beside(write, driver):
        for (header, pieces), count in zip(frames, take, strict=False):
            assert receive(replica, [len(piece) for piece in pieces[:count]]) == (header, pieces[:count])
        replica.skip()


def test_questions_and_answers_larger_than_the_ring():
    data = bytes(range(250)) * 4

    def answer(channel):
        for _ in range(20):
            header, (body,) = receive(channel, [len(data)])
            channel.send(header + data, [as_tensor(body[::-1])])

    with ends() as (driver, replica), beside(answer, replica):
        for number in range(20):
            driver.send(bytes([number]), [as_tensor(data)])
            assert receive(driver, [len(data)]) == (bytes([number]) + data, [data[::-1]])


@pytest.mark.parametrize("spin", [0.0, 0.00002])
def test_no_wake_up_is_lost_between_processes(spin):
    with ends(ring_bytes=256, spin=spin) as (driver, replica):
        child = os.fork()
        if child == 0:
            driver.socket.close()
            with contextlib.suppress(ChannelClosedError):
                while True:
                    replica.send(replica.receive() * 2)
            os._exit(0)
        replica.socket.close()
        for number in range(3000):
            # Some fit into the ring, some do not; the other side is asleep, about to sleep, or awake.
            header = bytes([number % 256]) * (1 + number * 37 % 300)
            driver.send(header)
            assert driver.receive() == header * 2
        driver.socket.close()
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("spin", [0.0, 0.003])
def test_who_waits_for_a_frame_notices_that_the_other_end_is_closed(spin):
    with ends(spin=spin) as (driver, replica), beside(replica.close), pytest.raises(ChannelClosedError):
        driver.receive()


def test_who_waits_for_room_notices_that_the_other_end_is_closed():
    with ends() as (driver, replica), beside(replica.close), pytest.raises(ChannelClosedError):
        driver.send(bytes(1000))


def test_what_was_written_before_the_end_was_closed_can_still_be_read():
    with ends() as (driver, replica):
        replica.send(b"last words")
        replica.close()
        assert driver.receive() == b"last words"
        with pytest.raises(ChannelClosedError):
            driver.receive()


def test_a_long_wait_looks_around_now_and_then():
    class Pointless(Exception):
        pass

    def watch():
        raise Pointless

    with ends(nap=0.01) as (driver, _):
        driver.watch = watch
        with pytest.raises(Pointless):
            driver.receive()
        with pytest.raises(Pointless):
            driver.send(bytes(1000))
        assert driver.broken


def test_taking_more_than_the_frame_has_is_refused():
    with ends() as (driver, replica):
        driver.send(b"header", [as_tensor(b"1234")])
        driver.send(b"next")
        replica.receive()
        with pytest.raises(ValueError, match="5 bytes was expected, but 4 bytes are left"):
            replica.receive_into(torch.empty(5, dtype=torch.uint8))
        assert replica.receive() == b"next"


# ---------------------------------------------------------------------- interruptions


class CtrlC(Exception):
    pass


def interrupted_at(line, function, *arguments):
    """Call a function, and raise at the ``line``-th line of the wire that it runs. False if it ran fewer."""
    left = line

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename != wire.__file__:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise CtrlC
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*arguments)
    except CtrlC:
        return True
    finally:
        sys.settrace(before)
    return False


def read_all(channel):
    header = channel.receive()
    assert header == b"first" * 3
    channel.receive_into(torch.empty(10, dtype=torch.uint8))
    channel.receive_into(torch.empty(20, dtype=torch.uint8))


@pytest.mark.parametrize("start", [0, 30, 60])
def test_a_reader_interrupted_at_any_line_goes_on_with_the_next_frame(start):
    line, interrupted = 0, True
    while interrupted:
        line += 1
        with ends(ring_bytes=128) as (driver, replica):
            driver.send(bytes(start))  # so that the frames lie across the ring's end
            replica.receive()
            driver.send(b"first" * 3, [as_tensor(bytes(10)), as_tensor(bytes(20))])
            driver.send(b"second")
            interrupted = interrupted_at(line, read_all, replica)
            frame = replica.receive()
            if frame == b"first" * 3:  # it had not begun
                frame = replica.receive()
            assert frame == b"second"
    assert line > 20


def test_a_writer_interrupted_at_any_line_knows_whether_its_frame_is_whole():
    line, interrupted, whole = 0, True, 0
    while interrupted:
        line += 1
        with ends(ring_bytes=128) as (driver, replica):
            driver.send(bytes(90))
            replica.receive()
            interrupted = interrupted_at(line, driver.send, b"first", [as_tensor(bytes(10)), as_tensor(bytes(20))])
            if driver.broken:
                continue
            driver.send(b"second")
            frame = replica.receive()
            if frame == b"first":
                whole += 1
                frame = replica.receive()
            assert frame == b"second"
    assert line > 20
    assert whole > 0


# ---------------------------------------------------------------------- descriptors


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_descriptors_are_claimed_by_token_and_those_of_tokens_before_are_closed(tmp_path):
    def sent(channel, token, *names):
        descriptors = [os.open(tmp_path / name, os.O_CREAT | os.O_RDWR) for name in names]
        channel.send_descriptors(token, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)

    with ends() as (driver, replica):
        before = open_descriptors()
        for token in range(300):  # of frames that never came
            sent(driver, token, "unwanted")
            replica.take_descriptors()
        sent(driver, 1000, "a", "b")
        sent(driver, 1001, "c")
        a, b = replica.claim_descriptors(1000)
        (c,) = replica.claim_descriptors(1001)
        assert [Path(f"/proc/self/fd/{found}").readlink() for found in (a, b, c)] == [tmp_path / n for n in "abc"]
        assert not any(os.get_inheritable(found) for found in (a, b, c))
        for found in (a, b, c):
            os.close(found)
        assert open_descriptors() == before
        with pytest.raises(LookupError, match="no descriptors came with token 7"):
            replica.claim_descriptors(7)


def test_descriptors_arrive_among_wake_ups():
    with ends() as (driver, replica), beside(lambda: [replica.receive() for _ in range(50)]):
        for number in range(50):
            driver.send(b"frame")
            driver.send_descriptors(number, (0,))
    replica.close()


def test_descriptors_that_nobody_claimed_are_closed_with_the_channel():
    with ends() as (driver, replica):
        before = open_descriptors()
        driver.send_descriptors(1, (0, 0))
        replica.take_descriptors()
        assert open_descriptors() == before + 2
        replica.close()
        assert open_descriptors() == before - 1


def test_an_interruption_is_seen_at_the_other_end():
    with ends() as (driver, replica):
        assert replica.interruption() == 0
        driver.interrupt(12)
        assert replica.interruption() == 12

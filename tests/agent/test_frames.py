from __future__ import annotations

import os
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pichak_agent.frames import FrameError, FrameReader, FrameWriter
from pichak_agent.messages import MAX_BYTES


def written(*calls: tuple[str, Any]) -> bytes:
    """What a writer puts into its pipe."""
    read, write = os.pipe()
    writer = FrameWriter(write)
    collected = bytearray()

    def collect() -> None:
        while data := os.read(read, 65536):
            collected.extend(data)

    thread = threading.Thread(target=collect)
    thread.start()
    for name, argument in calls:
        getattr(writer, name)(argument)
    os.close(write)
    thread.join()
    os.close(read)
    return bytes(collected)


@given(st.integers(1, 50))
def test_frames_arrive_whole_however_they_are_cut(size: int) -> None:
    data = written(
        ("progress", "first"),
        ("partial", {"a": 1}),
        ("progress", "two\nlines"),
        ("partial", {"a": 2}),
        ("outcome", b"the end"),
        ("progress", "after the end"),
    )
    reader = FrameReader()
    texts = []
    for start in range(0, len(data), size):
        texts += reader.feed(data[start : start + size])
    assert texts == ["first", "two lines"]
    assert reader.partial() == {"a": 2}
    assert reader.outcome == b"the end"
    assert not reader.unfinished


def test_an_end_in_the_middle_of_a_frame_is_seen() -> None:
    reader = FrameReader()
    reader.feed(written(("progress", "text"))[:-1])
    assert reader.unfinished
    assert reader.progress == ""


@pytest.mark.parametrize("noise", [b"hello world", b"PKFz\0\0\0\1x", b"\0" * 20])
def test_what_is_no_frame_is_named(noise: bytes) -> None:
    with pytest.raises(FrameError, match="no frame"):
        FrameReader().feed(written(("progress", "fine")) + noise)


def test_a_frame_over_the_limit_is_refused_before_it_arrives() -> None:
    header = b"PKFr" + (MAX_BYTES + 1).to_bytes(4, "big")
    with pytest.raises(FrameError, match="more than the limit"):
        FrameReader().feed(header)


def test_all_frames_together_are_limited() -> None:
    reader = FrameReader(max_total_bytes=1000)
    frame = written(("progress", "x" * 100))
    with pytest.raises(FrameError, match="flooded"):
        for _ in range(20):
            reader.feed(frame)


def test_a_damaged_partial_result_is_none() -> None:
    reader = FrameReader()
    reader.feed(b"PKFr" + (3).to_bytes(4, "big") + b"\xc1\xc1\xc1")
    assert reader.partial() == {}


def test_an_interruption_waits_for_the_end_of_a_frame() -> None:
    class InterruptedInTestError(Exception):
        pass

    class Interrupting(FrameWriter):
        """A signal handler that runs between two writes of one frame."""

        def progress(self, text: str) -> None:
            real = os.write

            def write_a_little(fd: int, data: memoryview) -> int:
                self.interrupt(InterruptedInTestError())
                return real(fd, data[:4])

            os.write = write_a_little  # type: ignore[assignment]
            try:
                super().progress(text)
            finally:
                os.write = real

    read, write = os.pipe()
    with pytest.raises(InterruptedInTestError):
        Interrupting(write).progress("whole")
    os.close(write)
    reader = FrameReader()
    assert reader.feed(os.read(read, 1000)) == ["whole"]
    os.close(read)
    with pytest.raises(InterruptedInTestError):
        FrameWriter(0).interrupt(InterruptedInTestError())

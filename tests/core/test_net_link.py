"""A link's two ends on the loopback: who is served, what is counted, and what a rate is made of."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from pichak_core.measure import Context, probes, run_one
from pichak_core.measure._net_client import Flow, LinkClient, Place
from pichak_core.measure._net_flow import Received, window_rates
from pichak_core.measure._net_interfaces import Interface, interface_of
from pichak_core.measure._net_link import (
    PARTS,
    LinkPlan,
    _throughput,
    measure_link,
    mirrored,
    unmeasured,
)
from pichak_core.measure._net_server import Listener
from pichak_core.measure._net_tcp import Loss, Sent, loss_of, parse_tcp_info
from pichak_core.measure._net_wire import (
    MARK,
    LinkError,
    StrangerError,
    open_channel,
    proof,
    token_of,
    why_no_connection,
)
from pichak_core.measurement import Measurement, Reason, Unmeasured

KEY = b"k" * 32
SHORT = LinkPlan(2, 0.1, 0.5, 0.2, 0.05, 20)


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener("127.0.0.1", KEY)
    thread = threading.Thread(target=made.serve, args=(60.0, 30.0), daemon=True)
    thread.start()
    yield made
    made.close()


def client(listener: Listener, session: bytes | None = None, key: bytes = KEY) -> LinkClient:
    name = session or os.urandom(8)
    token = token_of(key, name)
    return LinkClient("127.0.0.1", listener.port, name, token, connect_seconds=3.0)


# -- who is served --------------------------------------------------------------------------------


def test_a_link_is_measured_and_both_ends_count_the_same(listener: Listener) -> None:
    with client(listener) as link:
        assert link.place() == Place("127.0.0.1", "127.0.0.1", "127.0.0.1", "127.0.0.1", True)
        found = list(measure_link(link, "network.b", SHORT, progress=lambda _: None))
        there, back = link.forward(0.2, 3), link.backward(0.2, 3)
    assert [r.name for r in found] == [f"network.b.{part}" for part in PARTS]
    assert all(isinstance(r, Measurement) for r in found)
    for flow in (there, back):
        assert flow.problem == ""
        assert len(flow.sent.totals) == 3
        assert flow.sent.totals == flow.received.totals
        assert sum(flow.sent.totals) > 0
    assert listener.served == 1
    assert listener.refused == 0


@pytest.mark.parametrize(
    "said",
    [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 58, b"x" * 5000],
    ids=["nothing", "http", "zeros", "flood"],
)
def test_a_stranger_is_not_served_and_harms_no_test(listener: Listener, said: bytes) -> None:
    with client(listener) as link:
        with socket.create_connection(("127.0.0.1", listener.port), 3) as stranger:
            with contextlib.suppress(OSError):  # it may have been closed already
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(5)
            answer = b""
            while piece := _received(stranger):
                answer += piece
            # It learns a random number and nothing else.
            assert len(answer) <= len(MARK) + 16
        assert link.forward(0.2, 1).problem == ""
    assert listener.served == 1
    assert listener.refused == 1


def _received(sock: socket.socket) -> bytes:
    try:
        return sock.recv(4096)
    except ConnectionError:
        return b""


def test_a_wrong_token_is_refused(listener: Listener) -> None:
    with pytest.raises(StrangerError, match="closed"):
        client(listener, key=b"x" * 32)
    assert listener.served == 0


def test_a_token_opens_its_session_once(listener: Listener) -> None:
    session = os.urandom(8)
    with client(listener, session) as link:
        link.place()
    with pytest.raises(StrangerError):
        client(listener, session)
    assert listener.served == 1


def test_a_data_channel_needs_an_open_session(listener: Listener) -> None:
    session = os.urandom(8)
    with pytest.raises(StrangerError):
        open_channel("127.0.0.1", listener.port, token_of(KEY, session), session, 1)


def test_what_was_overheard_opens_nothing(listener: Listener) -> None:
    """A recorded greeting is worth nothing against another random number of the listener."""
    session = os.urandom(8)
    head = session + struct.pack("!H", 0) + b"n" * 16
    with socket.create_connection(("127.0.0.1", listener.port), 3) as first:
        theirs = first.recv(24, socket.MSG_WAITALL)[len(MARK) :]
    recorded = head + proof(token_of(KEY, session), b"client", theirs, head)
    with socket.create_connection(("127.0.0.1", listener.port), 3) as again:
        again.settimeout(5)
        again.recv(24, socket.MSG_WAITALL)
        again.sendall(recorded)
        assert _received(again) == b""


@pytest.mark.parametrize(
    ("answer", "words"),
    [(b"SSH-2.0-OpenSSH_9.2\r\n--", "another program"), (b"", "clos")],
)
def test_another_program_at_the_address_is_recognised(answer: bytes, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            sock, _ = server.accept()
            with sock:
                sock.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(StrangerError, match=words):
            open_channel("127.0.0.1", server.getsockname()[1], b"t", b"s" * 8, 0)


def test_one_that_knows_the_mark_but_not_the_token_is_no_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            sock, _ = server.accept()
            with sock:
                sock.sendall(MARK + b"r" * 16)
                sock.recv(58, socket.MSG_WAITALL)
                sock.sendall(b"p" * 32)

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(StrangerError, match="another program"):
            open_channel("127.0.0.1", server.getsockname()[1], b"t", b"s" * 8, 0)


def test_the_listener_ends_by_itself_when_nobody_comes() -> None:
    lonely = Listener("127.0.0.1", KEY)
    thread = threading.Thread(target=lonely.serve, args=(60.0, 0.3), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    lonely.close()


def test_the_listener_ends_at_its_limit_whoever_comes() -> None:
    ticks = iter(float(second) for second in range(1000))
    busy = Listener("127.0.0.1", KEY, clock=lambda: next(ticks))
    busy.serve(5.0, 1e9)
    busy.close()


def test_an_address_behind_a_nat_is_noticed_by_the_listener() -> None:
    # 192.0.2.0/24 is for documentation: no machine has such an address.
    made = Listener("192.0.2.7", KEY)
    assert not made.is_local
    assert made.port > 0
    made.close()


def test_a_listener_that_goes_away_ends_the_test(listener: Listener) -> None:
    with pytest.raises((LinkError, OSError)), client(listener) as link:
        link.place()
        listener.close()
        link.round_trips_ms(5.0, 1000)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TimeoutError(), "no answer within 5 s: a firewall drops it"),
        (ConnectionRefusedError(111, "refused"), "refused: a firewall rejects it"),
        (OSError(113, "No route to host"), "no route"),
        (OSError(101, "unreachable"), "no route"),
        (OSError(22, "Invalid argument"), "no connection: Invalid argument"),
    ],
)
def test_why_a_connection_was_not_made(error: OSError, words: str) -> None:
    assert words in why_no_connection(error, 5.0)


# -- what is counted ------------------------------------------------------------------------------


def looks(rate: float, seconds: float, first_byte: float = 0.0) -> list[tuple[float, int]]:
    """Every 0.1 s, at `rate` MB/s from `first_byte` on."""
    times = [round(0.1 * i, 1) for i in range(round(10 * seconds) + 1)]
    return [(at, round(max(0.0, at - first_byte) * rate * 1e6)) for at in times]


def test_windows_of_a_steady_flow_have_its_rate() -> None:
    rates = window_rates(looks(25.0, 2.0), warm_up_seconds=0.5, seconds=2.0)
    # The first byte was seen at 0.1 s, so that 0.6 to 2.0 s count: 14 windows.
    assert len(rates) == 14
    assert rates == pytest.approx([25.0] * 14)


def test_the_warm_up_counts_from_the_first_byte_and_the_tail_is_left_out() -> None:
    flow = looks(10.0, 3.0, first_byte=1.0)
    flow += [(3.1 + 0.1 * i, flow[-1][1]) for i in range(20)]  # nothing more: buffers are empty
    rates = window_rates(flow, warm_up_seconds=0.4, seconds=1.9)
    assert rates == pytest.approx([10.0] * len(rates))
    assert len(rates) == 15


def test_nothing_arrived_has_no_rate() -> None:
    assert window_rates([(0.0, 0), (0.1, 0)], warm_up_seconds=0.0, seconds=1.0) == []


def flow(sent: list[int], got: list[int], sent_error: str = "", got_error: str = "") -> Flow:
    received = Received(got, looks(25.0, 2.0), error=got_error)
    return Flow(Sent(sent, error=sent_error), received, 2.0)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (flow([5, 5], [5, 4]), "the ends disagree: 10 bytes were sent and 9 arrived"),
        (flow([5, 5], [4, 6]), "the ends disagree"),
        (flow([0], [0]), "nothing arrived"),
        (flow([5], [5], sent_error="sending broke off: x"), "sending broke off"),
        (flow([5], [5], got_error="it was not over within 9 s"), "not over"),
    ],
)
def test_a_flow_whose_ends_disagree_is_no_measurement(made: Flow, words: str) -> None:
    assert words in made.problem
    reading = _throughput(made, "network.b.send_mb_s", LinkPlan(), None)
    assert isinstance(reading, Unmeasured)
    assert words in reading.detail


@pytest.mark.parametrize(
    ("speed", "hardware", "suspect"),
    [(100, True, True), (1000, True, False), (0, True, False), (100, False, False)],
)
def test_faster_than_its_card_is_suspect(speed: int, hardware: bool, suspect: bool) -> None:
    # 25 MB/s are 200 Mbit/s; a veth's claim binds nobody.
    card = Interface("eth0", 1500, speed, hardware)
    reading = _throughput(flow([50], [50]), "network.b.send_mb_s", LinkPlan(), card)
    assert isinstance(reading, Measurement)
    assert reading.value == pytest.approx(25.0)
    assert bool(reading.suspect) is suspect


def tcp_info(length: int, **values: int) -> bytes:
    """`struct tcp_info` of a kernel whose version is `length` bytes long."""
    offsets = {"total_retrans": 100, "data_segs_out": 156, "dsack_dups": 216}
    data = bytearray(length)
    for name, value in values.items():
        if offsets[name] + 4 <= length:
            struct.pack_into("=I", data, offsets[name], value)
    return bytes(data)


def test_loss_is_what_was_sent_again_and_had_not_arrived() -> None:
    one = parse_tcp_info(tcp_info(240, total_retrans=30, data_segs_out=1000, dsack_dups=10))
    two = parse_tcp_info(tcp_info(240, total_retrans=0, data_segs_out=1000))
    assert loss_of([one, two]) == Loss(2000, 20)
    assert loss_of([one, two]).percent == pytest.approx(1.0)  # type: ignore[union-attr]


def test_an_old_kernel_counts_less_and_a_strange_system_nothing() -> None:
    old = parse_tcp_info(tcp_info(192, total_retrans=4, data_segs_out=100))
    assert "dsack_dups" not in old
    assert loss_of([old]) == Loss(100, 4)
    older = parse_tcp_info(tcp_info(104, total_retrans=4))
    assert loss_of([older]) is None
    assert loss_of([]) is None


def test_what_no_connection_gave_is_named_in_full() -> None:
    gaps = unmeasured("network.b", Reason.FAILED, "it was not reached")
    assert [gap.name.rpartition(".")[2] for gap in gaps] == list(PARTS)


@pytest.mark.parametrize(
    ("peer", "readings"),
    [
        ("a/b", {}),
        ("", {}),
        ("a", {"cpu.steal_percent": {"value": 1.0, "source": "s"}}),
        ("a", {"network.b.rtt_ms": {"value": [1]}}),
        ("a", {f"network.{i}.rtt_ms": {"value": 1.0, "source": "s"} for i in range(6)}),
    ],
)
def test_what_a_client_tells_is_checked(peer: str, readings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="reading"):
        mirrored(peer, readings)


def test_the_interface_of_an_address() -> None:
    found = interface_of("127.0.0.1")
    assert found is not None
    assert not found.hardware
    assert found.ceiling_mb_s is None
    assert interface_of("192.0.2.7") is None


def test_the_machine_against_itself() -> None:
    context = Context()
    readings = {r.name: r for r in run_one(probes()["network"], context)}
    assert set(readings) == {"host.tcp_loopback_us", "host.tcp_loopback_mb_s"}
    for reading in readings.values():
        assert isinstance(reading, Measurement)
        assert float(reading.value) > 0

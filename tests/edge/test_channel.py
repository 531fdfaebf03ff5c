"""The virtual link: exact times, order, losses and bytes; traces and their errors."""

import importlib.util
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import REPOSITORY

from pipedraft.inference.edge.channel import (
    NEVER,
    PACKET_BYTES,
    PRESETS,
    Channel,
    EnergyModel,
    Link,
    LinkEstimate,
    LinkState,
    Steps,
    load_link,
    read_trace,
    split_links,
    timeout_s,
)

TRACES = REPOSITORY / "assets" / "net_traces"
MEGABYTE = 8.0  # Mbit/s of 1 MB/s


def plain_link(**fields: float) -> Link:
    """Return a link with 1 MB/s up, 2 MB/s down, 50 ms one way and no header."""
    link = Link.constant(up_mbps=MEGABYTE, down_mbps=2 * MEGABYTE, rtt_ms=100)
    steps = {
        name: Steps.constant(fields.pop(name)) for name in ("jitter_s", "loss") & fields.keys()
    }
    return replace(link, **{"header_bytes": 0, **fields, **steps})


def integral(steps: Steps, start_s: float, end_s: float) -> float:
    """Integrate piece by piece; shares no code with ``Steps``."""
    total, time_s = 0.0, start_s
    bounds = [*steps.starts_s[1:], steps.period_s]
    while time_s < end_s - 1e-12:
        repeats = math.floor(time_s / steps.period_s + 1e-12)
        phase_s = time_s - repeats * steps.period_s
        piece = next(i for i, bound in enumerate(bounds) if phase_s < bound - 1e-12)
        until_s = min(end_s, repeats * steps.period_s + bounds[piece])
        total += steps.values[piece] * (until_s - time_s)
        time_s = until_s
    return total


def test_a_message_takes_size_over_bandwidth_plus_the_delay() -> None:
    channel = Channel(plain_link(header_bytes=100))
    assert channel.transmit(3.0, 900, "up") == pytest.approx(3.0 + 0.001 + 0.05)
    assert channel.transmit(3.0, 900, "down") == pytest.approx(3.0 + 0.0005 + 0.05)
    assert channel.transmit(9.0, 0, "up") == pytest.approx(9.0 + 0.0001 + 0.05)


def test_messages_queue_for_the_bandwidth_of_their_direction() -> None:
    channel = Channel(plain_link())
    first = channel.transmit(0.0, 10_000, "up")
    second = channel.transmit(0.004, 10_000, "up")
    assert (first, second) == pytest.approx((0.06, 0.07))
    assert channel.transmit(0.0, 10_000, "down") == pytest.approx(0.055)


@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(
        st.tuples(st.sampled_from([0.25, 0.5, 2.0]), st.sampled_from([0.0, 1.0, 3.0])),
        min_size=1,
        max_size=6,
    ).filter(lambda pieces: any(rate for _, rate in pieces)),
    start=st.integers(0, 200),
    amount=st.integers(1, 300),
)
def test_what_has_left_is_the_integral_and_no_earlier_time_has_it(
    pieces: list[tuple[float, float]], start: int, amount: int
) -> None:
    widths, rates = zip(*pieces, strict=True)
    starts = (0.0, *np.cumsum(widths)[:-1].tolist())
    steps = Steps(starts, rates, float(sum(widths)))
    start_s, size = start / 8, amount / 8
    end_s = steps.reach(start_s, size)
    assert integral(steps, start_s, end_s) == pytest.approx(size)
    assert integral(steps, start_s, end_s - 1e-3) < size - 1e-4, "waited longer than it had to"


def test_a_message_that_fills_a_period_does_not_wait_for_the_next_ones_bandwidth() -> None:
    steps = Steps((0.0, 1.0), (0.0, 100.0), 2.0)
    assert steps.reach(0.5, 100) == 2.0
    assert steps.reach(0.5, 300) == 6.0
    assert steps.reach(0.5, 0) == 0.5


def test_messages_arrive_in_order_however_their_delays_vary() -> None:
    link = plain_link(jitter_s=0.05)
    sent = np.arange(500) * 0.005
    channel = Channel(link, seed=1)
    together = np.array([channel.transmit(time_s, 100, "up") for time_s in sent])
    assert (np.diff(together) >= 0).all()
    assert (np.diff(together) == 0).any(), "nothing was held back: the test proves nothing"
    delays = together - sent - 0.0001
    assert delays.min() >= 0
    apart = Channel(link, seed=1)
    alone = np.array([apart.transmit(time_s, 100, "up") - time_s for time_s in 10 * sent])
    assert alone.min() >= 0.0001 and alone.max() <= 0.1001
    assert alone.mean() == pytest.approx(0.0501, abs=5 * 0.05 / math.sqrt(3 * 500))


MEASURED_MS = {5: (215, 424, 865), 20: (229, 459, 927), 60: (290, 564, 1105), 150: (379, 757, 1480)}
"""Extra ms of a 100-byte TCP echo by round trip, whose packet was lost once, twice and three times.

Linux 6.18, network namespaces joined by a program that delays and drops packets; medians
of three.
"""
LATE_MS = 32
"""A Linux timer of 256 ms or more with 250 ticks per second ends up to 8 ticks late."""


class Losses:
    """Stands in for a channel's random generator, and loses the packets that a test names."""

    def __init__(self, *rounds: list[bool]) -> None:
        """``rounds``: for each transmission, True for each lost packet."""
        self.rounds = [*rounds]

    def random(self, count: int) -> np.ndarray:
        lost = self.rounds.pop(0) if self.rounds else [False] * count
        assert len(lost) == count
        return np.where(lost, 0.0, 1.0)


def extra_s(link: Link, num_bytes: int, *rounds: list[bool]) -> float:
    """Return the seconds that these losses add to a message, without the sending of bits."""
    channel = Channel(replace(link, loss=Steps.constant(0.5)))
    channel._lanes["up"].random = Losses(*rounds)  # type: ignore[assignment]
    arrived_s = channel.transmit(0.0, num_bytes, "up")
    return arrived_s - link.delay_s.at(0.0) - channel.traffic("up").airtime_s


@pytest.mark.parametrize("rtt_ms", MEASURED_MS)
def test_a_lost_packet_costs_what_linux_waits(rtt_ms: int) -> None:
    """The timeout is RTT + 200 ms. The loss probe takes the first, the third is the doubled one."""
    link = Link.constant(up_mbps=10, rtt_ms=rtt_ms)
    timeout_ms = rtt_ms + 200
    for losses, measured_ms in enumerate(MEASURED_MS[rtt_ms], start=1):
        found_ms = 1e3 * extra_s(link, 100, *[[True]] * losses)
        assert found_ms == pytest.approx({1: 1, 2: 2, 3: 4}[losses] * timeout_ms)
        assert found_ms <= measured_ms <= found_ms + losses * LATE_MS
    assert extra_s(link, 100) == pytest.approx(0, abs=1e-12)


def test_losses_of_five_percent_lie_between_the_timeout_and_the_loss_probe() -> None:
    """Medians over an echo that often waits with a raised RTTVAR, up to the probe's 2 RTT + 200."""
    for rtt_ms, median_ms in {5: 213, 20: 230, 60: 290, 150: 432}.items():
        least_ms = 1e3 * timeout_s(rtt_ms / 1e3)
        assert least_ms <= median_ms <= least_ms + rtt_ms + LATE_MS


def test_timeouts_double_up_to_two_minutes() -> None:
    waits_s = [timeout_s(0.1, number) for number in range(12)]
    assert waits_s[:4] == pytest.approx([0.3, 0.3, 0.6, 1.2])
    assert waits_s[-2:] == [120, 120] and timeout_s(0.1, 5000) == 120


def test_a_later_packet_of_the_message_reveals_a_loss_after_one_round_trip() -> None:
    link = Link.constant(up_mbps=10, rtt_ms=60)
    size = 3 * PACKET_BYTES - link.header_bytes
    assert extra_s(link, size, [True, False, False]) == pytest.approx(0.06)
    assert extra_s(link, size, [False, True, False]) == pytest.approx(0.06)
    assert extra_s(link, size, [True, False, True]) == pytest.approx(0.26)
    # The packet that is resent is its transmission's last one.
    assert extra_s(link, size, [True, False, False], [True]) == pytest.approx(0.06 + 0.26)
    assert extra_s(link, size, [False, False, True], [True]) == pytest.approx(2 * 0.26)


def test_a_later_message_reveals_a_loss_before_its_timeout() -> None:
    """It arrives, is acknowledged, and what was lost crosses the link again; see also RACK."""
    link = Link.constant(up_mbps=1e6, rtt_ms=60)

    def arrivals(sent_s: list[float], *rounds: list[bool]) -> list[float]:
        channel = Channel(replace(link, loss=Steps.constant(0.5)))
        channel._lanes["up"].random = Losses(*rounds)  # type: ignore[assignment]
        found = [channel.send(time_s, 100, "up") for time_s in sent_s]
        return [one.arrival_s for one in found]

    lost, kept = [True], [False]
    assert arrivals([0.0], lost) == pytest.approx([0.26 + 0.03], abs=1e-5)
    # Draws: the first message's two transmissions, then the second message's.
    early = arrivals([0.0, 0.04], lost, kept, kept)
    assert early == pytest.approx([0.04 + 0.06 + 0.03] * 2, abs=1e-5)
    at_once = arrivals([0.0, 0.001], lost, kept, kept)
    assert at_once == pytest.approx([1.25 * 0.06 + 0.03] * 2, abs=1e-5)
    late = arrivals([0.0, 0.25], lost, kept, kept)
    assert late == pytest.approx([0.26 + 0.03, 0.25 + 0.03 + 0.01], abs=1e-5)
    # A second message that is lost, too, reveals nothing; the third one reveals both.
    both = arrivals([0.0, 0.02, 0.04], lost, kept, lost, kept, kept)
    assert both == pytest.approx([0.04 + 0.06 + 0.03] * 3, abs=1e-5)


def test_losses_are_as_frequent_as_asked() -> None:
    """Transmissions are geometric: p / (1 - p) resent packets on average."""
    loss, count, size = 0.2, 4000, 1000
    channel = Channel(plain_link(loss=loss), seed=3)
    extra = [channel.transmit(100.0 * i, size, "up") - 100.0 * i - 0.05 for i in range(count)]
    traffic = channel.traffic("up")
    error = math.sqrt(loss) / (1 - loss) / math.sqrt(count)
    assert traffic.lost_packets / count == pytest.approx(loss / (1 - loss), abs=4 * error)
    assert traffic.wire_bytes == size * (count + traffic.lost_packets)
    # 0.3 s for one loss, with the probability 1 - p, and more bits on the wire.
    ones = [late for late in extra if 0.25 < late < 0.35]
    assert len(ones) / count == pytest.approx(loss * (1 - loss), abs=4 * 0.4 / math.sqrt(count))
    assert ones == pytest.approx([0.3 + 2 * size / 1e6] * len(ones))


def test_a_long_message_sends_only_its_lost_packets_again() -> None:
    size = 40 * PACKET_BYTES + 7
    channel = Channel(plain_link(loss=0.1), seed=0)
    arrival = channel.transmit(0.0, size, "up")
    traffic = channel.traffic("up")
    assert traffic.payload_bytes == size
    assert 1 <= traffic.lost_packets < 20
    again = traffic.wire_bytes - size
    assert (again - 7 * (again % PACKET_BYTES > 0)) % PACKET_BYTES == 0
    assert traffic.airtime_s == pytest.approx(traffic.wire_bytes / 1e6)
    assert arrival - 0.05 - traffic.airtime_s >= 0.1 - 1e-9


def test_bytes_are_conserved() -> None:
    """A saturated link carries exactly its capacity: the last message ends where the sum would."""
    link = replace(load_link(str(TRACES / "drive.csv")), header_bytes=60)
    random = np.random.default_rng(0)
    sizes = random.integers(0, 600_000, 300).tolist()
    channel = Channel(link)
    ends = [channel.transmit(0.0, size, "up") for size in sizes]
    traffic = channel.traffic("up")
    assert traffic.payload_bytes == sum(sizes)
    assert traffic.wire_bytes == sum(sizes) + 60 * len(sizes)
    assert traffic.messages == len(sizes)
    last_bit_s = link.up_bytes_per_s.reach(0.0, traffic.wire_bytes)
    assert traffic.airtime_s == pytest.approx(last_bit_s)
    assert integral(link.up_bytes_per_s, 0.0, last_bit_s) == pytest.approx(traffic.wire_bytes)
    assert ends[-1] >= last_bit_s and ends[-1] > link.up_bytes_per_s.period_s
    assert channel.traffic("down").wire_bytes == 0


def test_the_same_seed_gives_the_same_times_whatever_the_other_direction_does() -> None:
    def times(seed: int, answers: int) -> list[float]:
        channel = Channel(PRESETS["wifi"], seed=seed)
        for index in range(answers):
            channel.transmit(index, 500, "down")
        return [channel.transmit(index, 500, "up") for index in range(50)]

    assert times(0, 0) == times(0, 40)
    assert times(0, 0) != times(1, 0)


def test_an_estimate_learns_the_round_trip_and_keeps_its_bandwidth_in_an_outage() -> None:
    link = plain_link()
    estimate = LinkEstimate(replace(link.state(0.0), round_trip_s=0.5))
    channel = Channel(link)
    for index in range(60):
        sent_s = 2.0 * index
        arrived_s = channel.transmit(sent_s, 50_000, "up")
        back_s = channel.transmit(arrived_s, 100_000, "down")
        estimate.observe(back_s - sent_s, up_bytes=50_000, down_bytes=100_000)
    assert estimate.state.round_trip_s == pytest.approx(0.1, abs=0.4 * (7 / 8) ** 60 + 1e-9)
    estimate.set_bandwidth(up_bytes_per_s=0, down_bytes_per_s=7)
    assert estimate.state.up_bytes_per_s == 1e6
    assert estimate.state.down_bytes_per_s == 7


def test_energy_by_bytes_is_energy_by_powers() -> None:
    link = plain_link(header_bytes=50)
    channel = Channel(link)
    for index in range(20):
        channel.transmit(index, 1000 + index, "up")
        channel.transmit(index, 300, "down")
    up, down = channel.traffic("up"), channel.traffic("down")
    powers = {"draft_w": 15.0, "draft_s": 0.01, "transmit_w": 2.0, "receive_w": 1.2}
    model = EnergyModel(
        joules_per_draft_token=powers["draft_w"] * powers["draft_s"],
        joules_per_byte_up=powers["transmit_w"] / link.state(0.0).up_bytes_per_s,
        joules_per_byte_down=powers["receive_w"] / link.state(0.0).down_bytes_per_s,
        tail_j=0.6 * 5.0,
    )
    joules = replace(model, idle_w=0.5).joules(channel, num_drafted=80, elapsed_s=20.0)
    assert joules["draft"] == pytest.approx(15.0 * 0.01 * 80)
    assert joules["up"] == pytest.approx(2.0 * up.airtime_s)
    assert joules["down"] == pytest.approx(1.2 * down.airtime_s)
    assert (joules["idle"], joules["tail"]) == pytest.approx((10.0, 3.0))
    with pytest.raises(ValueError, match=r"energy.idle_w: -1; give"):
        replace(model, idle_w=-1)


def write(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_trace_is_read_and_repeats(tmp_path: Path) -> None:
    path = write(tmp_path, "t_ms,sinr_db,rtt_ms\n0,9,20\n50,8,40\n130,7,60\n")
    link = load_link(f"wifi:{path}")
    assert link.delay_s == Steps((0.0, 0.05, 0.13), (0.01, 0.02, 0.03), 0.21)
    assert (link.jitter_s, link.loss) == (NEVER, NEVER), "a measured round trip has both in it"
    assert link.note.startswith("loss and jitter_ms are 0: its round trips contain them")
    assert load_link(f"5g:{path}").note.startswith("jitter_ms are 0")
    assert link.up_bytes_per_s == PRESETS["wifi"].up_bytes_per_s
    times = {0.0: 0.02, 0.049: 0.02, 0.05: 0.04, 0.2: 0.06, 0.211: 0.02, 0.27: 0.04}
    for time_s, round_trip_s in times.items():
        assert link.state(time_s).round_trip_s == pytest.approx(round_trip_s)


def test_a_trace_of_bandwidth_keeps_the_delay_of_its_base(tmp_path: Path) -> None:
    path = write(tmp_path, "t_ms,up_mbps\n0,8\n1000,0\n2000,16\n")
    link = read_trace(path, base=PRESETS["4g"])
    assert link.up_bytes_per_s == Steps((0.0, 1.0, 2.0), (1e6, 0.0, 2e6), 3.0)
    assert link.delay_s == PRESETS["4g"].delay_s
    assert (link.jitter_s, link.loss) == (PRESETS["4g"].jitter_s, PRESETS["4g"].loss)
    assert link.note == ""
    with pytest.raises(ValueError, match=r"trace.csv: has no column rtt_ms; .* 5g:"):
        read_trace(path)


def test_a_trace_keeps_its_loss_and_jitter(tmp_path: Path) -> None:
    columns = "t_ms,up_mbps,down_mbps,rtt_ms,loss,jitter_ms"
    path = write(tmp_path, f"{columns}\n0,2,10,60,0.005,10\n1000,2,10,60,0.5,0\n")
    for name in (str(path), f"wifi:{path}"):
        link = load_link(name)
        assert link.loss == Steps((0.0, 1.0), (0.005, 0.5), 2.0)
        assert link.jitter_s == Steps((0.0, 1.0), (0.005, 0.0), 2.0)
        assert link.note == ""
    # Each message has the loss and the jitter of its moment.
    channel = Channel(replace(link, loss=Steps((0.0, 1.0), (0.0, 0.5), 2.0)), seed=0)
    extra = np.array([channel.transmit(t, 100, "up") - t - 0.03 for t in np.arange(0.0, 400, 0.5)])
    calm, rough = extra.reshape(-1, 4)[:, :2], extra.reshape(-1, 4)[:, 2:]
    assert np.ptp(calm[1:, 1]) > 0.008 and (calm[:, 1] < 0.2).mean() > 0.5
    assert (rough[:, 0] > 0.2).mean() == pytest.approx(0.5, abs=0.2)
    assert np.ptp(rough[rough < 0.01]) < 1e-9


def test_a_column_of_loss_alone_keeps_the_rest_of_its_base(tmp_path: Path) -> None:
    path = write(tmp_path, "t_ms,loss\n0,0.1\n9,0.2\n")
    link = load_link(f"wifi:{path}")
    assert link.loss.values == (0.1, 0.2) and link.jitter_s == PRESETS["wifi"].jitter_s
    assert link.delay_s == PRESETS["wifi"].delay_s and link.note == ""


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "t_ms must rise from 0"),
        ("t_ms,ping\n0,20\n9,20\n", "has none of the columns rtt_ms, up_mbps, down_mbps"),
        ("t_ms,rtt_ms\n0,20\n", "over two rows or more"),
        ("t_ms,loss\n0,0.1\n9,1\n", "link.loss: 1.0; give at least 0 and below 1"),
        ("t_ms,rtt_ms,jitter_ms\n0,9,0\n9,20,40\n", "link.jitter_s: 0.02 either way on a delay of"),
        ("t_ms,rtt_ms\n0,20\n50,fast\n", "line 3: could not convert string to float: 'fast'"),
        ("t_ms,rtt_ms\n0,20\n50,nan\n", "line 3: {'"),
        ("t_ms,rtt_ms\n0,20\n50,20\n50,21\n", "t_ms must rise from 0"),
        ("t_ms,up_mbps\n0,0\n50,0\n", "link.up_bytes_per_s: from 0.0 to 0.0; give"),
        (f"t_ms,rtt_ms\n0,20\n50,{'1' * 140_000}\n", "field larger than"),
    ],
)
def test_a_bad_trace_is_one_line_that_says_where(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ValueError) as caught:
        load_link(f"5g:{path}")
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_links_are_found_by_name(tmp_path: Path) -> None:
    assert load_link("4g") is PRESETS["4g"]
    assert PRESETS["4g"].state(7.0) == LinkState(
        up_bytes_per_s=6.25e6, down_bytes_per_s=6.25e6, round_trip_s=0.06
    )
    with pytest.raises(ValueError, match="link: '6g' is unknown; give 5g, 4g, wifi, rtt=60,"):
        load_link("6g")
    with pytest.raises(ValueError, match="link: '.*missing.csv' cannot be read"):
        load_link(f"5g:{tmp_path}/missing.csv")


def test_a_link_of_ones_own_is_its_numbers() -> None:
    link = load_link("rtt=60,up=2,down=10,loss=0.005,jitter=5")
    assert link == Link.constant(up_mbps=2, down_mbps=10, rtt_ms=60, jitter_ms=5, loss=0.005)
    assert link.state(0.0) == LinkState(
        up_bytes_per_s=250_000, down_bytes_per_s=1_250_000, round_trip_s=0.06
    )
    assert load_link("rtt=60,up=2") == Link.constant(up_mbps=2, down_mbps=2, rtt_ms=60)
    assert load_link("rtt=0,up=0.5,jitter=0").state(0.0).round_trip_s == 0


@pytest.mark.parametrize(
    "text, message",
    [
        ("rtt=60,upp=2", "'upp' is unknown; did you mean 'up'?"),
        ("rtt=60,speed=2", "'speed' is unknown; give one of rtt, up, down, loss, jitter"),
        ("rtt=60,up=2,up=3", "up is given twice; leave one out"),
        ("rtt=60,up=fast", "up: 'fast'; give a number"),
        ("rtt=60,up=", "up: ''; give a number"),
        ("rtt=60", "up is missing; give it, as in rtt=60,up=2"),
        ("up=2", "rtt is missing; give it, as in rtt=60,up=2"),
        ("rtt=-1,up=2", "rtt: -1.0; give at least 0"),
        ("rtt=nan,up=2", "rtt: nan; give at least 0"),
        ("rtt=60,up=0", "up: 0.0; give above 0"),
        ("rtt=60,up=2,down=inf", "down: inf; give above 0"),
        ("rtt=60,up=2,loss=1", "loss: 1.0; give at least 0 and below 1"),
        ("rtt=60,up=2,jitter=61", "jitter: 61.0; give at least 0 and at most 60"),
    ],
)
def test_bad_numbers_are_one_line_with_the_word_and_the_fix(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_link(text, "--links")
    assert str(caught.value).startswith(f"--links: {text!r}: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text, links",
    [
        ("5g, 4g,wifi:a.csv", ["5g", "4g", "wifi:a.csv"]),
        ("rtt=6,up=2,5g", ["rtt=6,up=2", "5g"]),
        ("5g,rtt=6,up=2, loss=0.1,rtt=9,up=2", ["5g", "rtt=6,up=2,loss=0.1", "rtt=9,up=2"]),
        ("rtt=6,up=2,run=3.csv", ["rtt=6,up=2", "run=3.csv"]),
        ("up=2,rtt=6", ["up=2", "rtt=6"]),
        ("5g,,4g", ["5g", "", "4g"]),
    ],
)
def test_rtt_begins_a_link_in_a_comma_list(text: str, links: list[str]) -> None:
    assert split_links(text) == links


def test_the_shipped_traces_are_what_their_program_makes(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("make_traces", TRACES / "make_traces.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.FOLDER = tmp_path
    module.main()
    shipped = sorted(path.name for path in TRACES.glob("*.csv"))
    assert shipped == sorted(path.name for path in tmp_path.iterdir())
    for name in shipped:
        made, held = (
            np.loadtxt(folder / name, delimiter=",", skiprows=1) for folder in (tmp_path, TRACES)
        )
        assert made == pytest.approx(held, abs=0.011), name
        load_link(f"wifi:{TRACES / name}")

"""Compute arrival times and energy of messages on a virtual link between edge and cloud.

Bandwidth and delay are piecewise constant, so transmission times are exact integrals.

    arrival_s = Channel(PRESETS["wifi"], seed=0).transmit(0.0, 72, "up")

    load_link("wifi")                                   # constants
    load_link("rtt=60,up=2,down=10,loss=0.005,jitter=5")    # your own
    load_link("5g:assets/net_traces/wifi_busy.csv")     # 5G's bandwidth, delays from a trace
    load_link("assets/net_traces/drive.csv")            # bandwidth and delays from a trace
"""

import csv
import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np

from ...errors import check_ranges, nearest
from ...files import read_text

Direction = Literal["up", "down"]
"""up: from the edge to the cloud."""
BYTES_PER_MEGABIT = 1e6 / 8
PACKET_BYTES = 1500
"""Size of the largest Ethernet packet. A longer message is split, and any packet may be lost."""
MIN_VARIATION_S, MAX_TIMEOUT_S = 0.2, 120.0
"""Linux's bounds: the least that a timeout exceeds the round trip by, and the longest timeout."""


@dataclass(frozen=True)
class Steps:
    """Periodic step function of time."""

    starts_s: tuple[float, ...]
    """Start of each step; ascending, the first is 0."""
    values: tuple[float, ...]
    period_s: float

    @classmethod
    def constant(cls, value: float) -> "Steps":
        return cls((0.0,), (value,), math.inf)

    def at(self, time_s: float) -> float:
        return self.values[self._piece(time_s % self.period_s)]

    def reach(self, start_s: float, amount: float) -> float:
        """Return the earliest t at which the integral from ``start_s`` equals ``amount``.

        Whole periods are counted by a division and only the rest is looked up, so long waits take
        no extra computing time.
        """
        # Nothing to send: arrived at once, even in an outage.
        if not amount:
            return start_s
        # A constant's period is infinite, so the remainder is the time itself.
        phase_s = start_s % self.period_s
        piece = self._piece(phase_s)
        before = self._sums[piece] + self.values[piece] * (phase_s - self.starts_s[piece])
        repeats, target = divmod(before + amount, self._sums[-1])
        if not target:  # reached at a period's end, even if the next one begins with zeros
            repeats, target = repeats - 1, self._sums[-1]
        # An outage adds nothing to the sums, so bisect_left skips it: no division by 0.
        last = bisect_left(self._sums, target) - 1  # the sum reaches the target in this piece
        end_s = self.starts_s[last] + (target - self._sums[last]) / self.values[last]
        # 0 times an infinite period would be NaN.
        return start_s + (end_s - phase_s) + (repeats * self.period_s if repeats else 0.0)

    def _piece(self, phase_s: float) -> int:
        # A start belongs to its own piece, hence the right side.
        return bisect_right(self.starts_s, phase_s) - 1

    @cached_property
    def _sums(self) -> list[float]:
        """Return the integrals from 0 to each start, and from 0 to the end of the period."""
        widths_s = (b - a for a, b in pairwise((*self.starts_s, self.period_s)))
        return [0.0, *accumulate(v * w for v, w in zip(self.values, widths_s, strict=True))]


NEVER = Steps.constant(0.0)


@dataclass(frozen=True, kw_only=True)
class LinkState:
    """State of a link at one moment, exact or estimated."""

    up_bytes_per_s: float
    down_bytes_per_s: float
    round_trip_s: float
    """Sum of both one-way delays, without the time for transmission and computing."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """Bandwidth, latency and losses of a link. A ``Channel`` sends messages over the link."""

    up_bytes_per_s: Steps
    """Bandwidth from the edge to the cloud. 0 is an outage, during which messages wait."""
    down_bytes_per_s: Steps
    delay_s: Steps
    """Delay one way, the same in both directions."""
    jitter_s: Steps = NEVER
    """Maximum deviation of each message's delay; drawn uniformly from -``jitter_s`` to
    ``jitter_s``, as netem does by default."""
    loss: Steps = NEVER
    """Loss probability per packet and transmission."""
    header_bytes: int = 62
    """Header bytes per message: IPv4 20, TCP 20, a TLS 1.3 record 22."""
    note: str = field(default="", compare=False)
    """What a report should say about the link's source; "": nothing."""

    def __post_init__(self) -> None:
        for name in ("up_bytes_per_s", "down_bytes_per_s", "delay_s"):
            low, high = min(getattr(self, name).values), max(getattr(self, name).values)
            # Outages may last long, but not forever: ``reach`` divides by a period's sum.
            is_dead = name != "delay_s" and not high
            if is_dead or not 0 <= low <= high < math.inf:
                raise ValueError(
                    f"link.{name}: from {low} to {high}; give finite numbers of 0 or more, and "
                    "some bandwidth"
                )
        check_ranges(self, {"header_bytes": "[0, inf)"}, "link.")
        check_ranges(SimpleNamespace(loss=self.loss.values), {"loss": "[0, 1)"}, "link.")
        # More jitter than delay would be clamped at 0 in ``transmit``, and raise the mean.
        for time_s in {*self.jitter_s.starts_s, *self.delay_s.starts_s}:
            jitter_s, delay_s = self.jitter_s.at(time_s), self.delay_s.at(time_s)
            if not 0 <= jitter_s <= delay_s:
                raise ValueError(
                    f"link.jitter_s: {jitter_s} either way on a delay of {delay_s}; give 0 up to "
                    "the delay"
                )

    @classmethod
    def constant(
        cls,
        *,
        up_mbps: float,
        down_mbps: float | None = None,
        rtt_ms: float,
        jitter_ms: float = 0.0,
        loss: float = 0.0,
    ) -> "Link":
        """Build a constant link from the papers' units, Mbit/s and milliseconds.

        ``down_mbps`` is ``up_mbps`` by default. Each direction gets half of ``jitter_ms``.
        """
        down_mbps = up_mbps if down_mbps is None else down_mbps
        return cls(
            up_bytes_per_s=Steps.constant(up_mbps * BYTES_PER_MEGABIT),
            down_bytes_per_s=Steps.constant(down_mbps * BYTES_PER_MEGABIT),
            # 2e3: half a round trip each way, in milliseconds.
            delay_s=Steps.constant(rtt_ms / 2e3),
            jitter_s=Steps.constant(jitter_ms / 2e3),
            loss=Steps.constant(loss),
        )

    def state(self, time_s: float) -> LinkState:
        """Return the bandwidths and the round trip at ``time_s``, without jitter and loss."""
        return LinkState(
            up_bytes_per_s=self.up_bytes_per_s.at(time_s),
            down_bytes_per_s=self.down_bytes_per_s.at(time_s),
            round_trip_s=2 * self.delay_s.at(time_s),
        )


PRESETS: dict[str, Link] = {
    "5g": Link.constant(up_mbps=300, rtt_ms=20, jitter_ms=3),
    "4g": Link.constant(up_mbps=50, rtt_ms=60, jitter_ms=10, loss=0.001),
    "wifi": Link.constant(up_mbps=10, rtt_ms=120, jitter_ms=40, loss=0.01),
}
"""FlexSpec's three networks (arXiv 2601.00644). The bandwidths are from the paper's Table I (strong
5G, average 4G, weak WiFi). The table has one bandwidth per network, so both directions use it. The
paper gives no delays, so round trips, jitter and loss are our assumptions."""


@dataclass(kw_only=True)
class Traffic:
    """Messages and bytes carried in one direction."""

    messages: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0
    """Bytes on the wire, headers and lost packets included."""
    lost_packets: int = 0
    airtime_s: float = 0.0
    """Time spent sending bits: T_up and T_down in the papers' energy models, including outages."""


@dataclass(kw_only=True, eq=False)
class Transmission:
    """A message on its way. A later one may reveal its loss, and so let it arrive earlier."""

    arrival_s: float = 0.0
    """When it is delivered, never before the messages sent before it."""
    own_s: float = 0.0
    """When it has arrived itself."""
    left_s: float = 0.0
    """When its last bit left for the first time."""
    resent_s: float | None = None
    """When TCP's first timeout ends, if its last packet is lost."""


@dataclass(kw_only=True)
class _Lane(Traffic):
    """One direction of a channel."""

    bytes_per_s: Steps
    random: np.random.Generator
    free_s: float = 0.0
    flying: list[Transmission] = field(default_factory=list)
    delivered_s: float = 0.0
    """Arrival of the newest message that flies no more."""

    def order(self) -> None:
        """Let no message overtake the one before."""
        floor_s = self.delivered_s
        for sent in self.flying:
            floor_s = sent.arrival_s = max(floor_s, sent.own_s)

    def reveal(self, at_s: float, round_trip_s: float) -> None:
        """Resend what is lost and waits for its timeout, because a later packet has arrived.

        Its acknowledgment comes at ``at_s``. RACK (RFC 8985) waits for a quarter of a round trip
        more than one round trip, because the packet may only be late.
        """
        for sent in self.flying:
            if sent.resent_s is not None:
                known_s = max(at_s, sent.left_s + 1.25 * round_trip_s)
                sent.own_s -= max(0.0, sent.resent_s - known_s)
                sent.resent_s = None


def timeout_s(round_trip_s: float, num_before: int = 0) -> float:
    """Return how long TCP waits before it resends a packet whose loss no later packet reveals.

    RTO = SRTT + max(4 RTTVAR, 200 ms)     RFC 6298, Eq. 2.3, with Linux's minimum of 200 ms

    On a steady link 4 RTTVAR is less than 200 ms, so RTO = RTT + 200 ms. The first wait belongs to
    the tail loss probe (RFC 8985, section 7.2): min(2 SRTT + 200 ms, RTO) for one packet in flight,
    so the RTO again. The second wait is the RTO, and every further one twice the one before.

    Deviation: Linux's timers end up to 32 ms late. For some packets after a lost acknowledgment,
    RTTVAR is larger, and the wait up to 2 RTT + 200 ms.

    Args:
        num_before: number of earlier timeouts for the same packet.
    """
    first_s = round_trip_s + MIN_VARIATION_S
    # Doubled from the third on. 2.0**1024 would overflow, long after the limit.
    return min(first_s * 2.0 ** min(max(num_before - 1, 0), 30), MAX_TIMEOUT_S)


class Channel:
    """Link with messages, which queue for the bandwidth and arrive in order.

    The same link, seed and calls give the same times. Each direction has its own random generator.
    """

    def __init__(self, link: Link, *, seed: int = 0) -> None:
        self.link = link
        # Separate generators: another message up must not change the losses down.
        up, down = np.random.SeedSequence(seed).spawn(2)
        self._lanes: dict[Direction, _Lane] = {
            "up": _Lane(bytes_per_s=link.up_bytes_per_s, random=np.random.default_rng(up)),
            "down": _Lane(bytes_per_s=link.down_bytes_per_s, random=np.random.default_rng(down)),
        }

    def traffic(self, direction: Direction) -> Traffic:
        return self._lanes[direction]

    def transmit(self, now_s: float, num_bytes: int, direction: Direction) -> float:
        """Send a message as ``send`` does, and return its arrival time if no other one follows."""
        return self.send(now_s, num_bytes, direction).arrival_s

    def send(self, now_s: float, num_bytes: int, direction: Direction) -> Transmission:
        """Send a message. For each direction, call this in sending order.

        A message waits until the one before it has left. It is delivered after the one before it.
        The link's header is added to ``num_bytes``. If an earlier message's last packet is lost,
        this one may reveal it before TCP's timeout, and then both arrive earlier.

        Deviation: what is resent delays no message that has been sent in the meantime.
        """
        link, lane = self.link, self._lanes[direction]
        while lane.flying and lane.flying[0].arrival_s <= now_s:
            lane.delivered_s = lane.flying.pop(0).arrival_s
        full, rest = divmod(num_bytes + link.header_bytes, PACKET_BYTES)
        sizes = [PACKET_BYTES] * full + [rest] * (rest > 0)
        lane.messages += 1
        lane.payload_bytes += num_bytes
        start_s, num_timeouts, sent = max(now_s, lane.free_s), 0, Transmission()
        while True:
            end_s = lane.bytes_per_s.reach(start_s, sum(sizes))
            lane.wire_bytes += sum(sizes)
            lane.airtime_s += end_s - start_s
            # The delay begins with the last bit, so read it at that moment.
            delay_s = link.delay_s.at(end_s)
            loss = link.loss.at(end_s)
            is_lost = lane.random.random(len(sizes)) < loss if loss else np.zeros(len(sizes), bool)
            if not sent.left_s:
                sent.left_s = lane.free_s = end_s
                if not is_lost.all():
                    lane.reveal(end_s + 2 * delay_s, 2 * delay_s)
            sizes = [size for size, lost in zip(sizes, is_lost, strict=True) if lost]
            if not sizes:
                break
            lane.lost_packets += len(sizes)
            # A later packet of this message that arrives reveals a loss after one round trip (RACK,
            # RFC 8985). Only a timeout reveals that the last packet is lost. The delay is one way.
            wait_s = 2 * delay_s
            if is_lost[-1]:
                wait_s, num_timeouts = timeout_s(wait_s, num_timeouts), num_timeouts + 1
                if num_timeouts == 1:
                    sent.resent_s = end_s + wait_s
            start_s = end_s + wait_s
        if jitter_s := link.jitter_s.at(end_s):
            delay_s = max(0.0, delay_s + jitter_s * lane.random.uniform(-1, 1))
        sent.own_s = end_s + delay_s
        lane.flying.append(sent)
        lane.order()
        return sent


class LinkEstimate:
    """Edge's estimate of its link from reported bandwidths and observed round trips.

    The estimate begins with ``state``. A new round trip has weight 1/8, as in TCP (RFC 6298).
    """

    def __init__(self, state: LinkState) -> None:
        self.state = state

    def set_bandwidth(self, *, up_bytes_per_s: float, down_bytes_per_s: float) -> None:
        """Set the bandwidths reported by the radio (FlexSpec's R_n), except zeros.

        Bandwidth 0 is an outage. Its end is unknown, and no draft length helps until then.
        """
        self.state = replace(
            self.state,
            up_bytes_per_s=up_bytes_per_s or self.state.up_bytes_per_s,
            down_bytes_per_s=down_bytes_per_s or self.state.down_bytes_per_s,
        )

    def observe(self, network_s: float, *, up_bytes: int, down_bytes: int) -> None:
        """Update the round trip from the time ``network_s`` for a request and its answer.

        ``network_s`` excludes the cloud's computing time. ``up_bytes`` and ``down_bytes`` are
        sizes on the wire, including headers.
        """
        state = self.state
        # Sending time depends on the draft length: only the rest is a property of the link.
        sending_s = up_bytes / state.up_bytes_per_s + down_bytes / state.down_bytes_per_s
        # A bandwidth estimate that is too low would make the rest negative.
        seen_s = max(0.0, network_s - sending_s)
        smoothed_s = state.round_trip_s + (seen_s - state.round_trip_s) / 8
        self.state = replace(state, round_trip_s=smoothed_s)


@dataclass(frozen=True, kw_only=True)
class EnergyModel:
    """Energy model of an edge device. The energies per token and byte have no defaults."""

    joules_per_draft_token: float
    joules_per_byte_up: float
    joules_per_byte_down: float
    idle_w: float = 0.0
    """Power over the whole time, in addition to sending and drafting."""
    tail_j: float = 0.0
    """Energy spent once at the end, before the radio sleeps again."""

    def __post_init__(self) -> None:
        check_ranges(self, dict.fromkeys(vars(self), "[0, inf)"), "energy.")

    def joules(self, channel: Channel, *, num_drafted: int, elapsed_s: float) -> dict[str, float]:
        """Return joules by cause, with the keys draft, up, down, idle and tail."""
        return {
            "draft": self.joules_per_draft_token * num_drafted,
            # Headers and resent packets cost energy as well.
            "up": self.joules_per_byte_up * channel.traffic("up").wire_bytes,
            "down": self.joules_per_byte_down * channel.traffic("down").wire_bytes,
            "idle": self.idle_w * elapsed_s,
            "tail": self.tail_j,
        }


OWN_LINK = "rtt=60,up=2,down=10,loss=0.005,jitter=5"
"""Example of a constant link in words. Round trip and its largest deviation in milliseconds, rates
in Mbit/s, loss as a fraction; all but ``rtt`` and ``up`` may be left out, and down is up then."""


def split_links(text: str) -> list[str]:
    """Split a comma list of links. ``rtt=`` begins a link that the next KEY=NUMBER continue."""
    links: list[str] = []
    for word in map(str.strip, text.split(",")):
        is_number = "=" in word and not word.endswith(".csv")
        if is_number and not word.startswith("rtt=") and links and links[-1].startswith("rtt="):
            links[-1] += f",{word}"
        else:
            links.append(word)
    return links


def read_own_link(text: str, where: str) -> Link:
    """Read a constant link such as ``OWN_LINK``. ``where`` begins the message of a ValueError."""
    values: dict[str, float] = {}
    known = [word.partition("=")[0] for word in OWN_LINK.split(",")]
    for word in text.split(","):
        key, _, value = map(str.strip, word.partition("="))
        if key not in known:
            raise ValueError(f"{where}: {key!r} is unknown; {nearest(key, known)}")
        if key in values:
            raise ValueError(f"{where}: {key} is given twice; leave one out")
        try:
            values[key] = float(value)
        except ValueError as error:
            raise ValueError(f"{where}: {key}: {value!r}; give a number") from error
    if missing := [key for key in ("rtt", "up") if key not in values]:
        raise ValueError(f"{where}: {missing[0]} is missing; give it, as in {OWN_LINK}")
    values = {"down": values["up"], "loss": 0.0, "jitter": 0.0} | values
    # Jitter is a deviation of the round trip, which never becomes negative.
    ranges = {"rtt": "[0, inf)", "loss": "[0, 1)", "jitter": f"[0, {values['rtt']}]"}
    ranges |= dict.fromkeys(("up", "down"), "(0, inf)")
    check_ranges(SimpleNamespace(**values), ranges, f"{where}: ")
    return Link.constant(
        up_mbps=values["up"],
        down_mbps=values["down"],
        rtt_ms=values["rtt"],
        jitter_ms=values["jitter"],
        loss=values["loss"],
    )


def load_link(text: str, field: str = "link") -> Link:
    """Load a link by its name, numbers or file.

    Args:
        text: ``5g``, ``4g``, ``wifi``, numbers such as ``OWN_LINK``, ``FILE.csv`` or
            ``PRESET:FILE.csv``.
        field: what messages call the link.

    Raises:
        ValueError: unknown name or key, a number out of range, or an invalid file.
    """
    if text in PRESETS:
        return PRESETS[text]
    if "=" in text and not text.endswith(".csv"):
        return read_own_link(text, f"{field}: {text!r}")
    preset, _, trace = text.partition(":")
    if trace and preset in PRESETS:
        return read_trace(Path(trace), base=PRESETS[preset])
    if text.endswith(".csv"):
        return read_trace(Path(text))
    raise ValueError(
        f"{field}: {text!r} is unknown; give {', '.join(PRESETS)}, {OWN_LINK}, TRACE.csv, or one "
        "of the names and a trace (5g:TRACE.csv)"
    )


TRACE_COLUMNS = {
    "rtt_ms": ("delay_s", 0.5e-3),
    "up_mbps": ("up_bytes_per_s", BYTES_PER_MEGABIT),
    "down_mbps": ("down_bytes_per_s", BYTES_PER_MEGABIT),
    "loss": ("loss", 1.0),
    "jitter_ms": ("jitter_s", 0.5e-3),
}
"""For each column, the field of ``Link`` and the factor that converts to the field's unit."""


def read_trace(path: Path, *, base: Link | None = None) -> Link:
    """Read a link from a CSV file with the column ``t_ms`` and some of ``TRACE_COLUMNS``.

    ``t_ms`` starts at 0. A row is valid until the next one, and the last row for as long as the row
    before it. ``loss`` is a fraction of the packets, ``jitter_ms`` a round trip's largest
    deviation. Other columns, such as signal strength, are ignored. Missing columns come from
    ``base``. If the file has round trips, missing loss and jitter are 0, because the measured round
    trips contain both; the link's ``note`` says so if ``base`` has some.
    """
    rows = _trace_rows(path)
    starts_s = tuple(row["t_ms"] / 1e3 for row in rows)
    period_s = (2 * rows[-1]["t_ms"] - rows[-2]["t_ms"]) / 1e3
    found = {
        key: Steps(starts_s, tuple(row[name] * factor for row in rows), period_s)
        for name, (key, factor) in TRACE_COLUMNS.items()
        if name in rows[0]
    }
    missing = [name for name in TRACE_COLUMNS if name not in rows[0]]
    if not found:
        raise ValueError(f"{path}: has none of the columns {', '.join(TRACE_COLUMNS)}; add one")
    if base is None and (needed := [name for name in missing if name.endswith(("rtt_ms", "mbps"))]):
        raise ValueError(
            f"{path}: has no column {needed[0]}; say which link has the rest, as in 5g:{path}"
        )
    note = ""
    if "delay_s" in found:
        dropped = {
            name: TRACE_COLUMNS[name][0] for name in missing if name in ("loss", "jitter_ms")
        }
        found |= dict.fromkeys(dropped.values(), NEVER)
        if lost := [
            name for name, key in dropped.items() if base and any(getattr(base, key).values)
        ]:
            note = f"{' and '.join(lost)} are 0: its round trips contain them; add columns for more"
    try:
        # Without a base the file has columns for every value on which presets differ.
        return replace(base or PRESETS["5g"], **found, note=note)  # type: ignore[arg-type] # by name
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _trace_rows(path: Path) -> list[dict[str, float]]:
    """Return a trace's rows as numbers. The ``ValueError`` for a wrong number names its line."""
    rows: list[dict[str, float]] = []
    reader = csv.DictReader(read_text(path, "link").splitlines())
    try:
        wanted = {"t_ms", *TRACE_COLUMNS} & {*(reader.fieldnames or ())}
        for row in reader:
            # A short row has None here; float("") raises the ValueError handled below.
            rows.append({name: float(row[name] or "") for name in wanted})
            if not all(0 <= value < math.inf for value in rows[-1].values()):
                raise ValueError(f"{rows[-1]}")
    except (csv.Error, ValueError) as error:
        where = f"{path}, line {reader.line_num}"
        raise ValueError(f"{where}: {error}; give finite numbers of 0 or more") from error
    # NaN for a missing column is true, so it is refused below.
    times_ms = [row.get("t_ms", math.nan) for row in rows]
    # One row alone would leave its own duration unknown.
    if len(rows) < 2 or times_ms[0] or any(a >= b for a, b in pairwise(times_ms)):
        raise ValueError(f"{path}: t_ms must rise from 0 over two rows or more")
    return rows

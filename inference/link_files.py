"""Links from names and files: presets, recorded or made-up traces, and profiles of constants.

load_link("wifi")                                   # constants
load_link("5g:assets/net_traces/wifi_busy.csv")     # 5G's bandwidth, the delays of a trace
load_link("assets/net_traces/drive.csv")            # bandwidth and delays of a trace
load_link("assets/net_traces/profiles.json:satellite")
"""

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from pipedraft.files import read_text
from pipedraft.inference.channel import BYTES_PER_MEGABIT, PRESETS, Link, Steps


def load_link(text: str) -> Link:
    """``5g``, ``4g``, ``wifi``, ``FILE.csv``, ``PRESET:FILE.csv`` or ``FILE.json:NAME``.

    Raises:
        ValueError: none of these, or a file that does not say what it should.
    """
    if text in PRESETS:
        return PRESETS[text]
    preset, _, trace = text.partition(":")
    if trace and preset in PRESETS:
        return read_trace(Path(trace), base=PRESETS[preset])
    if text.endswith(".csv"):
        return read_trace(Path(text))
    file, _, name = text.rpartition(":")
    if file.endswith(".json"):
        profiles = read_profiles(Path(file))
        if name not in profiles:
            raise ValueError(f"link: {file} has no profile {name!r}; give {', '.join(profiles)}")
        return profiles[name]
    raise ValueError(
        f"link: {text!r} is unknown; give {', '.join(PRESETS)}, TRACE.csv, one of the names and a "
        "trace (5g:TRACE.csv), or PROFILES.json:NAME"
    )


TRACE_COLUMNS = ("rtt_ms", "up_mbps", "down_mbps")


def read_trace(path: Path, *, base: Link | None = None) -> Link:
    """A CSV file with a header: ``t_ms`` from 0, and ``rtt_ms``, ``up_mbps`` or ``down_mbps``.

    A row holds until the next one, the last one as long as the one before it. Further columns
    (signal strength) are ignored. Jitter and loss are those of ``base`` unless the file has round
    trips: these were measured with both.

    Args:
        base: has what the file has no column for.
    """
    rows = list(_trace_rows(path))
    starts_s = tuple(row["t_ms"] / 1e3 for row in rows)
    period_s = (2 * rows[-1]["t_ms"] - rows[-2]["t_ms"]) / 1e3
    columns = {
        name: Steps(starts_s, tuple(row[name] for row in rows), period_s)
        for name in TRACE_COLUMNS
        if name in rows[0]
    }
    missing = [name for name in TRACE_COLUMNS if name not in columns]
    if base is None and missing:
        raise ValueError(
            f"{path}: has no column {missing[0]}; say which link has the rest, as in 5g:{path}"
        )
    if base is not None and len(missing) == len(TRACE_COLUMNS):
        raise ValueError(f"{path}: has none of the columns {', '.join(TRACE_COLUMNS)}; add one")
    fields: dict[str, Steps | float] = {}
    if "rtt_ms" in columns:
        fields["delay_s"] = _scaled(columns["rtt_ms"], 0.5e-3)
        fields |= {"jitter_s": 0.0, "loss": 0.0}
    for name in ("up", "down"):
        if f"{name}_mbps" in columns:
            fields[f"{name}_bytes_per_s"] = _scaled(columns[f"{name}_mbps"], BYTES_PER_MEGABIT)
    try:
        # Without a base the file has a column for all that is not the same in every preset.
        return replace(base or PRESETS["5g"], **fields)  # type: ignore[arg-type] # by name
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _scaled(steps: Steps, factor: float) -> Steps:
    return replace(steps, values=tuple(value * factor for value in steps.values))


def _trace_rows(path: Path) -> Iterator[dict[str, float]]:
    """Rows as numbers.

    Raises:
        ValueError: names the file, the line and the column.
    """
    previous_ms, count = -math.inf, 0
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames is None or "t_ms" not in reader.fieldnames:
            raise ValueError(f"{path}: has no column t_ms; the first line names the columns")
        wanted = [name for name in ("t_ms", *TRACE_COLUMNS) if name in reader.fieldnames]
        for count, row in enumerate(reader, start=1):
            line = f"{path}, line {reader.line_num}"
            numbers = {name: _number(row[name], f"{line}: {name}") for name in wanted}
            time_ms = numbers["t_ms"]
            if count == 1 and time_ms:
                raise ValueError(f"{line}: t_ms is {time_ms:g}; traces begin at 0")
            if time_ms <= previous_ms:
                raise ValueError(f"{line}: t_ms is {time_ms:g} after {previous_ms:g}; sort by time")
            previous_ms = time_ms
            yield numbers
    if count < 2:
        raise ValueError(f"{path}: has {count} rows; a trace needs two, to know when it repeats")


def _number(text: str | None, place: str) -> float:
    try:
        value = float(text or "")
    except ValueError:
        raise ValueError(f"{place} is {text!r}; give a number") from None
    if not 0 <= value < math.inf:
        raise ValueError(f"{place} is {text!r}; give 0 or more, finite")
    return value


PROFILE_FIELDS = {"up_mbps", "down_mbps", "rtt_ms", "one_way_ms", "jitter_ms", "loss"}


def read_profiles(path: Path) -> dict[str, Link]:
    """Constants by name: JSON objects of ``up_mbps``, ``rtt_ms`` or ``one_way_ms``, and what else
    ``Link.constant`` takes. Names with an underscore in front are remarks.

    Raises:
        ValueError: names the file, the profile and the field.
    """
    try:
        held = json.loads(read_text(path, "link"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: {error.msg}; give JSON") from error
    except RecursionError as error:
        raise ValueError(f"{path}: is nested too deeply; give JSON") from error
    if not isinstance(held, dict):
        raise ValueError(f"{path}: is no object of profiles; give {{NAME: {{...}}, ...}}")
    return {
        name: _profile(f"{path}: {name}", fields)
        for name, fields in held.items()
        if not name.startswith("_")
    }


def _profile(place: str, fields: object) -> Link:
    if not isinstance(fields, Mapping):
        raise ValueError(f"{place}: is no object; give up_mbps and rtt_ms")
    for field, value in fields.items():
        if field not in PROFILE_FIELDS:
            raise ValueError(f"{place}.{field}: is unknown; give {', '.join(PROFILE_FIELDS)}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{place}.{field}: {value!r} is no number")
        if not 0 <= value < math.inf:
            raise ValueError(f"{place}.{field}: {value} is no size; give 0 or more, finite")
    known = dict(fields)
    if ("rtt_ms" in known) == ("one_way_ms" in known) or "up_mbps" not in known:
        raise ValueError(f"{place}: give up_mbps and either rtt_ms or one_way_ms")
    if "one_way_ms" in known:
        known["rtt_ms"] = 2 * known.pop("one_way_ms")
    try:
        return Link.constant(**known)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error

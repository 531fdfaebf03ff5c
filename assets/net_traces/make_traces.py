"""Make the synthetic traces of this folder; the same files every time.

python assets/net_traces/make_traces.py
"""

from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent
SEED = 20_260_314
SECONDS = 60


def wifi_rtt_ms(random: np.random.Generator, base_ms: float, jitter_ms: float) -> np.ndarray:
    """Round trips every 20 ms over WiFi, after C. Huitema's model of its latencies.

    base + X ms per round trip: X a Poisson(1) count, less U(0, 1) where it is 1 or more; with
    probability (jitter - 1) / 90 a Poisson(12) count of 7.5 ms is added, a station that waits for
    its turn. Packets do not overtake: an answer is never earlier than the one before it.
    """
    count = SECONDS * 50
    few = random.poisson(1, count).astype(float)
    few -= np.where(few >= 1, random.random(count), 0)
    is_long = random.random(count) < (jitter_ms - 1) / 90
    rtt_ms = base_ms + few + np.where(is_long, 7.5 * random.poisson(12, count), 0)
    sent_ms = 20.0 * np.arange(count)
    return np.maximum.accumulate(sent_ms + rtt_ms) - sent_ms


def drive(random: np.random.Generator) -> np.ndarray:
    """A cell phone on the road, every 100 ms: up and down in Mbit/s, round trip in ms.

    Log-bandwidth is a Gaussian AR(1) with a correlation time of 5 s around 8 (up) and 30 Mbit/s
    (down); the round trip is 45 ms, longer where the bandwidth is low; two tunnels of 1.5 s without
    any bandwidth. All numbers are assumptions.
    """
    count = SECONDS * 10
    keep = np.exp(-0.1 / 5)
    level = np.empty(count)
    level[0] = random.normal()
    for row in range(1, count):
        level[row] = keep * level[row - 1] + np.sqrt(1 - keep**2) * random.normal()
    gain = np.exp(0.7 * level)
    table = np.stack([8 * gain, 30 * gain, 45 + 10 / gain + random.exponential(3, count)], axis=1)
    for start in (200, 430):
        table[start : start + 15, :2] = 0
    return table


def write(name: str, header: str, step_ms: int, table: np.ndarray) -> None:
    lines = [f"t_ms,{header}"]
    for row, values in enumerate(table):
        lines.append(",".join([str(row * step_ms), *(f"{value:.2f}" for value in values)]))
    (FOLDER / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    for index, (name, base_ms, jitter_ms) in enumerate(
        [("wifi_good", 4, 1), ("wifi_busy", 12, 10), ("wifi_bad", 25, 40)]
    ):
        random = np.random.default_rng([SEED, index])
        table = wifi_rtt_ms(random, base_ms, jitter_ms)[:, None]
        write(f"{name}.csv", "rtt_ms", 20, table)
    table = drive(np.random.default_rng([SEED, 3]))
    write("drive.csv", "up_mbps,down_mbps,rtt_ms", 100, table)


if __name__ == "__main__":
    main()

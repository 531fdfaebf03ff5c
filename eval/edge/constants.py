"""Published and assumed constants of computing and energy, for the virtual clock."""

from typing import Any

from pipedraft.inference.channel import EnergyModel
from pipedraft.inference.pipelines.link import Times

TIMES: dict[str, Times] = {
    "picospec": Times(draft_s=0.097 / 4, verify_s=0.087, cloud_draft_s=0.097 / 16),
    "flexspec": Times(draft_s=0.0085, verify_s=0.166, cloud_draft_s=0.0085 / 4),
}
"""Edge: PicoSpec's Qwen3-0.6B (97 ms for 4 tokens), FlexSpec's draft on a Jetson AGX. Cloud:
PicoSpec's 32B and 70B targets. Assumptions: a draft in the cloud takes a quarter of the edge's
time, and rows after the first of a pass cost nothing (they read the same weights)."""

EDGE_W = 15.0
"""Of the edge's processor while it drafts: a Jetson AGX Orin's smallest power mode; assumption."""
RADIOS: dict[str, dict[str, Any]] = {
    "cellular": {"uj_per_bit": (0.43839, 0.05197), "idle_w": 1.060, "tail_s": 11.576},
    "wifi": {"uj_per_bit": (0.28317, 0.13701), "idle_w": 0.119, "tail_s": 0.238},
}
"""Phones of 2012 (Huang et al., MobiSys 2012: LTE and WiFi). Between messages the radio stays in
its tail state, whose power is the idle one here."""


def radio_energy(radio: str, *, draft_s: float) -> EnergyModel:
    """
    Args:
        draft_s: of one draft token at ``EDGE_W``.
    """
    values = RADIOS[radio]
    up, down = (8e-6 * energy for energy in values["uj_per_bit"])
    return EnergyModel(
        joules_per_draft_token=EDGE_W * draft_s,
        joules_per_byte_up=up,
        joules_per_byte_down=down,
        idle_w=values["idle_w"],
        tail_j=values["idle_w"] * values["tail_s"],
    )


def radio_of(link: str) -> str:
    """By the name of a link: WiFi where it says so."""
    return "wifi" if "wifi" in link else "cellular"

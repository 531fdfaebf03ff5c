"""Schedules for a target behind a network. They decide by time and by the batches in flight."""

from ...schedules import SCHEDULES, find_schedules

SCHEDULES.update(find_schedules(__name__, __path__))

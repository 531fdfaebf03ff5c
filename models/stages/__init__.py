"""Stages of a target: their layers alone, together and as graphs, and the trial of a family."""

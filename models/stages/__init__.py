"""Stages of a target: how its layers run, alone, together and as graphs, and the trial of a family."""

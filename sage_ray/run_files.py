"""Names of the files of JSON lines in a run's folder that have no module of their own."""

ACTORS = "actors.jsonl"
"""Reports of the actors' clocks."""
ALARMS = "alarms.jsonl"
"""Alarms as they were told."""

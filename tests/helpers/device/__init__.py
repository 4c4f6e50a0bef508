"""Launches in the emulator and on a GPU: schedules, planted faults, PTX, graphs, streams and sanitizers."""

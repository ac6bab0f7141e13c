"""Builds artifacts: reads sources, builds graphs, runs the passes, writes files."""

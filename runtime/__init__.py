"""Runs artifacts: sessions, buffers, slots, and the decoding loop."""

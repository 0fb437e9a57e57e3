"""Checkpoints of other formats: in and out, without JAX and in bounded memory."""

"""Bytes in and out: TensorStore, digests, durability, the commit. No JAX."""

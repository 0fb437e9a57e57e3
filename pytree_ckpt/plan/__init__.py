"""What to do, decided from plain data: no JAX, no TensorStore, no files."""

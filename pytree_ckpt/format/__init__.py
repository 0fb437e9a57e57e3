"""What a checkpoint is: pure data, no JAX, no TensorStore, no files."""

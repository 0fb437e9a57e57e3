"""The only place that knows JAX: pytrees, shardings and devices to plain data and back."""

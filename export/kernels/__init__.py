"""Makes the table of op schemas and kernels that the type checks read."""

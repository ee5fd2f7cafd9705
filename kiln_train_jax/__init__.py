"""The JAX engine and trainer of Kiln."""

"""Models built from the attention layers."""

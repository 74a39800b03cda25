"""Training: state, objective, optimizer, checkpoints, metrics and the loop."""

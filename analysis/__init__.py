"""What is learned from trained models: curves, scores, costs and reports."""

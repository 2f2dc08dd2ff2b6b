"""Graph backends: capture a step once, replay it without running model code."""

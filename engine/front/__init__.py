"""The front: HTTP in, tokens to and from the engine. Runs in its own process and never imports torch."""

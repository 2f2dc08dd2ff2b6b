"""The engine host's runtime: builds, generations, graph backends, the swap, and the serving front."""

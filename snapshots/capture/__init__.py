"""Reading a live process: what is mapped, what was written, what the bytes are."""

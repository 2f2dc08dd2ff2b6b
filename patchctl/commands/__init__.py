"""One module per group of commands. They parse, call and print; nothing else."""

"""The agent: owns an engine host's processes, its journal, and every decision to change a build."""

"""patchctl: sign, gate, hot-swap, verify and commit (or roll back) hotfixes on live inference engines."""

__version__ = "0.1.0"

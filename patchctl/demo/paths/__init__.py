"""Request paths of the demo builds: package data, copied into builds and run from there."""

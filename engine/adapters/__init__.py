"""Adapters to engines that people already run, behind one port (:mod:`engine.adapters.port`)."""

"""The patch file: compose it from two builds, read it strictly, apply it to a base build.

Everything in the file follows from its config (:mod:`.config`): the OCI manifest and index are
recomputed from it and compared, so a patch file has one valid byte sequence and no room for extras.
"""

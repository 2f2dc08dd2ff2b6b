"""Snapshots on disk: content-addressed chunks, one manifest per snapshot, retention.

Layout of a store folder::

    lock                    held exclusively by whoever writes, shared by whoever reads
    incoming/               files being written; worthless after a crash, emptied by the next writer
    chunks/<blake3>         1 MiB of tensor or page-digest content each, framed by :mod:`snapshots.store.frames`
    manifests/<id>.json     a snapshot; it exists only after every chunk it names is durable
"""

"""Staging in the front: a verified build's tokenizer and request path, loaded beside the active ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.build import BuildInvalidError, read_manifest
from engine.front.assets import ModelAssets, load_assets
from engine.front.checked import BuildRefusedError
from engine.front.generations import Generation
from engine.front.path import PathServices, load_request_path


def load_generation(number: int, folder: Path, digest: str, resident: Sequence[ModelAssets] = ()) -> Generation:
    """Load the front's half of a build. Slow: run it off the event loop.

    Args:
        number: the generation id it gets.
        folder: where the build lies.
        digest: which build that must be.
        resident: assets of the generations in use; a tokenizer they share is not loaded twice.

    Raises:
        BuildRefusedError: the folder does not hold the build ``digest``, or cannot be served.
    """
    try:
        manifest = read_manifest(folder)
    except BuildInvalidError as error:
        raise BuildRefusedError(str(error)) from error
    if manifest.digest != digest:
        raise BuildRefusedError(f"the folder holds {manifest.digest}, not {digest}")
    assets = load_assets(folder, manifest, resident)
    loaded = load_request_path(folder, manifest, PathServices(assets.encode, assets.render_chat))
    return Generation(number, digest, manifest.name, assets, loaded)

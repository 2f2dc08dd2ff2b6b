"""The OCI documents of a patch file, as a pure function of its config.

Shapes follow the OCI image specification 1.1 (image-layout.md, manifest.md "Guidelines for Artifact
Usage"), so the file can be pushed to a registry with the digests it has on disk.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import rfc8785

from patchctl.bundle.config import PatchConfig, Put

ARTIFACT_TYPE = "application/vnd.patchctl.patch.v1+json"
CONFIG_TYPE = "application/vnd.patchctl.patch.config.v1+json"
FILE_TYPE = "application/vnd.patchctl.patch.file.v1"
TENSORS_TYPE = "application/vnd.patchctl.patch.tensors.v1"
_MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
_INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
_EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
# A manifest should have a layer; this is the content the specification gives to one that says nothing.
EMPTY_LAYER = b"{}"
# The size registries must accept (distribution-spec); far above FILES_MAX descriptors.
MANIFEST_BYTES_MAX = 4 << 20


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: media type, hex sha256, size."""

    media_type: str
    sha256: str
    size_bytes: int

    def descriptor(self) -> dict[str, str | int]:
        """The OCI descriptor."""
        return {"mediaType": self.media_type, "digest": f"sha256:{self.sha256}", "size": self.size_bytes}


def layers(config: PatchConfig) -> tuple[Layer, ...]:
    """The layers a config needs: the tensor pack, then stored files by digest, each content once."""
    found: list[Layer] = []
    if config.tensor_pack:
        pack = config.tensor_pack
        found.append(Layer(TENSORS_TYPE, pack.digest.removeprefix("sha256:"), pack.size_bytes))
    files = {action.sha256: action.size_bytes for action in config.files if isinstance(action, Put)}
    found += [Layer(FILE_TYPE, sha256, size) for sha256, size in sorted(files.items())]
    if not found:
        found.append(Layer(_EMPTY_TYPE, hashlib.sha256(EMPTY_LAYER).hexdigest(), len(EMPTY_LAYER)))
    return tuple(found)


def encode_manifest(config: PatchConfig, config_bytes: bytes) -> bytes:
    """The image manifest, canonical; ``config_bytes`` is ``config`` encoded."""
    blob = Layer(CONFIG_TYPE, hashlib.sha256(config_bytes).hexdigest(), len(config_bytes))
    return rfc8785.dumps(
        {
            "schemaVersion": 2,
            "mediaType": _MANIFEST_TYPE,
            "artifactType": ARTIFACT_TYPE,
            "config": blob.descriptor(),
            "layers": [layer.descriptor() for layer in layers(config)],
        }
    )


def encode_index(manifest: bytes) -> bytes:
    """``index.json``, canonical, naming the one manifest."""
    descriptor = Layer(_MANIFEST_TYPE, hashlib.sha256(manifest).hexdigest(), len(manifest)).descriptor()
    return rfc8785.dumps(
        {
            "schemaVersion": 2,
            "mediaType": _INDEX_TYPE,
            "manifests": [{**descriptor, "artifactType": ARTIFACT_TYPE}],
        }
    )

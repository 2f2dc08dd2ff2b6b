"""Bytes → checked config: the only way a config read from a file becomes usable. Pure."""

from __future__ import annotations

import msgspec
import rfc8785

from patchctl.bundle.config import PatchConfig
from patchctl.bundle.consistency import ConfigInvalidError, check_config

# 4 MiB of target manifest plus about 400 bytes for each of 20,000 changed tensors fits.
CONFIG_BYTES_MAX = 16 << 20


class ConfigUnsupportedError(ConfigInvalidError):
    """A patch config has a schema version this program does not know."""


class _Version(msgspec.Struct):
    schema_version: int


def decode_config(raw: bytes) -> PatchConfig:
    """Parse a config and check that it is canonical and consistent.

    Re-encoding what was parsed and comparing refuses duplicate keys, omitted defaults, odd spacing
    and alternative number forms in one stroke.

    Raises:
        ConfigUnsupportedError: another schema version.
        ConfigInvalidError: anything else that is wrong with it.
    """
    if len(raw) > CONFIG_BYTES_MAX:
        raise ConfigInvalidError(f"the config has {len(raw)} bytes, more than {CONFIG_BYTES_MAX}")
    try:
        version = msgspec.json.decode(raw, type=_Version).schema_version
        if version != 1:
            raise ConfigUnsupportedError(f"the config has schema version {version}, this program reads version 1")
        config = msgspec.json.decode(raw, type=PatchConfig)
        canonical = config.encode()
    except (msgspec.MsgspecError, rfc8785.CanonicalizationError, RecursionError, UnicodeError) as error:
        raise ConfigInvalidError(f"the config does not parse: {error}") from error
    if canonical != raw:
        raise ConfigInvalidError("the config is not in canonical form (RFC 8785)")
    check_config(config)
    return config

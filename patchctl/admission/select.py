"""Which engine decides: the configured OPA server, else the embedded one. The decision names the one used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from patchctl.admission.engine import PolicyEngine

URL_VARIABLE = "PATCHCTL_OPA_URL"

EngineChoice = Literal["auto", "embedded", "server"]


def select_engine(environ: Mapping[str, str], choice: EngineChoice = "auto") -> PolicyEngine:
    """An engine for ``choice``; a configured server that is down denies, nothing falls back to another engine.

    Args:
        environ: usually ``os.environ``; ``PATCHCTL_OPA_URL`` configures the server.
        choice: ``auto`` takes the server when one is configured.

    Raises:
        PatchctlError: ``gate.engine_config``: no or an unusable server URL.
    """
    url = environ.get(URL_VARIABLE, "")
    if choice == "server" or (choice == "auto" and url):
        from patchctl.admission.opa_server import OpaServerEngine

        return OpaServerEngine(url)
    from patchctl.admission.embedded import EmbeddedEngine

    return EmbeddedEngine()

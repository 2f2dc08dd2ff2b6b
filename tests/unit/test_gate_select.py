from __future__ import annotations

import pytest

from patchctl.admission.embedded import EmbeddedEngine
from patchctl.admission.opa_server import OpaServerEngine
from patchctl.admission.select import select_engine
from patchctl.errors import ExitCode, PatchctlError

URL = "http://127.0.0.1:8181"


def test_auto_takes_the_configured_server_else_the_embedded_engine() -> None:
    assert select_engine({}).name == "embedded"
    assert select_engine({"PATCHCTL_OPA_URL": ""}).name == "embedded"
    assert select_engine({"PATCHCTL_OPA_URL": URL}).name == "server"


def test_choice_is_obeyed() -> None:
    assert isinstance(select_engine({"PATCHCTL_OPA_URL": URL}, "embedded"), EmbeddedEngine)
    assert isinstance(select_engine({"PATCHCTL_OPA_URL": URL}, "server"), OpaServerEngine)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8181",
        "ftp://127.0.0.1",
        "http://",
        "http://127.0.0.1:8181/prefix",
        "http://127.0.0.1:8181?x=1",
        "http://user:secret@127.0.0.1:8181",
        "http://127.0.0.1:99999",
        "http://opa.example:8181",
        "http://127.0.0.1.example",
        "http://[::1",
    ],
)
def test_unusable_server_urls_are_refused(url: str) -> None:
    with pytest.raises(PatchctlError) as caught:
        select_engine({"PATCHCTL_OPA_URL": url}, "server")
    assert (caught.value.code, caught.value.exit_code) == ("gate.engine_config", ExitCode.USAGE)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", [URL, "http://localhost", "http://[::1]:8181/", "https://opa.example"])
def test_usable_server_urls(url: str) -> None:
    select_engine({"PATCHCTL_OPA_URL": url}).close()

"""The OPA server adapter, through opa-python-client; its traps are answered here.

The server's policies are shared state that anyone with its port may change, so every decision is
sandwiched: the modules and data on the server are read back and compared with ours before and after the
evaluation. Its client rewrites rejected modules (``rego_compat``), retries, honours proxy variables,
follows redirects, answers an undefined result with ``{}`` and has no common exception: none of that gets through.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from patchctl.admission.engine import ENTRYPOINT, EngineError, Evaluation
from patchctl.admission.policy import ROOT, Module, PolicySet
from patchctl.errors import ExitCode, PatchctlError

# One decision takes milliseconds; the client's own default of 1.5 s denies on a loaded host.
TIMEOUT_S = 5.0
_HTTP_PORTS = {"http": 80, "https": 443}
# OPA reads only the literal text "true".
_QUERY = {"provenance": "true", "strict-builtin-errors": "true"}


def _config_error(why: str) -> PatchctlError:
    return PatchctlError(
        code="gate.engine_config",
        what="the policy server cannot be used",
        why=why,
        exit_code=ExitCode.USAGE,
        next_command="export PATCHCTL_OPA_URL=http://127.0.0.1:8181",
    )


def _parse(url: str) -> tuple[bool, str, int]:
    """``(tls, host, port)`` of a server URL, which is never echoed because it may hold a password.

    Plain HTTP is for this host only, where nobody in between can answer.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise _config_error("PATCHCTL_OPA_URL is no URL") from error
    host = parts.hostname or ""
    if parts.scheme not in _HTTP_PORTS or not host or parts.path not in ("", "/") or parts.query or parts.username:
        raise _config_error("PATCHCTL_OPA_URL is not http(s)://host:port")
    if parts.scheme == "http" and not _loopback(host):
        raise _config_error(
            "PATCHCTL_OPA_URL has plain HTTP to another machine: it is accepted on loopback only, use https"
        )
    bracketed = f"[{host}]" if ":" in host else host
    return parts.scheme == "https", bracketed, port or _HTTP_PORTS[parts.scheme]


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Term(msgspec.Struct, frozen=True):
    value: str


class _Package(msgspec.Struct, frozen=True):
    path: Annotated[tuple[_Term, ...], msgspec.Meta(min_length=2)]  # "data", then the package's own parts


class _Ast(msgspec.Struct, frozen=True):
    package: _Package


class _Held(msgspec.Struct, frozen=True):
    """A module on the server; of its syntax tree only the package is read."""

    id: str
    raw: str
    ast: _Ast


class _Policies(msgspec.Struct, frozen=True):
    result: tuple[_Held, ...]


class OpaServerEngine:
    """A :class:`PolicyEngine` on an OPA 1.x server that patchctl may upload its policy to."""

    name = "server"

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        from opa_client.opa import OpaClient

        tls, host, port = _parse(url)
        self._url = url
        self._client: Any = OpaClient(host=host, port=port, ssl=tls, retries=0, timeout=timeout_s)
        session = self._client._session  # noqa: SLF001 - the client has no public way to set these
        session.trust_env = False  # no HTTP_PROXY, no .netrc
        # The client needs the server's own redirect of /v1/policies/; one to anywhere else finds no adapter.
        origin = f"{self._client.schema}{host}:{port}/"
        adapter = session.get_adapter(origin)
        session.adapters.clear()
        session.mount(origin, adapter)

    def evaluate(self, policy: PolicySet, document: bytes, query: str = ENTRYPOINT) -> Evaluation:
        """See :class:`PolicyEngine`.

        Raises:
            EngineError: unreachable, undefined, or the server holds another policy than ours.
        """
        try:
            return self._evaluate(policy, document, query)
        except EngineError:
            raise
        except Exception as error:  # requests, opa_client and ValueError share no base
            raise EngineError(
                _code(error),
                f"the OPA server at {self._url} gave no usable answer ({type(error).__name__}: {error}): "
                "see its log or start it, or unset PATCHCTL_OPA_URL for the embedded engine",
            ) from error

    def close(self) -> None:
        """Close the connections."""
        self._client.close_connection()

    def _evaluate(self, policy: PolicySet, document: bytes, query: str) -> Evaluation:
        if self._difference(policy):
            self._upload(policy)
        self._require_equal(policy, "before")
        package, _, rule = query.removeprefix("data.").rpartition(".")
        reply = self._client.query_rule(json.loads(document), package, rule, query_params=_QUERY)
        self._require_equal(policy, "after")
        if "result" not in reply:
            raise EngineError("gate.result_undefined", f"{query} has no value on the OPA server")
        engine_version = reply.get("provenance", {}).get("version")
        if not isinstance(engine_version, str):
            raise EngineError("gate.result_malformed", "the OPA server sent no provenance")
        return Evaluation(reply["result"], engine_version)

    def _upload(self, policy: PolicySet) -> None:
        """Replace everything of ours on the server; the sandwich decides whether that worked."""
        ids = [policy_id for policy_id in self._client.get_policies_list() if policy_id.startswith(f"{ROOT}/")]
        _until_done(ids, self._client.delete_policy)
        self._client.update_or_create_data(policy.data[ROOT], ROOT)
        sources = {_policy_id(module): module.source for module in policy.modules}
        _until_done(
            list(sources),
            lambda policy_id: self._client.update_policy_from_string(sources[policy_id], policy_id, rego_compat=False),
        )

    def _held(self) -> tuple[_Held, ...]:
        """Every module in one call: the client asks once per module, with its syntax tree each time (110 ms)."""
        session = self._client._session  # noqa: SLF001 - as in the constructor
        response = session.get(f"{self._client.root_url}/policies", timeout=self._client.timeout)
        response.raise_for_status()
        return msgspec.json.decode(response.content, type=_Policies).result

    def _require_equal(self, policy: PolicySet, when: str) -> None:
        if difference := self._difference(policy):
            raise EngineError("gate.policy_mismatch", f"{when} the evaluation the OPA server held {difference}")

    def _difference(self, policy: PolicySet) -> str:
        """What the server holds that we did not mean, or ""."""
        ours = {_policy_id(module): module.source for module in policy.modules}
        there = {held.id: held for held in self._held()}
        for policy_id, source in ours.items():
            if policy_id not in there:
                return f"no module {policy_id}"
            if there[policy_id].raw != source:
                return f"another text of module {policy_id}"
        for held in there.values():
            if held.ast.package.path[1].value == ROOT and held.id not in ours:
                return f"a foreign module {held.id} in package {ROOT}: remove it"
        for key, value in policy.data[ROOT].items():
            if self._client.get_data(f"{ROOT}/{key}")["result"] != value:
                return f"other data at {ROOT}.{key}"
        return ""


def _code(error: Exception) -> str:
    """Which failure it was: the policy did not compile or evaluate, nobody answered in time, or anything else."""
    from opa_client.errors import RegoParseError
    from requests.exceptions import HTTPError

    if isinstance(error, RegoParseError | HTTPError):
        return "gate.policy_failed"
    cause: BaseException | None = error
    while cause is not None:  # the client's retries wrap the time-out in a connection error
        if isinstance(cause, TimeoutError):
            return "gate.engine_timeout"
        cause = cause.__cause__ or cause.__context__
    return "gate.engine_unreachable"


def _policy_id(module: Module) -> str:
    return f"{ROOT}/{module.name}"


def _until_done(ids: list[str], action: Callable[[str], object]) -> None:
    """Repeat ``action`` on what is left: the server compiles on each call, and modules call each other's functions.

    Raises:
        Exception: the client's own, when a whole pass got nothing done.
    """
    while ids:
        left, last = [], None
        for policy_id in ids:
            try:
                action(policy_id)
            except Exception as error:
                left.append(policy_id)
                last = error
        if last is not None and len(left) == len(ids):
            raise last
        ids = left

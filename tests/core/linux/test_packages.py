"""What is said where a Python package is missing."""

import sys

import pytest

from kproxy_core import __version__
from kproxy_core.kube.access import AccessError, CurrentAccess
from kproxy_core.kube.transport import JSON, accept_header
from kproxy_core.linux import packages

PROTOBUF = "application/vnd.kubernetes.protobuf"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without extras."""
    monkeypatch.setattr(packages, "is_installed", lambda package: False)


def test_installed_packages_are_found_and_others_are_not() -> None:
    assert packages.is_installed("msgspec")
    assert packages.is_installed("protobuf")
    assert not packages.is_installed("no_such_package")
    assert not packages.is_installed("no_such_package.module")
    assert packages.lacking("api", "msgspec") == ""


def test_the_command_names_the_version_that_is_installed() -> None:
    command = f"pip install 'kproxy[top]=={__version__}'"
    assert packages.lacking("top", "no_such", "msgspec") == f"needs the package no_such: {command}"
    assert packages.lacking("top", "no_such", "nor") == f"needs the packages no_such and nor: {command}"
    assert packages.lacking("top", "a_b", "b_c", "c_d") == f"needs the packages a_b, b_c and c_d: {command}"


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(("master", "kubeconfig", "environment", "said"), [
    (None, "/etc/k", {}, "--kubeconfig needs the packages kubernetes and urllib3"),
    ("http://192.0.2.1", None, {}, "--master needs the package urllib3"),
    ("http://192.0.2.1", None, {"HTTPS_PROXY": "p"}, "--master needs the packages kubernetes and urllib3"),
    (None, None, {"KUBERNETES_SERVICE_HOST": "h"},
     "the service account needs the packages kubernetes and urllib3"),
])  # fmt: skip
def test_an_option_that_leads_to_an_api_server_is_named(
    master: str | None, kubeconfig: str | None, environment: dict[str, str], said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(AccessError) as refused:
        CurrentAccess(master, kubeconfig).begin()
    assert str(refused.value) == f"{said}: pip install 'kproxy[api]=={__version__}'"


@pytest.mark.usefixtures("bare")
def test_without_protobuf_json_is_requested() -> None:
    assert accept_header(f"{PROTOBUF},{JSON}") == JSON
    assert accept_header(PROTOBUF) is None


def test_a_binding_is_looked_for_here_and_in_the_python_of_the_distribution() -> None:
    assert packages.interpreters("no_such_binding") == ["/usr/bin/python3"]
    assert packages.interpreters("json") == [sys.executable, "/usr/bin/python3"]

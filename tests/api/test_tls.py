"""HTTPS on the port: a real handshake, a stream over it, and what is said of files that do not serve."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from pdd.api.tls import server_context
from pdd.commands import preflight
from pdd.config_load import ConfigProblems, load
from pdd.errors import ConfigError
from tests.api.conftest import SETTINGS, running
from tests.api.fakes import FakeService

BODY = {"prompt": "x", "stream": True}


@pytest.fixture(scope="session")
def pem(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A self-signed certificate of localhost, its key, a key of another, one with a passphrase, both in one file."""
    directory = tmp_path_factory.mktemp("tls")
    files = {name: directory / f"{name}.pem" for name in ("cert", "key", "other", "locked", "both")}
    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-x509", "-subj", "/CN=localhost", "-addext",
           "subjectAltName=DNS:localhost,IP:127.0.0.1", "-days", "2"]  # fmt: skip

    def openssl(*words: object) -> None:
        subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)

    openssl("req", *new, "-nodes", "-keyout", files["key"], "-out", files["cert"])
    openssl("req", *new, "-nodes", "-keyout", files["other"], "-out", directory / "unused.pem")
    openssl("ec", "-in", files["key"], "-aes256", "-passout", "pass:secret", "-out", files["locked"])
    files["both"].write_text(files["cert"].read_text() + files["key"].read_text())
    for path in files.values():
        path.chmod(0o600)
    return files


@pytest.mark.parametrize("names", [("cert", "key"), ("both",)])
async def test_a_stream_over_https(service: FakeService, pem: dict[str, Path], names: tuple[str, ...]) -> None:
    certificate, *key = (pem[name] for name in names)
    tls = server_context(certificate, *key or [None])
    trust = ssl.create_default_context(cafile=str(pem["cert"]))
    async with running(service, tls=tls) as node, httpx.AsyncClient(verify=trust, trust_env=False, timeout=20) as client:
        url = f"https://127.0.0.1:{node.port}"
        assert (await client.get(f"{url}/health")).status_code == 200
        async with client.stream("POST", f"{url}/v1/completions", json=BODY) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert len(lines) > 1
        with pytest.raises(httpx.HTTPError):  # no plain HTTP beside it
            await node.http.get("/health")


async def test_a_client_of_old_tls_is_refused_and_costs_nothing(
    service: FakeService, pem: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    async with running(service, tls=server_context(pem["cert"], pem["key"])) as node:
        reader, writer = await node.raw(b"\x16\x03\x01\x00\x05hello")
        with suppress(ConnectionError):
            async with asyncio.timeout(10):
                await reader.read()
        writer.close()
        trust = ssl.create_default_context(cafile=str(pem["cert"]))
        async with httpx.AsyncClient(verify=trust, trust_env=False) as client:
            assert (await client.get(f"https://127.0.0.1:{node.port}/health")).status_code == 200
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    ("certificate", "key", "message"),
    [
        ("cert", "other", "the key is of another certificate"),
        ("cert", "locked", "no PEM certificate with its key can be read"),
        ("cert", None, "no PEM certificate with its key can be read"),
        ("key", "key", "no PEM certificate with its key can be read"),
        ("nowhere", "key", "cannot be read: No such file"),
    ],
)
def test_files_that_do_not_serve_are_told(pem: dict[str, Path], certificate: str, key: str | None, message: str) -> None:
    paths = {**pem, "nowhere": Path("/nonexistent/cert.pem")}
    with pytest.raises(ConfigError, match=message):
        server_context(paths[certificate], paths[key] if key else None)


def problems(*assignments: str) -> list[str]:
    config, origins = load(env={}, demo=True, search=False, assignments=assignments)
    return [str(problem) for problem in preflight.problems(config, origins, demo=True)]


def test_config_check_looks_at_the_certificate(pem: dict[str, Path]) -> None:
    assert problems(f"api.tls_cert={pem['cert']}", f"api.tls_key={pem['key']}") == []
    [wrong] = problems(f"api.tls_cert={pem['cert']}", f"api.tls_key={pem['other']}")
    assert "api.tls_cert: no PEM certificate with its key can be read" in wrong
    assert problems("api.tls_cert=cert", "api.tls_key=key") == []  # systemd's, which did not start this
    pem["other"].chmod(0o644)
    both = pem["both"]
    both.chmod(0o644)
    [warning] = problems(f"api.tls_cert={both}")
    assert "can be read by every user" in warning
    with pytest.raises(ConfigProblems, match=r"the key of no certificate: set api\.tls_cert"):
        problems(f"api.tls_key={pem['key']}")


async def test_headers_without_end_are_refused(service: FakeService) -> None:
    """The bound is h11's, 16 KiB; what comes after it is not read."""
    async with running(service, SETTINGS) as node:
        reader, writer = await node.raw(b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"x-pad: y\r\n" * 20_000)
        with suppress(ConnectionError):
            async with asyncio.timeout(10):
                assert (await reader.read()).startswith(b"HTTP/1.1 400")
        writer.close()
        assert (await node.http.get("/health")).status_code == 200

"""A certificate authority nobody knows, and a server certificate it signed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def write_certificates(folder: Path) -> None:
    """Write ``authority.pem``, ``server.pem`` and ``server.key``.

    The server certificate is for 127.0.0.1 alone.
    """
    folder.mkdir(exist_ok=True)
    authority_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in "AB")
    authority = x509.Name.from_rfc4514_string("CN=Authority of these tests")
    signer = authority_key.public_key()
    root = (
        certificate(authority, authority, signer)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage(signs=True), critical=True)
        .add_extension(
            x509.SubjectKeyIdentifier.from_public_key(signer), critical=False
        )
    )
    host = x509.IPAddress(ip_address("127.0.0.1"))
    name = x509.Name.from_rfc4514_string("CN=127.0.0.1")
    leaf = (
        certificate(name, authority, server_key.public_key())
        .add_extension(x509.SubjectAlternativeName([host]), critical=False)
        .add_extension(usage(signs=False), critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False
        )
    )
    for file, builder in (("authority.pem", root), ("server.pem", leaf)):
        signed = builder.sign(authority_key, hashes.SHA256())
        (folder / file).write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    (folder / "server.key").write_bytes(
        server_key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )


def certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
    )


def usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )

"""Throw-away certificates for servers and clients of tests."""

import subprocess
from pathlib import Path


def certificate(folder: Path, name: str, *, host: str = "IP:127.0.0.1", days: int = 2) -> Path:
    """A certificate that signs itself, ``<name>.crt``, with its key beside it, ``<name>.key``."""
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        str(days),
    ]
    files = ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.crt")]
    names = ["-subj", f"/CN={name}", "-addext", f"subjectAltName={host}"]
    subprocess.run([*command, *files, *names], check=True, capture_output=True)
    return folder / f"{name}.crt"

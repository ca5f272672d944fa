"""Makes a run's secrets, which only its processes may know: a token, and certificates for the hosts on which they listen."""

import secrets
import shutil
import subprocess
from pathlib import Path

from nemo_style_rlhf.errors import UserError

KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
DAYS = "3650"


class RunSecrets:
    """A folder that only this user can enter, on the file system that the run's hosts share. It goes with the run.

    The run has a certificate authority of its own, since a process that is started again may be on a host that was not there
    when the run began.
    """

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            UserError: the folder cannot be made, or this host has no openssl.
        """
        self._folder = folder
        self.remove()  # that of an earlier start
        try:
            folder.mkdir(mode=0o700, parents=True)
        except OSError as error:
            raise UserError(
                f"{folder}, for the run's token, cannot be made ({error.strerror}): give another run.output_dir"
            ) from error
        self.token.touch(mode=0o600)
        self.token.write_text(secrets.token_hex(32))
        self.mark = secrets.token_hex(8)
        (folder / "mark").write_text(self.mark)
        self._openssl(
            "req",
            "-x509",
            *KEY,
            "-days",
            DAYS,
            "-subj",
            f"/CN=run {self.mark}",
            "-keyout",
            str(folder / "ca.key"),
            "-out",
            str(self.ca),
        )

    @property
    def token(self) -> Path:
        return self._folder / "token"

    @property
    def ca(self) -> Path:
        """The authority's certificate, with which clients verify servers."""
        return self._folder / "ca.crt"

    def certificate(self, name: str, address: str) -> tuple[Path, Path]:
        """A new certificate of the server ``name`` on the host with this IP address, and its key."""
        certificate, key = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        request, names = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        names.write_text(f"subjectAltName=IP:{address}\n")
        self._openssl("req", *KEY, "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(request))
        signed = ["-CA", str(self.ca), "-CAkey", str(self._folder / "ca.key"), "-set_serial", str(secrets.randbits(63))]
        signed += ["-days", DAYS, "-extfile", str(names), "-out", str(certificate)]
        self._openssl("x509", "-req", "-in", str(request), *signed)
        return certificate, key

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _openssl(self, *words: str) -> None:
        try:
            done = subprocess.run(["openssl", *words], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        except FileNotFoundError as error:
            raise UserError("this host has no openssl, which makes the run's certificates: install it") from error
        if done.returncode:
            raise UserError(f"openssl {words[0]} made no certificate for the run: {' '.join(done.stderr.split())}")

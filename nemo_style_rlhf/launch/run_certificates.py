"""Makes a run's secrets, which only its processes may know: a token, and certificates for the hosts on which they listen.

Imported by any Python from 3.9 on, see slurm_job.py. Standard library only.
"""

import secrets
import shutil
import subprocess
from pathlib import Path

from nemo_style_rlhf.errors import UserError

KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
DAYS = "3650"


class Authority:
    """A certificate authority of one run, in a folder that only this user can enter. It goes with the run.

    A process that is started again may be on a host that was not there when the run began, and needs a certificate then.
    """

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            UserError: the folder cannot be made, or this host has no openssl.
        """
        self.folder = folder
        self.remove()  # that of an earlier start
        try:
            folder.mkdir(mode=0o700, parents=True)
        except OSError as error:
            raise UserError(
                f"{folder}, for the run's secrets, cannot be made ({error.strerror}): give another output folder"
            ) from error
        subject = ["-days", DAYS, "-subj", f"/CN=run {secrets.token_hex(8)}"]
        try:
            self._openssl("req", "-x509", *KEY, *subject, "-keyout", str(folder / "ca.key"), "-out", str(self.ca))
        except BaseException:
            self.remove()
            raise

    @property
    def ca(self) -> Path:
        """The authority's certificate, with which clients verify servers."""
        return self.folder / "ca.crt"

    def certificate(self, name: str, *addresses: str) -> tuple[Path, Path]:
        """A new certificate of the server ``name`` on the hosts with these IP addresses, and its key."""
        certificate, key = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        request, names = self.folder / f"{name}.csr", self.folder / f"{name}.ext"
        names.write_text(f"subjectAltName={','.join(f'IP:{address}' for address in addresses)}\n")
        self._openssl("req", *KEY, "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(request))
        signed = ["-CA", str(self.ca), "-CAkey", str(self.folder / "ca.key"), "-set_serial", str(secrets.randbits(63))]
        signed += ["-days", DAYS, "-extfile", str(names), "-out", str(certificate)]
        self._openssl("x509", "-req", "-in", str(request), *signed)
        return certificate, key

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _openssl(self, *words: str) -> None:
        try:
            done = subprocess.run(["openssl", *words], stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
        except FileNotFoundError as error:
            raise UserError("this host has no openssl, which makes the run's certificates: install it") from error
        if done.returncode:
            raise UserError(f"openssl {words[0]} made no certificate for the run: {' '.join(done.stderr.split())}")


class RunSecrets(Authority):
    """An authority with a token, and a mark that shows that the folder is shared by the run's hosts."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.token.touch(mode=0o600)
        self.token.write_text(secrets.token_hex(32))
        self.mark = secrets.token_hex(8)
        (folder / "mark").write_text(self.mark)

    @property
    def token(self) -> Path:
        return self.folder / "token"

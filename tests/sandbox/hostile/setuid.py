"""Becomes another user."""

attempt("setuid", os.setuid, 0)
attempt("setgid", os.setgid, 0)
attempt("setgroups", os.setgroups, [0])
quiet = {"check": True, "capture_output": True, "stdin": subprocess.DEVNULL}
attempt("su", lambda: subprocess.run(["/usr/bin/su", "-c", "true"], **quiet))
os.chmod("main.py", 0o6777)
attempt("chown", os.chown, "main.py", 0, 0)
status = dict(line.split(":\t", 1) for line in open("/proc/self/status") if ":\t" in line)
rights = {int(status[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")}
print("rights", rights, status["NoNewPrivs"].strip())

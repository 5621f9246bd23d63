"""Writes to files and directories of the system."""

directories = "/ /usr /usr/bin /bin /lib /etc /dev /root /proc/sys/kernel".split()
for directory in [*directories, sys.prefix, os.path.dirname(os.__file__), *sys.path[1:]]:
    attempt(directory, lambda: open(os.path.join(directory, "planted"), "w").write("x"))
files = "/proc/sys/kernel/core_pattern /proc/sysrq-trigger /proc/sys/vm/drop_caches /usr/bin/env".split()
for file in [*files, os.__file__]:
    attempt(file, lambda: open(file, "r+b", 0).write(b"1"))
attempt("spared for want of memory", lambda: open("/proc/self/oom_score_adj", "w", 1).write("-1000\n"))
attempt("chmod", os.chmod, os.__file__, 0o777)

"""Raises its limits, and its priority."""

for name in ("AS", "CPU", "NPROC", "FSIZE", "NOFILE", "CORE", "MEMLOCK", "MSGQUEUE"):
    attempt(name, resource.setrlimit, getattr(resource, "RLIMIT_" + name), (resource.RLIM_INFINITY,) * 2)
attempt("nice", os.nice, -5)
attempt("real time", os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(50))
